"""What an engine is to those who sample from it, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from deltawire.codec import Digest, Patch

FinishReason = Literal["stop", "length"]
OnToken = Callable[[int], bool | None]


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. ``temperature`` 0 is greedy; log-probabilities are those of the
    tempered distribution that was sampled (of the untempered one when greedy)."""

    max_tokens: int
    temperature: float = 1.0


@dataclass
class Completion:
    """What one request produced: equally long lists, one entry a generated token. A token that
    ends a sequence is part of it; ``finish`` is then ``stop``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason = "length"
    experts: int = 0
    routes: list[NDArray[np.int32]] = field(default_factory=list)
    """Where an engine tells them, the expert choices of every token that was read, the prompt's
    first, each below ``experts``: parts of int32[positions, layers, experts chosen], one behind
    the other. The last token was not read."""


class Sampler(Protocol):
    """Continues token sequences, many at a time.

    Somebody calls `advance` again and again while there are requests; it works, or waits for an
    engine that works elsewhere, and lets other tasks of the event loop run.
    """

    version: int
    """The policy version that draws the next token; whoever swaps the weights sets it."""

    slots: int
    """How many sequences are decoded at a time; further requests wait for a place."""
    capacity: int
    """Tokens that a sequence may have, prompt included."""

    @property
    def active(self) -> int:
        """Requests not yet finished, waiting ones included."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Continue ``prompt``. ``on_token`` is told of each token as it is drawn; if it returns
        True no more are wanted, and an engine that still can ends the sequence there, with
        ``stop``.

        Cancelling the task that waits here cancels the request and frees its place. Raises
        `InputError` if the prompt is empty, or with ``max_tokens`` exceeds the capacity.
        """
        ...

    async def advance(self) -> int:
        """One unit of work; returns how many tokens it drew."""
        ...

    def cancel_all(self) -> None:
        """Forget every request without an answer; for when nobody waits any more."""
        ...


class Weights(Protocol):
    """The weights being served, at one version, patched in place between two calls of
    `Sampler.advance`; `deltawire.placement.live.LiveWeights` is one."""

    @property
    def version(self) -> int:
        """The version."""
        ...

    @property
    def digest(self) -> Digest:
        """Its digest."""
        ...

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Do what of the next `swap` can be done beside serving, in another thread. Raises
        `ResyncError`, as that would."""
        ...

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Take up a version whole and attested, or raise `ResyncError` and stay as it was."""
        ...

    def attest(self) -> Digest:
        """The digest of the live bits, recomputed from them."""
        ...
