"""Defines the interface of an engine: opened on a run, sampled from, and moved from version to
version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltawire.codec import Digest, Patch
from deltawire.errors import InputError
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


LEAST_TEMPERATURE = 1e-4
"""The smallest temperature besides 0: float32 logits divided by less may not be finite."""
MOST_TEMPERATURE = 100.0
MAX_TOP_K = 1_000_000_000


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. ``temperature`` 0 is greedy. Log-probabilities are those of the full
    tempered distribution, regardless of ``truncation`` (of the untempered one when greedy). With a
    ``seed`` the same version draws the same tokens again after the same prompt, up to rounding that
    depends on what is decoded at the same time.

    Raises `InputError` for settings that mean nothing. This is the one check of all servers.
    """

    max_tokens: int
    temperature: float = 1.0
    truncation: Truncation = EVERYTHING
    seed: int | None = None

    def __post_init__(self) -> None:
        top_p, top_k, min_p = self.truncation
        tempered = LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (
                self.temperature == 0 or tempered,
                f"0, which is greedy, or {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
            ),
            "top_p": (0 < top_p <= 1, "more than 0, and at most 1"),
            "top_k": (0 <= top_k <= MAX_TOP_K, f"1 to {MAX_TOP_K}, or -1 for all tokens"),
            "min_p": (0 <= min_p <= 1, "0 to 1"),
            "seed": (self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "64 bits, signed"),
        }
        values = {**vars(self), **self.truncation._asdict()}
        for name, (fits, hint) in bounds.items():
            if not fits:  # Comparisons with NaN are false.
                raise InputError(f"{name} is {values[name]}", hint=f"give {hint}")

    def numbered(self, index: int) -> Sampling:
        """Returns the settings of completion ``index`` of the same request: each has a seed that
        follows from the request's, and the first has the request's own."""
        if self.seed is None or index == 0:
            return self
        digest = blake3(f"{self.seed} {index}".encode()).digest(length=8)
        return replace(self, seed=int.from_bytes(digest, "little", signed=True))


def top_k_of(asked: int) -> int:
    """Returns the `Truncation.top_k` of a request's, where -1 keeps every token."""
    return 0 if asked == -1 else asked


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
