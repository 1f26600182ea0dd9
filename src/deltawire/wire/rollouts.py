"""``rollouts/``: a finished group, as one object.

Token arrays travel as little-endian bytes: ids int32, log-probabilities float32, versions int32,
loss mask uint8, one entry a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT, decode_packed, encode_packed

MAX_GROUP_BYTES = 256 << 20


class _Sequence(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    logprobs: bytes
    versions: bytes
    mask: bytes
    reward: float
    finish: Annotated[str, Meta(max_length=32)]


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    worker: Annotated[str, Meta(max_length=64)]
    nonce: Annotated[str, Meta(max_length=64)]
    task: Annotated[str, Meta(max_length=256)]
    temperature: float
    prompt: bytes
    sequences: Annotated[list[_Sequence], Meta(min_length=1, max_length=4096)]


@dataclass(frozen=True)
class Trajectory:
    """One completion of a group, behind the prompt that the group shares.

    Arrays of one length T. ``mask`` is 1 where the model drew the token and 0 where the
    environment wrote it; ``logprobs`` (nats) and ``versions`` hold only where it is 1.
    """

    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    mask_T: NDArray[np.uint8]
    reward: float
    finish: str


@dataclass(frozen=True)
class Group:
    """The completions sampled for one prompt: the unit of advantage and of storage."""

    worker: str
    nonce: str
    task: str
    temperature: float
    prompt: NDArray[np.int32]
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int:
        """The oldest version that drew any of its tokens."""
        return min(int(t.versions_T[t.mask_T == 1].min()) for t in self.trajectories)

    @property
    def newest_version(self) -> int:
        """The newest version that drew any of its tokens."""
        return max(int(t.versions_T[t.mask_T == 1].max()) for t in self.trajectories)

    @property
    def largest_token(self) -> int:
        """The largest token id in it."""
        return max(
            int(part.max()) for part in (self.prompt, *(t.tokens_T for t in self.trajectories))
        )

    @property
    def tokens(self) -> int:
        """How many tokens the model drew."""
        return sum(int(t.mask_T.sum()) for t in self.trajectories)


def encode_group(group: Group) -> bytes:
    """The object for ``rollouts/<worker>/<sequence>``."""
    return encode_packed(
        _Group(
            worker=group.worker,
            nonce=group.nonce,
            task=group.task,
            temperature=group.temperature,
            prompt=group.prompt.astype("<i4").tobytes(),
            sequences=[
                _Sequence(
                    t.tokens_T.astype("<i4").tobytes(),
                    t.logprobs_T.astype("<f4").tobytes(),
                    t.versions_T.astype("<i4").tobytes(),
                    t.mask_T.astype("u1").tobytes(),
                    float(t.reward),
                    t.finish,
                )
                for t in group.trajectories
            ],
        )
    )


def decode_group(data: bytes, *, run: str, key: str) -> Group:
    """Parse a group and check that its arrays fit each other.

    Raises `CorruptError` for anything else: wrong lengths, a trajectory the model drew nothing
    of, log-probabilities that are not finite or above 0, a negative token or version, a reward
    that is not finite, a temperature that is not finite or not above 0.
    """
    raw = decode_packed(data, _Group, run=run, key=key)
    fault = "" if raw.format == FORMAT else f"format {raw.format}"
    if not raw.prompt or len(raw.prompt) % 4:
        fault = fault or "a prompt that is not whole tokens"
    elif (np.frombuffer(raw.prompt, "<i4") < 0).any():
        fault = fault or "a negative token"
    if not (np.isfinite(raw.temperature) and raw.temperature > 0):
        fault = fault or f"temperature {raw.temperature}"
    trajectories = []
    for sequence in raw.sequences:
        fault = fault or _sequence_fault(sequence)
        if fault:
            raise CorruptError(f"group: {fault}", run=run, key=key)
        trajectories.append(
            Trajectory(
                np.frombuffer(sequence.tokens, "<i4"),
                np.frombuffer(sequence.logprobs, "<f4"),
                np.frombuffer(sequence.versions, "<i4"),
                np.frombuffer(sequence.mask, "u1"),
                sequence.reward,
                sequence.finish,
            )
        )
    if fault:
        raise CorruptError(f"group: {fault}", run=run, key=key)
    prompt = np.frombuffer(raw.prompt, "<i4")
    return Group(raw.worker, raw.nonce, raw.task, raw.temperature, prompt, trajectories)


def _sequence_fault(sequence: _Sequence) -> str:
    count = len(sequence.mask)
    if {len(sequence.tokens), len(sequence.logprobs), len(sequence.versions)} != {4 * count}:
        return "arrays of different lengths"
    mask = np.frombuffer(sequence.mask, "u1")
    if not count or mask.max() != 1:
        return "a trajectory without a token of the model's"
    if (np.frombuffer(sequence.tokens, "<i4") < 0).any():
        return "a negative token"
    drawn = mask == 1
    logprobs = np.frombuffer(sequence.logprobs, "<f4")[drawn]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        return "log-probabilities that are none"
    if (np.frombuffer(sequence.versions, "<i4")[drawn] < 0).any():
        return "a negative version"
    if not np.isfinite(sequence.reward):
        return "a reward that is not finite"
    return ""
