"""Operator's state: whether deciding processes may begin canaries, or decide at all.

``live/operator.json`` is replaced in place, by `deltawire live pause`, ``freeze`` and ``resume``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.run import Identity

MAX_OPERATOR_BYTES = 1 << 14
Mode = Literal["running", "paused", "frozen"]


class OperatorState(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/operator.json``: ``paused`` begins no canary, ``frozen`` decides
    nothing. Decisions by hand are taken in any mode."""

    run: Identity
    mode: Mode = "running"
    at: float = 0.0
    by: Annotated[str, Meta(max_length=64)] = ""
    reason: Annotated[str, Meta(max_length=1024)] = ""
