"""Samples from an engine's server in another process.

Concurrency::

    requests ─▶ POST (one connection each) ─▶ the engine's scheduler
    `RemoteSampler.advance` ◀─ waits until one is answered, at most `ADVANCE_S`
             └─ every `CHECK_EVERY_S` asks for the engine's status: an answer, or the error
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from deltawire.engines.base import Completion, OnToken, Sampling
from deltawire.engines.following.engine_client import ANSWER_WITHIN_S, MAX_ANSWER_BYTES, excerpt
from deltawire.engines.following.routed_experts import read_routes, route_bytes
from deltawire.errors import CorruptError, InputError, ResyncError

BYTES_A_TOKEN = 1024
"""The most bytes of an answer per token: its id and log-probability, twice, with names."""
ADVANCE_S = 0.02
CHECK_EVERY_S = 10.0
"""Seconds between status requests to a busy engine: requests may take arbitrarily long, so only
this shows that an engine hangs.
"""
LEAST_LOGPROB = -9999.0
"""The engines' placeholder for a log-probability of minus infinity."""


Version = Annotated[str, Meta(pattern=r"^[0-9]{1,15}\Z")]
Place = Annotated[int, Meta(ge=0, lt=2**31)]


class VersionSpan(msgspec.Struct):
    """Tokens of an answer that one version made, from ``start`` to before ``end``."""

    version: Version
    start: Place
    end: Place


