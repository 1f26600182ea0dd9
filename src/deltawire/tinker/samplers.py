"""Sampling sessions: which engine serves which, and samples that are asked for twice.

Engines are the library's sampling clients, one for each version that is pinned, and one that
follows for each model that is sampled in flight. The least recently used one without work is closed
when another one is needed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from deltawire.errors import DeltawireError, InputError
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.tinker.requests import SampleRequest, prompt_tokens, sampling_params
from deltawire.tinker.results import RequestResult, sample_result
from deltawire.tinker.state import SamplerRecord, ServerState
from deltawire.train.client.sampling import SamplingClient
from deltawire.train.client.types import ModelInput, SamplingParams

MAX_REMEMBERED = 1 << 16
"""Samples that are remembered, so that a repeated request gets the same answer."""


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Engines: at most ``engines`` open, each with ``slots`` sequences of ``context`` tokens. With
    ``stability_info``, clients may ask to record what is not recorded here."""

    engines: int = 4
    slots: int = 64
    context: int = 2048
    precision: Literal["float32", "bfloat16"] = "float32"
    stability_info: bool = False


@dataclass
class _Engine:
    opened: asyncio.Task[SamplingClient]
    users: int = 0


@dataclass
class _Answer:
    digest: str
    task: asyncio.Task[RequestResult]
    started_at: float = field(default_factory=time.monotonic)


class Samplers:
    """The sampling side of a server.

    Example::

        samplers = Samplers(state, SamplerOptions())
        samplers.submit("SESSION:sample:0", 7, digest, record, request)
        result = await samplers.result("SESSION:sample:0", 7, hold_s=30)
    """

    def __init__(self, state: ServerState, options: SamplerOptions) -> None:
        self.options = options
        self._state = state
        self._engines: OrderedDict[tuple[str, int | None], _Engine] = OrderedDict()
        self._answers: OrderedDict[tuple[str, int], _Answer] = OrderedDict()
        self._freed = asyncio.Condition()

    def submit(
        self, sampler: str, number: int, digest: str, record: SamplerRecord, request: SampleRequest
    ) -> None:
        """Starts a request, once. Raises `InputError` for one that cannot be honored, and if its
        number was used for another one."""
        known = self._answers.get((sampler, number))
        if known is not None:
            if known.digest != digest:
                raise InputError(
                    f"seq_id {number} of {sampler} was used for another request",
                    hint="a retry must repeat its request; new requests take the next number",
                )
            return
        tokens = prompt_tokens(request.prompt)
        self._params(request, tokens)
        task = asyncio.create_task(self._sample(record, request, tokens))
        self._answers[sampler, number] = _Answer(digest, task)
        while len(self._answers) > MAX_REMEMBERED:
            oldest = next(iter(self._answers))
            if not self._answers[oldest].task.done():
                break
            del self._answers[oldest]

    def knows(self, sampler: str, number: int) -> bool:
        """Returns whether a request is remembered."""
        return (sampler, number) in self._answers

    async def result(self, sampler: str, number: int, *, hold_s: float) -> RequestResult | None:
        """Waits at most ``hold_s`` seconds for the answer; None if it is not there yet."""
        task = self._answers[sampler, number].task
        await asyncio.wait([task], timeout=hold_s)
        return task.result() if task.done() else None

    async def close(self) -> None:
        """Drops what is under way, and closes the engines."""
        for answer in self._answers.values():
            answer.task.cancel()
        await asyncio.gather(*(one.task for one in self._answers.values()), return_exceptions=True)
        for engine in self._engines.values():
            await _closed(engine)
        self._engines.clear()

    async def _sample(
        self, record: SamplerRecord, request: SampleRequest, tokens: list[int]
    ) -> RequestResult:
        try:
            params = self._params(request, tokens)
            async with self._engine(record) as engine:
                answer = await engine.sample(
                    ModelInput.from_ints(tokens),
                    request.num_samples,
                    params,
                    bool(request.prompt_logprobs),
                    request.topk_prompt_logprobs,
                    least_version=record.version,
                )
            return sample_result(answer, last=request.prompt_logprobs_last_n)
        except (DeltawireError, ValueError, RuntimeError) as error:
            return RequestResult.of_error(error)

    def _params(self, request: SampleRequest, tokens: list[int]) -> SamplingParams:
        context, asked = self.options.context, request.sampling_params.max_tokens
        room = context - len(tokens)
        if (1 if asked is None else asked) > room:
            wanted = "" if asked is None else f", with {asked} new ones,"
            raise InputError(
                f"a prompt of {len(tokens)} tokens{wanted} does not fit into this server's context "
                f"of {context}",
                hint="shorten the prompt, lower max_tokens, or start the server with a larger "
                "--context",
            )
        return sampling_params(request, room=room, stability_info=self.options.stability_info)

    @asynccontextmanager
    async def _engine(self, record: SamplerRecord) -> AsyncIterator[SamplingClient]:
        key = (record.folder, record.version if record.kind == "snapshot" else None)
        async with self._freed:
            while key not in self._engines and len(self._engines) >= self.options.engines:
                idle = next((name for name, one in self._engines.items() if not one.users), None)
                if idle is None:
                    await self._freed.wait()
                else:
                    await _closed(self._engines.pop(idle))
            engine = self._engines.get(key)
            if engine is None:
                opening = asyncio.create_task(asyncio.to_thread(self._open, record))
                engine = self._engines[key] = _Engine(opening)
            engine.users += 1
            self._engines.move_to_end(key)
        try:
            yield await asyncio.shield(engine.opened)
        finally:
            engine.users -= 1
            async with self._freed:
                failed = engine.opened.done() and engine.opened.exception() is not None
                if failed and self._engines.get(key) is engine:
                    del self._engines[key]
                self._freed.notify_all()

    def _open(self, record: SamplerRecord) -> SamplingClient:
        bucket = open_bucket(self._state.run_url(record.folder))
        return SamplingClient(
            bucket,
            read_run(bucket),
            version=record.version,
            kind=record.kind,
            slots=self.options.slots,
            context=self.options.context,
            precision=self.options.precision,
            # Each engine draws other numbers: versions that follow each other must not share them.
            seed=secrets.randbits(62),
        )


async def _closed(engine: _Engine) -> None:
    try:
        client = await engine.opened
    except DeltawireError:
        return
    await asyncio.to_thread(client.close)
