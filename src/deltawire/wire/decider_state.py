"""Decider's state: that a process which takes decisions by tests is alive.

``live/decider.json`` is replaced in place by `deltawire live decide`, each time that it looks.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.run import Identity

MAX_DECIDER_BYTES = 1 << 14


class DeciderState(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/decider.json``, for views: who decides, when it looked last, by its own
    clock, and what keeps it from measuring versions. ``ended`` says that it was stopped."""

    run: Identity
    by: Annotated[str, Meta(max_length=64)]
    host: Annotated[str, Meta(max_length=256)] = ""
    at: float
    alarm: Annotated[str, Meta(max_length=1024)] = ""
    ended: bool = False
