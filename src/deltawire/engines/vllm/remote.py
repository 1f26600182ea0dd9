"""Samples from a vLLM server in another process, and selects the version that it serves.

Concurrency::

    requests ─▶ POST /inference/v1/generate (one connection each) ─▶ vLLM's scheduler
    `RemoteSampler.advance` ◀─ waits until one is answered, at most `ADVANCE_S`
             └─ every `CHECK_EVERY_S` asks for the engine's status: an answer, or the error
    `RemoteWeights.swap` ─▶ deltawire_want N ─▶ the engine prepares, swaps between two steps
             └─ polls until it serves N, with the digest that this process read from the manifest

The engine fetches and verifies its part of the weights itself, and keeps decoding while `swap`
waits; `swap` requires that it arrives at the manifest's digest.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.engines.base import Completion, OnToken, Sampling
from deltawire.engines.vllm.routed_experts import read_routes, route_bytes
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError
from deltawire.wire.objects import prepared

MAX_ANSWER_BYTES = 4 << 20
BYTES_A_TOKEN = 1024
"""The most bytes of an answer per token: its id and log-probability, twice, with names."""
ADVANCE_S = 0.02
POLL_EVERY_S = 0.01
ANSWER_WITHIN_S = 60.0
CHECK_EVERY_S = 10.0
"""Seconds between status requests to a busy engine: requests may take arbitrarily long, so only
this shows that an engine hangs.
"""
SWAP_WITHIN_S = 90.0
"""Less than ``faults.stall_s``, so that the process reports why it stops before it is killed."""
LEAST_LOGPROB = -9999.0
"""vLLM's placeholder for a log-probability of minus infinity."""

_Version = Annotated[str, Meta(pattern=r"^[0-9]{1,15}\Z")]
_Place = Annotated[int, Meta(ge=0, lt=2**31)]
_Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]


class _Span(msgspec.Struct):
    version: _Version
    start: _Place
    end: _Place


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Generation(msgspec.Struct):
    token_ids: list[_Place]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str
    routed_experts: str | None = None


class _Generated(msgspec.Struct):
    choices: Annotated[list[_Generation], Meta(min_length=1, max_length=1)]


class EngineStatus(msgspec.Struct):
    """The engine's status, as its `SwapController` reports it."""

    version: int
    phase: str
    failure: str = ""
    digest: _Digest = ""


class _Rank(msgspec.Struct):
    digest: _Digest
    failure: str = ""


class _Attested(msgspec.Struct):
    version: int
    sound: bool
    ranks: Annotated[list[_Rank], Meta(min_length=1)]


T = TypeVar("T")


class EngineStatuses(msgspec.Struct):
    """The answer to ``deltawire_status`` and ``deltawire_want``."""

    results: Annotated[list[EngineStatus], Meta(min_length=1, max_length=1)]


class _Attestations(msgspec.Struct):
    results: Annotated[list[_Attested], Meta(min_length=1, max_length=1)]


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineClient:
    """Calls deltawire's methods in the engine, by ``POST /collective_rpc`` over a Unix socket.

    The methods block: the engine answers between two steps. They raise `ResyncError` if there is
    no answer, and `CorruptError` for one that cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def status(self) -> EngineStatus:
        """Returns the engine's status."""
        return self._call("deltawire_status", EngineStatuses).results[0]

    def want(self, version: int) -> None:
        """Tells the engine to move to ``version``, newer or older; returns at once."""
        self._call("deltawire_want", EngineStatuses, str(version))

    def attest(self) -> _Attested:
        """Has all ranks digest their live bits, and returns the outcome."""
        return self._call("deltawire_attest", _Attestations).results[0]

    def _call(self, method: str, kind: type[T], *arguments: str) -> T:
        connection = _UnixConnection(self.path)
        body = json.dumps({"method": method, "args": arguments})
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/collective_rpc", body, headers)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ResyncError(f"vLLM does not answer {method}: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ResyncError(f"vLLM answers {response.status} to {method}: {_excerpt(data)}")
        return _read(data, kind, method)


