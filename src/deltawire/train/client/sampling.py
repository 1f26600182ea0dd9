"""Samples from a run's versions: from one, or from the newest that has arrived.

Concurrency::

    caller's threads                      sampler's thread
      sample(...) ── job ───────────────▶   between two decode steps: take jobs,
      compute_logprobs(...) ── job ─────▶   swap to the version that the follower prepared
      ◀──────────── future.set_result ───   one decode step for all running sequences
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self

import torch

from deltawire.config import AdapterConfig
from deltawire.engines.base import EngineRequest, OpenEngine, Sampling, Truncation, top_k_of
from deltawire.engines.registry import open_engine
from deltawire.errors import InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import (
    fetch_model_files,
    load_tokenizer,
    serve_as,
    stop_tokens,
)
from deltawire.export.quantized import serve_quantized
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import Follower, newest_version
from deltawire.train.client.forward import score_tokens, top_tokens
from deltawire.train.client.types import (
    MOST_TOP_TOKENS,
    APIFuture,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    tokens_of,
)
from deltawire.wire.run import Run

Kind = Literal["snapshot", "inflight"]
IDLE_S = 0.05
"""How long the thread waits for a job before it looks for a new version."""

DEFAULT_MAX_TOKENS = 128
_Run = Callable[[], Coroutine[Any, Any, Any]]
_Job = tuple["Future[Any]", _Run]


class SamplingClient:
    """Samples from a run, and scores tokens.

    A ``snapshot`` serves ``version``. An ``inflight`` client serves ``version`` or newer and swaps
    to each version as it arrives, between two tokens; each sampled token names the version that
    drew it. With ``max_lag``, a request waits until the client is at most so many versions older
    than the newest. At most ``slots`` sequences of ``context`` tokens run at a time.

    Raises `InputError` if the run has no such version, or the engine cannot serve it.

    Example::

        with SamplingClient(bucket, run, version=3) as sampler:
            answer = sampler.sample(prompt, 4, SamplingParams(max_tokens=16)).result()
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        version: int | None = None,
        kind: Kind = "snapshot",
        max_lag: int | None = None,
        slots: int = 64,
        context: int = 2048,
        seed: int = 0,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        if kind not in ("snapshot", "inflight"):
            raise InputError(f"unknown kind of sampling client {str(kind)[:80]!r}")
        if kind == "snapshot" and max_lag is not None:
            raise InputError("a snapshot serves one version", hint="max_lag is for inflight")
        self.kind: Kind = kind
        self.run = run
        self._bucket = bucket
        self._least = version
        self._max_lag = max_lag
        self._limits = (slots, context, seed, precision)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._error: BaseException | None = None
        self._opened: Future[OpenEngine] = Future()
        self._model: Any = None
        self._stop_ids: frozenset[int] = frozenset()
        self.tokenizer: Any = None
        self._thread = threading.Thread(target=self._run_thread, name="sampler", daemon=True)
        self._thread.start()
        try:
            self._engine = self._opened.result()
        except BaseException:
            self._thread.join()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version that draws the next token."""
        return self._engine.sampler.version

    @property
    def lag(self) -> int:
        """The newest version's number minus that of the one being served."""
        newest = newest_version(self._bucket)
        return 0 if newest is None else newest - self.version

    def get_tokenizer(self) -> Any:
        """Returns the run's tokenizer."""
        return self.tokenizer

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        *,
        least_version: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draws ``num_samples`` completions of a prompt, with ``least_version`` or a newer one.

        ``topk_prompt_logprobs`` asks for that many of the likeliest tokens at each of the prompt.

        Log-probabilities are those of the whole tempered distribution, whatever ``top_k`` and
        ``top_p`` left of it, and of the untempered one at temperature 0. Raises `InputError` for
        parameters that cannot be honored.
        """
        tokens = tokens_of(prompt)
        params = self._checked(sampling_params, len(tokens))
        if not 1 <= num_samples <= 1 << 16:
            raise InputError(f"num_samples is {num_samples}", hint="give 1 to 65536")
        if not 0 <= topk_prompt_logprobs <= MOST_TOP_TOKENS:
            raise InputError(
                f"topk_prompt_logprobs is {topk_prompt_logprobs}",
                hint=f"give 0 to {MOST_TOP_TOKENS}",
            )
        ends = self._ends_of(sampling_params.stop)

        async def run() -> SampleResponse:
            await self._fresh_enough(least_version)
            sequences = await asyncio.gather(
                *(self._one(tokens, params.numbered(one), ends) for one in range(num_samples))
            )
            scores = self._score(tokens) if include_prompt_logprobs else None
            top = self._top(tokens, topk_prompt_logprobs) if topk_prompt_logprobs else None
            return SampleResponse(list(sequences), scores, top)

        return self._submit(run)

    def compute_logprobs(self, prompt: Any) -> APIFuture[list[float | None]]:
        """Scores each token of a prompt after those before it; None for the first."""
        tokens = tokens_of(prompt)

        async def run() -> list[float | None]:
            await self._fresh_enough()
            return self._score(tokens)

        return self._submit(run)

    def close(self) -> None:
        """Finishes submitted requests, and releases the model."""
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        self._thread.join()

    # The methods below run in the sampler's thread, except `_checked`, `_ends_of` and `_submit`.

    def _submit(self, run: _Run) -> APIFuture[Any]:
        if self._closing:
            raise InputError("the sampling client is closed", hint="open another one")
        if self._error is not None:
            raise self._error
        future: Future[Any] = Future()
        self._jobs.put((future, run))
        return APIFuture(future)

    async def _do(self, future: Future[Any], run: _Run) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(await run())
        except BaseException as error:  # Any exception belongs to the caller.
            future.set_exception(error)

    def _checked(self, params: SamplingParams, length: int) -> Sampling:
        return Sampling(
            self._new_tokens(params, length),
            params.temperature,
            Truncation(top_p=params.top_p, top_k=top_k_of(params.top_k)),
            params.seed,
        )

    def _new_tokens(self, params: SamplingParams, length: int) -> int:
        room = self._limits[1] - length
        wanted = params.max_tokens
        if wanted is None:
            wanted = max(min(DEFAULT_MAX_TOKENS, room), 1)
        if wanted > room:
            raise InputError(
                f"a prompt of {length} tokens and {wanted} new ones exceed the client's context "
                f"of {self._limits[1]}",
                hint="open the client with a larger context",
            )
        return wanted

    def _ends_of(self, stop: Any) -> tuple[frozenset[int], tuple[str, ...]]:
        """Returns the token ids and the strings that end a completion, besides the model's own end
        tokens."""
        items = [stop] if isinstance(stop, str) else list(stop or ())
        texts = tuple(item for item in items if isinstance(item, str))
        if stop is not None and not items:
            raise InputError(
                "the embedded engine always stops at the model's end tokens",
                hint="leave stop out, or name further tokens or strings",
            )
        if any(not text for text in texts):
            raise InputError("a stop string is empty")
        return frozenset(int(item) for item in items if not isinstance(item, str)), texts

    async def _one(
        self, tokens: list[int], params: Sampling, ends: tuple[frozenset[int], tuple[str, ...]]
    ) -> SampledSequence:
        ids, texts = ends
        drawn: list[int] = []

        def ended(token: int) -> bool:
            drawn.append(token)
            return token in ids or any(text in self._tail(drawn, text) for text in texts)

        answer = await self._engine.sampler.generate(
            tokens, params, on_token=ended if ids or texts else None
        )
        return SampledSequence(answer.finish, answer.tokens, answer.logprobs, answer.versions)

    def _tail(self, drawn: list[int], text: str) -> str:
        """Returns the text of the last tokens: enough to hold ``text``, whose bytes need at most
        one token each."""
        count = len(text.encode()) + 1
        return str(self.tokenizer.decode(drawn[-count:]))

    @torch.inference_mode()
    def _score(self, tokens: list[int]) -> list[float | None]:
        scores = score_tokens(self._model, tokens)
        return [None, *scores.tolist()]

    @torch.inference_mode()
    def _top(self, tokens: list[int], count: int) -> list[list[tuple[int, float]] | None]:
        ids, scores = top_tokens(self._model, tokens, count)
        rows = zip(ids.tolist(), scores.tolist(), strict=True)
        return [None, *(list(zip(*row, strict=True)) for row in rows)]

    async def _fresh_enough(self, least: int | None = None) -> None:
        """Waits until the client may answer within ``max_lag``."""
        if self.kind == "snapshot":
            return
        least = max(self._least or 0, least or 0)
        while self.version < least:
            await asyncio.sleep(IDLE_S)
        while self._max_lag is not None and self.lag > self._max_lag:
            await asyncio.sleep(IDLE_S)

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            if not self._opened.done():
                self._opened.set_exception(error)
            self._fail_rest(error)

    def _fail_rest(self, error: BaseException) -> None:
        """Fails the requests still queued with the error that ended the thread."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None and job[0].set_running_or_notify_cancel():
                job[0].set_exception(error)

    async def _serve(self) -> None:
        with fetch_model_files(self._bucket, self.run) as name:
            opened = self._open(Path(name))
        follower = None
        if self.kind == "inflight":
            follower = Follower(
                opened.steps,
                stage=lambda step: opened.weights.stage(step.patches, step.version, step.digest),
            )
            follower.start()
        self._opened.set_result(opened)
        try:
            await self._loop(opened, follower)
        finally:
            if follower is not None:
                follower.close()
            await opened.close()

    def _open(self, folder: Path) -> OpenEngine:
        slots, context, seed, precision = self._limits
        self.tokenizer = load_tokenizer(folder)
        config = config_of(self.run, url=self._bucket.url) if self.run.config else None
        adapter = config.train.served_adapter if config else AdapterConfig()

        def build() -> Any:
            model = open_model(folder, adapter)
            if config is not None:
                model = serve_quantized(model, config.train.exporter)
            self._model = serve_as(model, precision)
            return self._model

        opened = open_engine(
            "transformers",
            EngineRequest(
                bucket=self._bucket,
                run=self.run,
                folder=folder,
                build_model=build,
                stop_tokens=lambda model: stop_tokens(model, self.tokenizer),
                slots=slots,
                capacity=context,
                precision=precision,
                seed=seed,
                threads=torch.get_num_threads(),
                version=self._least if self.kind == "snapshot" else None,
            ),
        )
        self._stop_ids = frozenset(stop_tokens(self._model, self.tokenizer))
        return opened

    async def _loop(self, opened: OpenEngine, follower: Follower | None) -> None:
        sampler = opened.sampler
        while True:
            idle = not sampler.active and not self._tasks
            if not self._take_jobs(wait=idle) and idle:
                return
            if follower is not None and (step := follower.poll()) is not None:
                opened.weights.swap(step.patches, step.version, step.digest)
                sampler.version = step.version
                follower.commit(step)
            if sampler.active:
                await sampler.advance()
            await asyncio.sleep(0 if sampler.active or not self._tasks else IDLE_S / 10)

    def _take_jobs(self, *, wait: bool) -> bool:
        """Starts the queued jobs; returns False once the client was closed."""
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S) if wait else self._jobs.get_nowait()
            except queue.Empty:
                return not self._closing
            if job is None:
                continue
            wait = False
            task = asyncio.get_running_loop().create_task(self._do(*job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
