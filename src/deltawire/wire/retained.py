"""``retained.json``: which objects of a run its owner has deleted on purpose."""

from __future__ import annotations

import msgspec

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index

MAX_RETAINED_BYTES = 4096


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """Written before anything is deleted.

    Groups that versions before ``rollouts`` consumed or dropped may be gone, and archives of events
    with numbers below ``archives``.
    """

    format: int = FORMAT
    rollouts: Index = 0
    archives: Index = 0
