"""Encodes and decodes the thinking of a trajectory, a part of the objects of ``rollouts/``.

Its declared sizes are read from an outline first, so that a group can be refused before a list is
made of its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from deltawire.wire.objects import decode_packed, encode_packed

NIL = b"\xc0"
"""None in MessagePack."""


class StoredTurn(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a turn thought, and how it ended."""

    thought: Annotated[int, Meta(ge=0, lt=1 << 31)]
    ended: Literal["answered", "forced", "cut", "stop_string", "limit", "stray_mark"]


class StoredThinking(msgspec.Struct, frozen=True, array_like=True):
    """Thinking as it is stored; ``forced`` are pairs of int32, the ranges of inserted tokens."""

    budget: Annotated[int, Meta(ge=1, lt=1 << 31)]
    turns: Annotated[list[StoredTurn], Meta(max_length=1_000_000)]
    forced: bytes = b""


class _ThinkingOutline(msgspec.Struct, frozen=True, array_like=True):
    """The thinking of a trajectory whose turns are not decoded yet."""

    budget: int
    turns: msgspec.Raw
    forced: memoryview = memoryview(b"")


def encode_thinking(
    budget: int, turns: Sequence[tuple[int, str]], forced: Sequence[tuple[int, int]]
) -> msgspec.Raw:
    """Encodes thinking; `NIL` stands for none."""
    stored = [StoredTurn(thought, ended) for thought, ended in turns]  # type: ignore[arg-type]
    ranges = np.array(forced, "<i4").reshape(-1, 2).tobytes()
    return msgspec.Raw(encode_packed(StoredThinking(budget, stored, ranges)))


def declared_thinking(raw: msgspec.Raw, *, run: str, key: str) -> int:
    """Returns how many turns and ranges are declared; 0 turns for a value that is no array. Raises
    `CorruptError` for something else than thinking."""
    thinking = _outline(raw, run=run, key=key)
    if thinking is None:
        return 0
    head = bytes(memoryview(thinking.turns)[:5])
    turns = 0
    if head[0] & 0xF0 == 0x90:
        turns = head[0] & 0x0F
    elif head[0] in (0xDC, 0xDD):
        turns = int.from_bytes(head[1 : 3 if head[0] == 0xDC else 5], "big")
    return turns + len(thinking.forced) // 8


def decode_thinking(raw: msgspec.Raw, *, run: str, key: str) -> StoredThinking | None:
    """Decodes thinking, None without; raises `CorruptError` for something else."""
    if _outline(raw, run=run, key=key) is None:
        return None
    return decode_packed(memoryview(raw), StoredThinking, run=run, key=key)


def _outline(raw: msgspec.Raw, *, run: str, key: str) -> _ThinkingOutline | None:
    if bytes(memoryview(raw)[:1]) == NIL:
        return None
    return decode_packed(memoryview(raw), _ThinkingOutline, run=run, key=key)


def thinking_fault(
    thinking: StoredThinking, mask: NDArray[np.uint8], turns: int, reused: int
) -> str:
    """Returns how thinking contradicts the tokens of its trajectory, which has so many ``turns``
    and ``reused`` tokens; empty if it does not."""
    if len(thinking.forced) % 8:
        return "ranges of inserted tokens that are not pairs"
    end = 0
    for start, stop in np.frombuffer(thinking.forced, "<i4").reshape(-1, 2).tolist():
        if not end <= start < stop <= len(mask) or mask[start:stop].any():
            return "ranges of inserted tokens that are not ranges of other tokens"
        end = stop
    if len(thinking.turns) > turns:
        return "the thinking of more turns than there are"
    if sum(turn.thought for turn in thinking.turns) > reused + int((mask == 1).sum()):
        return "more tokens of thinking than were drawn"
    return ""