class RemoteSampler(ABC):
    """Samples from the server at a Unix socket; see `deltawire.engines.base.Sampler`.

    An engine's own class says what it is asked and how it answers: `ENGINE` is its name in errors,
    `GENERATE` where requests go.

    All tokens of a request arrive when it ends; ``on_token`` is called then, too late to end it.
    With ``experts``, how many there are and how many a token chooses, completions carry the expert
    choices that the server reports. Use and close it within one event loop.
    """

    ENGINE: str
    GENERATE: str
    ROUTES_ARE_FILES = True
    """See `read_routes`."""

    def __init__(
        self,
        path: str,
        *,
        stop_tokens: Sequence[int],
        slots: int,
        capacity: int,
        version: int,
        experts: tuple[int, int] | None = None,
    ) -> None:
        self.experts = experts
        self.version = version
        self.slots = slots
        self.capacity = capacity
        self._path = path
        self.stop = list(stop_tokens)
        self._session: aiohttp.ClientSession | None = None
        self._requests: set[asyncio.Task[Completion]] = set()
        self._check: asyncio.Task[None] | None = None
        self._checked_at = time.monotonic()
        self._drawn = 0

    @property
    def active(self) -> int:
        """Requests not yet finished."""
        return len(self._requests)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Completion:
        """See `deltawire.engines.base.Sampler.generate`. Raises `ResyncError` if the server does
        not answer, `CorruptError` if its answer contradicts itself."""
        if not prompt:
            raise InputError("the prompt is empty")
        if len(prompt) + sampling.max_tokens > self.capacity:
            raise InputError(
                f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones exceed the "
                f"engine's {self.capacity}",
                hint="raise rollout.context or lower rollout.max_tokens",
            )
        task = asyncio.get_running_loop().create_task(self._request(list(prompt), sampling))
        self._requests.add(task)
        try:
            completion = await task
        finally:
            self._requests.discard(task)
        self._drawn += len(completion.tokens)
        if on_token is not None:
            for token in completion.tokens:
                on_token(token)
        return completion

    async def advance(self) -> int:
        """Waits until a request ends, at most `ADVANCE_S`; returns how many tokens arrived. Raises
        `ResyncError` if the server no longer reports its status."""
        self._check_status()
        if self._requests:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(self._requests, timeout=ADVANCE_S, return_when=first)
        # Meanwhile, tasks that awaited a request receive their tokens.
        await asyncio.sleep(0 if self._requests else ADVANCE_S)
        drawn, self._drawn = self._drawn, 0
        return drawn

    def cancel_all(self) -> None:
        """See `deltawire.engines.base.Sampler.cancel_all`."""
        for task in self._requests:
            task.cancel()
        self._requests.clear()

    async def close(self) -> None:
        """Closes all connections."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _check_status(self) -> None:
        now = time.monotonic()
        if self._check is not None and self._check.done():
            check, self._check, self._checked_at = self._check, None, now
            check.result()
        if self._check is None and self._requests and now - self._checked_at >= CHECK_EVERY_S:
            self._check = asyncio.get_running_loop().create_task(self._require_status())

    async def _require_status(self) -> None:
        try:
            async with self._opened_session().post(
                "http://localhost/collective_rpc",
                json={"method": "deltawire_status", "args": []},
                timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S),
                allow_redirects=False,
            ) as response:
                data = await response.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncError(f"{self.ENGINE} no longer reports its status: {error!r}") from error
        if response.status != 200:
            raise ResyncError(f"{self.ENGINE} answers {response.status}: {excerpt(data)}")

    def _opened_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    @abstractmethod
    def body(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """Returns a request of the engine, as JSON."""

    @abstractmethod
    def completion(
        self, data: bytes | bytearray, prompt: list[int], sampling: Sampling
    ) -> Completion:
        """Reads an answer; raises `CorruptError` if it contradicts itself."""

    def with_routes(self, drawn: Completion, told: str | None, prompt: list[int]) -> Completion:
        """Adds the expert choices that an answer tells, if the run records them; raises
        `InputError` and `CorruptError` as `read_routes` does."""
        if self.experts is not None:
            routes = read_routes(
                told,
                positions=len(prompt) + len(drawn.tokens) - 1,
                experts=self.experts,
                engine=self.ENGINE,
                is_file=self.ROUTES_ARE_FILES,
            )
            drawn.routes, drawn.experts = [routes], self.experts[0]
        return drawn

    async def _request(self, prompt: list[int], sampling: Sampling) -> Completion:
        data = bytearray()
        limit = MAX_ANSWER_BYTES + BYTES_A_TOKEN * sampling.max_tokens
        if self.experts is not None:
            limit += route_bytes(len(prompt) + sampling.max_tokens, self.experts[1])
        try:
            async with self._opened_session().post(
                f"http://localhost{self.GENERATE}",
                json=self.body(prompt, sampling),
                allow_redirects=False,
            ) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        raise CorruptError(f"{self.ENGINE}'s answer exceeds {limit} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncError(f"{self.ENGINE} does not answer: {error!r}") from error
        if response.status == 400:
            raise InputError(f"{self.ENGINE} refuses the request: {excerpt(data)}")
        if response.status != 200:
            raise ResyncError(f"{self.ENGINE} answers {response.status}: {excerpt(data)}")
        return self.completion(data, prompt, sampling)


def checked(
    engine: str,
    tokens: list[int],
    logprobs: list[float],
    logged: list[int],
    spans: Sequence[VersionSpan],
    *,
    reason: str,
    sampling: Sampling,
) -> Completion:
    """Returns the drawn tokens; raises `CorruptError` if the answer contradicts itself.

    ``logged`` are the tokens that the log-probabilities were given for.
    """
    if reason not in ("stop", "length"):
        raise ResyncError(f"{engine} ended a request: {reason[:40]!r}")
    if not 0 < len(tokens) <= sampling.max_tokens:
        raise CorruptError(f"{engine} drew {len(tokens)} tokens of at most {sampling.max_tokens}")
    if logged != tokens or not all(
        math.isfinite(value) and value > LEAST_LOGPROB for value in logprobs
    ):
        raise CorruptError(f"{engine}'s log-probabilities are not those of its tokens")
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or not span.start < span.end <= len(tokens):
            raise CorruptError(f"{engine}'s version spans do not cover its tokens in order")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(tokens):
        raise CorruptError(f"{engine}'s version spans do not cover all of its tokens")
    return Completion(tokens, logprobs, versions, "stop" if reason == "stop" else "length")
