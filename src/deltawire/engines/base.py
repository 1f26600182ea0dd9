"""Defines the interface of an engine: opened on a run, sampled from, and moved from version to
version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deltawire.codec import Digest, Patch
from deltawire.store import Bucket
from deltawire.sync import Steps
from deltawire.wire.run import Run

FinishReason = Literal["stop", "length"]
OnToken = Callable[[int], bool | None]


class Truncation(NamedTuple):
    """Restricts sampling to likely tokens: the fewest that make up the share ``top_p``, the
    ``top_k`` likeliest (0: all), and those with at least ``min_p`` times the likeliest one's
    probability. The defaults keep every token.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


EVERYTHING = Truncation()
"""Draws from all tokens."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. ``temperature`` 0 is greedy. Log-probabilities are those of the full
    tempered distribution, regardless of ``truncation`` (of the untempered one when greedy).
    """

    max_tokens: int
    temperature: float = 1.0
    truncation: Truncation = EVERYTHING


@dataclass
class Completion:
    """The result of one request: lists of equal length, one entry per generated token. A token
    that ends a sequence is part of it; ``finish`` is then ``stop``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason = "length"
    experts: int = 0
    routes: list[NDArray[np.int32]] = field(default_factory=list)
    """The expert choices of every token that was read, the prompt's first, if the engine records
    them: consecutive parts of int32[positions, layers, experts chosen], each below ``experts``. The
    last token was not read.
    """


class Sampler(Protocol):
    """Continues token sequences, many at a time.

    The owner calls `advance` repeatedly while there are requests. It does one unit of work, or
    waits for an engine in another process, and lets other tasks of the event loop run.

    Example::

        task = asyncio.create_task(sampler.generate(prompt, Sampling(max_tokens=16)))
        while sampler.active:
            await sampler.advance()
        completion = await task
    """

    version: int
    """The policy version that draws the next token; set by the code that swaps the weights."""

    slots: int
    """The most sequences that are decoded at a time; further requests wait."""
    capacity: int
    """The most tokens that a sequence may have, prompt included."""

    @property
    def active(self) -> int:
        """The number of unfinished requests, waiting ones included."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Continues ``prompt``. ``on_token`` is called with each token as it is drawn; if it
        returns True, the sequence ends there with ``stop``, in an engine that can end it.

        Cancelling the task that awaits this cancels the request and frees its place. Raises
        `InputError` if the prompt is empty, or exceeds the capacity with ``max_tokens``.
        """
        ...

    async def advance(self) -> int:
        """Does one unit of work; returns how many tokens it drew."""
        ...

    def cancel_all(self) -> None:
        """Drops every request without an answer. Call it when no task awaits one."""
        ...


class Weights(Protocol):
    """The weights being served, at one version, patched in place between two calls of
    `Sampler.advance`; `deltawire.placement.live.LiveWeights` implements it."""

    @property
    def version(self) -> int:
        """The version that the weights hold."""
        ...

    @property
    def digest(self) -> Digest:
        """The digest of that version."""
        ...

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Prepares the next `swap` while serving continues, in any single thread. Raises
        `ResyncError` if that swap would.
        """
        ...

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Switches to a version, complete and attested, or raises `ResyncError` and leaves the
        weights as they were."""
        ...

    def attest(self) -> Digest:
        """Recomputes the digest from the live bits."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The inputs that an engine is opened with.

    ``folder`` holds the model's files without weights; ``build_model`` returns the causal LM that
    they describe, with weights unset, on torch's default device and in ``precision``. ``version``
    is the one to load, None for the newest; the run has one. With ``stepwise``, no version is
    skipped. ``truncation`` and ``temperature`` are those of the requests to come, for engines that
    must know them when they start. ``is_stopping`` becomes true when the caller no longer wants the
    engine.
    """

    bucket: Bucket
    run: Run
    folder: Path
    build_model: Callable[[], Any]
    stop_tokens: Callable[[Any], Sequence[int]]
    slots: int
    capacity: int
    precision: Literal["float32", "bfloat16"]
    seed: int
    threads: int
    version: int | None = None
    stepwise: bool = False
    record_routes: bool = False
    truncation: Truncation = EVERYTHING
    temperature: float = 1.0
    is_stopping: Callable[[], bool] = lambda: False


async def nothing_to_close() -> None:
    """Returns the `OpenEngine.close` of an engine that holds nothing but memory."""


@dataclass(frozen=True, kw_only=True)
class OpenEngine:
    """An engine that serves a version: its sampler, its weights, and the source of new versions. An
    ``external`` engine runs in another process and keeps decoding during a swap.
    """

    sampler: Sampler
    weights: Weights
    steps: Steps
    close: Callable[[], Awaitable[None]] = nothing_to_close
    external: bool = False