class RemoteWeights:
    """The engine's weights, as `deltawire.engines.base.Weights`.

    ``version`` is -1 until the first `swap`, regardless of the version that the engine loaded at
    its start.
    """

    def __init__(self, calls: EngineClient) -> None:
        self.version = -1
        self.digest: Digest = codec.ZERO
        self._calls = calls

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Does nothing: the engine prepares by itself when `swap` names the version."""

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Moves the engine to ``version``, whose patches it fetches itself, and waits until it
        serves them. Raises `ResyncError` if it does not arrive there with ``digest``, after telling
        it to return to the old version."""
        del patches
        try:
            self._calls.want(version)
            status = self._wait_for(version)
            if status.digest != digest.hex():
                raise ResyncError(
                    f"vLLM serves weights with digest {status.digest}; the manifest states "
                    f"{digest.hex()}",
                    version=version,
                )
        except DeltawireError:
            self._return()
            raise
        self.version, self.digest = version, digest

    def attest(self) -> Digest:
        """Returns the digest of the live bits, which every rank has read again. Raises
        `CorruptError` if they are not the version that the engine reports."""
        found = self._calls.attest()
        if not found.sound or found.version != self.version:
            failures = "; ".join(rank.failure for rank in found.ranks if rank.failure)
            raise CorruptError(
                "vLLM's live weights are not those of its version: "
                f"{failures[:500] or 'it serves another one'}",
                version=found.version,
            )
        return Digest.from_hex(found.ranks[0].digest)

    def _wait_for(self, version: int) -> EngineStatus:
        deadline = time.monotonic() + SWAP_WITHIN_S
        while True:
            status = self._calls.status()
            if status.version == version:
                return status
            if status.failure and status.phase == "serving":
                raise ResyncError(
                    f"vLLM stays at version {status.version}: {status.failure[:500]}",
                    version=version,
                )
            if time.monotonic() > deadline:
                raise ResyncError(
                    f"vLLM is still {status.phase[:20]} after {SWAP_WITHIN_S:.0f} s",
                    version=version,
                )
            time.sleep(POLL_EVERY_S)

    def _return(self) -> None:
        """Asks for the old version again, or the engine would keep trying and swap unexpectedly."""
        if self.version >= 0:
            try:
                self._calls.want(self.version)
            except DeltawireError:
                return  # The error that led here is the one to report.


class RemoteSampler:
    """Samples from the server at a Unix socket; see `deltawire.engines.base.Sampler`.

    All tokens of a request arrive when it ends; ``on_token`` is called then, too late to end it.
    With ``experts``, how many there are and how many a token chooses, completions carry the expert
    choices that the server reports. Use and close it within one event loop.
    """

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
        self._experts = experts
        self.version = version
        self.slots = slots
        self.capacity = capacity
        self._path = path
        self._stop = list(stop_tokens)
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
            raise ResyncError(f"vLLM no longer reports its status: {error!r}") from error
        if response.status != 200:
            raise ResyncError(f"vLLM answers {response.status}: {_excerpt(data)}")

    def _opened_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def _request(self, prompt: list[int], sampling: Sampling) -> Completion:
        parameters = {
            "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            **sampling.truncation._asdict(), "logprobs": 0, "detokenize": False,
            "stop_token_ids": self._stop,
        }  # fmt: skip
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed
        body = {"token_ids": prompt, "sampling_params": parameters}
        data = bytearray()
        limit = MAX_ANSWER_BYTES + BYTES_A_TOKEN * sampling.max_tokens
        if self._experts is not None:
            limit += route_bytes(len(prompt) + sampling.max_tokens, self._experts[1])
        try:
            async with self._opened_session().post(
                "http://localhost/inference/v1/generate", json=body, allow_redirects=False
            ) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        raise CorruptError(f"vLLM's answer exceeds {limit} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncError(f"vLLM does not answer: {error!r}") from error
        if response.status == 400:
            raise InputError(f"vLLM refuses the request: {_excerpt(data)}")
        if response.status != 200:
            raise ResyncError(f"vLLM answers {response.status}: {_excerpt(data)}")
        choice = _read(data, _Generated, "a request").choices[0]
        completion = _completion(choice, sampling)
        if self._experts is not None:
            positions = len(prompt) + len(completion.tokens) - 1
            routes = read_routes(choice.routed_experts, positions=positions, experts=self._experts)
            completion.routes, completion.experts = [routes], self._experts[0]
        return completion


def _completion(choice: _Generation, sampling: Sampling) -> Completion:
    """Returns the drawn tokens; raises `CorruptError` if the answer contradicts itself."""
    tokens = choice.token_ids
    if choice.finish_reason not in ("stop", "length"):
        raise ResyncError(f"vLLM ended a request: {choice.finish_reason[:40]!r}")
    if not 0 < len(tokens) <= sampling.max_tokens:
        raise CorruptError(f"vLLM drew {len(tokens)} tokens of at most {sampling.max_tokens}")
    entries = choice.logprobs.content
    logprobs = [entry.logprob for entry in entries]
    if [entry.token_id for entry in entries] != tokens or not all(
        math.isfinite(value) and value > LEAST_LOGPROB for value in logprobs
    ):
        raise CorruptError("vLLM's log-probabilities are not those of its tokens")
    versions: list[int] = []
    for span in choice.weight_versions:
        if span.start != len(versions) or not span.start < span.end <= len(tokens):
            raise CorruptError("vLLM's version spans do not cover its tokens in order")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(tokens):
        raise CorruptError("vLLM's version spans do not cover all of its tokens")
    return Completion(
        tokens, logprobs, versions, "stop" if choice.finish_reason == "stop" else "length"
    )


def _read(data: bytes | bytearray, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"vLLM's answer to {what} cannot be read: {error}") from error


def _excerpt(data: bytes | bytearray) -> str:
    return bytes(data[:300]).decode(errors="replace")
