"""``retained.json`` states which objects of a run were deleted on purpose."""

from __future__ import annotations

import msgspec

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index

MAX_RETAINED_BYTES = 4096


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """The floors of deliberate deletion, written before anything is deleted.

    Groups that versions before ``rollouts`` consumed or dropped may be gone, and archives of events
    with numbers below ``archives``.
    """

    format: int = FORMAT
    rollouts: Index = 0
    archives: Index = 0
