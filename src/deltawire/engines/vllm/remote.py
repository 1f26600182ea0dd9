"""Sampling from a vLLM in another process, whose weights follow the run under our lead.

Who waits for whom::

    requests ─▶ POST /inference/v1/generate (one connection each) ─▶ vLLM's scheduler
    `RemoteSampler.advance` ◀─ waits until one is answered, or a moment
             └─ every `LOOK_EVERY_S` asks how the engine stands: an answer, or the error
    `RemoteWeights.swap` ─▶ deltawire_want N ─▶ the engine prepares, swaps between two steps
             └─ asks till it says N, with the digest that our own reader of the bucket expects

The engine fetches and verifies its part of the weights for itself; that both ways led to the same
digest is what `swap` holds it to. It goes on decoding while `swap` waits.
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
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError

MAX_ANSWER_BYTES = 4 << 20
BYTES_A_TOKEN = 1024
"""Of an answer, at most: the token, its log-probability, twice, and their names."""
ADVANCE_S = 0.02
ASK_EVERY_S = 0.01
ANSWER_WITHIN_S = 60.0
LOOK_EVERY_S = 10.0
"""How often an engine with requests is asked whether it still works. A request may take as long as
it likes, so that one which hangs shows by nothing else."""
SWAP_WITHIN_S = 90.0
"""Below ``faults.stall_s``: who says why is better than who is killed."""
LEAST_LOGPROB = -9999.0
"""What vLLM says in place of a log-probability that is none."""

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


class _Choice(msgspec.Struct):
    token_ids: list[_Place]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


class _Generated(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]


class Status(msgspec.Struct):
    """How the engine stands, as its conductor says."""

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


class Statuses(msgspec.Struct):
    """The answer to ``deltawire_status`` and ``deltawire_want``."""

    results: Annotated[list[Status], Meta(min_length=1, max_length=1)]


class _Attestations(msgspec.Struct):
    results: Annotated[list[_Attested], Meta(min_length=1, max_length=1)]


class _Local(http.client.HTTPConnection):
    """HTTP over a socket in a folder."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Calls:
    """The engine's own calls, over ``POST /collective_rpc`` of the server at a local socket.

    They block: what they ask is asked between two steps. Raise `ResyncError` if there is no
    answer, `CorruptError` if it is something else.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def status(self) -> Status:
        """How it stands."""
        return self._call("deltawire_status", Statuses).results[0]

    def want(self, version: int) -> None:
        """Have it go to ``version``, be it newer or older."""
        self._call("deltawire_want", Statuses, str(version))

    def attest(self) -> _Attested:
        """Have all ranks digest their live bits."""
        return self._call("deltawire_attest", _Attestations).results[0]

    def _call(self, method: str, kind: type[T], *arguments: str) -> T:
        connection = _Local(self.path)
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
            raise ResyncError(f"vLLM answers {response.status} to {method}: {_said(data)}")
        return _read(data, kind, method)


class RemoteWeights:
    """The engine's weights, as `deltawire.engines.base.Weights`.

    None are loaded, so far as this knows, until the first `swap`.
    """

    def __init__(self, calls: Calls) -> None:
        self.version = -1
        self.digest: Digest = codec.ZERO
        self._calls = calls

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Nothing: the engine prepares by itself, once it is told which version is wanted."""

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Have the engine go to ``version``, and wait until it serves it. It fetches the patches
        itself. Raises `ResyncError` if it does not get there with ``digest``; it is then told to
        be what it was."""
        del patches
        try:
            self._calls.want(version)
            status = self._reach(version)
            if status.digest != digest.hex():
                raise ResyncError(
                    f"vLLM serves weights with the digest {status.digest}, not {digest.hex()}",
                    version=version,
                )
        except DeltawireError:
            self._go_back()
            raise
        self.version, self.digest = version, digest

    def attest(self) -> Digest:
        """The digest of the live bits, which every rank has read again. Raises `CorruptError` if
        they are not what the engine believes them to be."""
        found = self._calls.attest()
        if not found.sound or found.version != self.version:
            failures = "; ".join(rank.failure for rank in found.ranks if rank.failure)
            raise CorruptError(
                f"vLLM does not hold what it serves: {failures[:500] or 'another version'}",
                version=found.version,
            )
        return Digest.from_hex(found.ranks[0].digest)

    def _reach(self, version: int) -> Status:
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
                raise ResyncError(f"vLLM is still {status.phase[:20]}", version=version)
            time.sleep(ASK_EVERY_S)

    def _go_back(self) -> None:
        """Else the engine would go on trying, and get there when nobody expects it."""
        if self.version >= 0:
            try:
                self._calls.want(self.version)
            except DeltawireError:
                return  # What it was told first is what will be reported.


class RemoteSampler:
    """Samples from the server at a local socket; see `deltawire.engines.base.Sampler`.

    Tokens come whole, when a request ends; ``on_token`` hears of them then, too late to end it. To
    be used within one
    event loop, and closed there.
    """

    def __init__(
        self, path: str, *, stop_tokens: Sequence[int], slots: int, capacity: int, version: int
    ) -> None:
        self.version = version
        self.slots = slots
        self.capacity = capacity
        self._path = path
        self._stop = list(stop_tokens)
        self._session: aiohttp.ClientSession | None = None
        self._asked: set[asyncio.Task[Completion]] = set()
        self._look: asyncio.Task[None] | None = None
        self._looked_at = time.monotonic()
        self._drawn = 0

    @property
    def active(self) -> int:
        """Requests not yet finished."""
        return len(self._asked)

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
                f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} more exceed the "
                f"engine's {self.capacity}"
            )
        task = asyncio.get_running_loop().create_task(self._ask(list(prompt), sampling))
        self._asked.add(task)
        try:
            completion = await task
        finally:
            self._asked.discard(task)
        self._drawn += len(completion.tokens)
        if on_token is not None:
            for token in completion.tokens:
                on_token(token)
        return completion

    async def advance(self) -> int:
        """Wait until a request ends, `ADVANCE_S` at most; how many tokens have come since. Raises
        `ResyncError` if the server no longer says how it stands."""
        self._look_after_it()
        if self._asked:
            await asyncio.wait(self._asked, timeout=ADVANCE_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0 if self._asked else ADVANCE_S)  # Those who waited take their tokens.
        drawn, self._drawn = self._drawn, 0
        return drawn

    def cancel_all(self) -> None:
        """See `deltawire.engines.base.Sampler.cancel_all`."""
        for task in self._asked:
            task.cancel()
        self._asked.clear()

    async def close(self) -> None:
        """Close all connections."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _look_after_it(self) -> None:
        now = time.monotonic()
        if self._look is not None and self._look.done():
            look, self._look, self._looked_at = self._look, None, now
            look.result()
        if self._look is None and self._asked and now - self._looked_at >= LOOK_EVERY_S:
            self._look = asyncio.get_running_loop().create_task(self._stands())

    async def _stands(self) -> None:
        try:
            async with self._connected().post(
                "http://localhost/collective_rpc",
                json={"method": "deltawire_status", "args": []},
                timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S),
                allow_redirects=False,
            ) as response:
                said = await response.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncError(f"vLLM no longer says how it stands: {error!r}") from error
        if response.status != 200:
            raise ResyncError(f"vLLM answers {response.status}: {_said(said)}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def _ask(self, prompt: list[int], sampling: Sampling) -> Completion:
        wanted = {
            "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "detokenize": False,
            "stop_token_ids": self._stop,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": wanted}
        data = bytearray()
        limit = MAX_ANSWER_BYTES + BYTES_A_TOKEN * sampling.max_tokens
        try:
            async with self._connected().post(
                "http://localhost/inference/v1/generate", json=body, allow_redirects=False
            ) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        raise CorruptError(f"vLLM's answer exceeds {limit} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncError(f"vLLM does not answer: {error!r}") from error
        if response.status == 400:
            raise InputError(f"vLLM refuses the request: {_said(data)}")
        if response.status != 200:
            raise ResyncError(f"vLLM answers {response.status}: {_said(data)}")
        return _completion(_read(data, _Generated, "a request").choices[0], sampling)


def _completion(choice: _Choice, sampling: Sampling) -> Completion:
    """What was drawn; raises `CorruptError` unless all of it fits together."""
    tokens = choice.token_ids
    if choice.finish_reason not in ("stop", "length"):
        raise ResyncError(f"vLLM ended a request: {choice.finish_reason[:40]!r}")
    if not 0 < len(tokens) <= sampling.max_tokens:
        raise CorruptError(f"vLLM drew {len(tokens)} tokens of at most {sampling.max_tokens}")
    told = choice.logprobs.content
    logprobs = [entry.logprob for entry in told]
    if [entry.token_id for entry in told] != tokens or not all(
        math.isfinite(value) and value > LEAST_LOGPROB for value in logprobs
    ):
        raise CorruptError("vLLM's log-probabilities are not those of its tokens")
    versions: list[int] = []
    for span in choice.weight_versions:
        if span.start != len(versions) or not span.start < span.end <= len(tokens):
            raise CorruptError("vLLM's spans of versions are not those of its tokens")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(tokens):
        raise CorruptError("vLLM does not say which version drew which token")
    return Completion(
        tokens, logprobs, versions, "stop" if choice.finish_reason == "stop" else "length"
    )


def _read(data: bytes | bytearray, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"vLLM answers {what} with something else: {error}") from error


def _said(data: bytes | bytearray) -> str:
    return bytes(data[:300]).decode(errors="replace")
