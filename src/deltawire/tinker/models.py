"""One model that clients train: its requests, in the order of their numbers, on a training client.

Concurrency::

    requests, in any order            the model's task                training client's thread
      accept: store the request ───▶    takes number n, n + 1, …
      ◀── acknowledged                  calls the training client ──▶  computes, publishes, saves
                                        stores the result ◀──────────
      result(n) ◀───────────────────    resolves it

A request counts once it is stored. When the model is opened again, the training client starts from
the newest state in the bucket, and the requests since then are repeated. That gives the same bits,
so that results and versions which exist are not made twice. The same happens when a rank dies that
computes for the model: clients only wait longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltawire.errors import BugError, DeltawireError, FencedError, InputError
from deltawire.store import open_bucket
from deltawire.tinker import requests
from deltawire.tinker.model_runs import ModelOptions, start_run
from deltawire.tinker.requests import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    SaveForSampler,
    SaveTrainingState,
    TrainingRequest,
)
from deltawire.tinker.results import RequestResult, forward_backward_result
from deltawire.tinker.state import ModelRecord, SamplerRecord, SaveRecord, ServerState
from deltawire.train.checkpoint_folders import release_checkpoint
from deltawire.train.client.client import TrainingClient
from deltawire.train.client.hosted import LostTrainerError

GAP_S = 600.0
"""How long a request waits for the one numbered before it, which a client may have lost."""
MOST_LOSSES = 3
"""How often a model's trainer may end without having finished a request; then requests fail."""
KEPT_RESULTS = 1024
"""Results that are kept of requests before the states in the bucket."""

_LOG = logging.getLogger("deltawire.tinker")


class _Call(NamedTuple):
    """A call of the training client under way, and how its value becomes a result."""

    future: Any
    finish: Callable[[Any], RequestResult]


@dataclass
class _Queue:
    """Accepted requests. ``digests`` has every number that was used, None for one whose content was
    not looked at since the start."""

    digests: dict[int, str | None] = field(default_factory=dict)
    waiting: dict[int, TrainingRequest | RequestResult] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    """The numbers of results in the bucket."""
    next: int = 1
    floor: int = 0
    """Numbers below it are not remembered."""


class HostedModel:
    """A model of the server, opened with `open`.

    Example::

        model = HostedModel(state, record, options)
        await model.open()
        await model.accept(1, "forward_backward", body)
        result = await model.result(1, hold_s=30)
    """

    def __init__(self, state: ServerState, record: ModelRecord, options: ModelOptions) -> None:
        self.record = record
        self.failed: DeltawireError | None = None
        """Why the model cannot go on in this process."""
        self.used_at = time.monotonic()
        self._state, self._options = state, options
        self._queue = _Queue()
        self._results: dict[int, asyncio.Future[RequestResult]] = {}
        self._accepting = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._finishing: set[asyncio.Task[None]] = set()
        self._client: TrainingClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._steps = 0
        """Optimizer steps since the last stored state."""
        self._started = 0
        """The last number that was given to the training client."""
        self._closing = False
        self._lost: LostTrainerError | None = None
        """Why the trainer's processes have ended."""
        self._losses = 0
        """How often they ended since a request was finished."""
        self._last_step = 0
        """The last number that took a step or loaded weights."""
        self._floors: list[int] = []

    @property
    def idle(self) -> bool:
        """Returns whether nothing is waiting or under way."""
        queue = self._queue
        return not self._finishing and queue.next not in queue.waiting and self._client is not None

    async def open(self) -> None:
        """Reads which requests there are, and starts to work on those that are not done."""
        accepted, results = await asyncio.to_thread(self._state.numbers, self.record.id)
        self._queue.digests = dict.fromkeys(accepted | results)
        self._queue.stored = results
        self._queue.floor = min(accepted | results, default=0)
        self._task = asyncio.create_task(self._run())

    async def accept(self, number: int, kind: str, body: bytes) -> None:
        """Accepts a request, once. Raises `InputError` if its number was used for another one."""
        self.used_at = time.monotonic()
        digest = await asyncio.to_thread(requests.canonical_digest, kind, body)
        async with self._accepting:
            queue = self._queue
            if number in queue.digests:
                await self._require_same(number, digest)
                return
            if number < max(queue.floor, 1) and number != 0:
                raise InputError(
                    f"seq_id {number} of {self.record.id} is older than what is remembered",
                    hint="numbers count from 1; open a new training client",
                )
            found = await asyncio.to_thread(self._decoded, kind, body)
            await asyncio.to_thread(self._state.put_request, self.record.id, number, kind, body)
            queue.digests[number] = digest
            self._add(number, found)

    async def _require_same(self, number: int, digest: str) -> None:
        known = self._queue.digests[number]
        if known is None:
            stored = await asyncio.to_thread(self._state.request, self.record.id, number)
            if stored is not None:
                known = await asyncio.to_thread(requests.canonical_digest, stored.kind, stored.body)
                self._queue.digests[number] = known
        if known != digest:
            raise InputError(
                f"seq_id {number} of {self.record.id} was used for another request",
                hint="a retry must repeat its request; new requests take the next number",
            )

    def _add(self, number: int, request: TrainingRequest | RequestResult) -> None:
        self._queue.waiting[number] = request
        if isinstance(request, RequestResult):
            self._resolve(number, request)  # A refused request does not wait for its turn.
        self._arrived.set()

    async def result(self, number: int, *, hold_s: float) -> RequestResult | None:
        """Waits at most ``hold_s`` seconds for the result of a request; None if it is not there
        yet. Raises `InputError` if there is no such request."""
        self.used_at = time.monotonic()
        if number not in self._queue.digests:
            raise InputError(f"there is no request {self.record.id}:{number}")
        future = self._future(number)
        if not future.done() and number in self._queue.stored:
            stored = await asyncio.to_thread(self._state.result, self.record.id, number)
            if stored is not None:
                return stored
        await asyncio.wait([future], timeout=hold_s)
        if not future.done():
            return None
        if number in self._queue.stored:
            self._results.pop(number, None)  # The bucket has it, should it be asked for again.
        return future.result()

    def _future(self, number: int) -> asyncio.Future[RequestResult]:
        future = self._results.get(number)
        if future is None:
            future = self._results[number] = asyncio.get_running_loop().create_future()
        return future

    def _resolve(self, number: int, result: RequestResult) -> None:
        future = self._future(number)
        if not future.done():
            future.set_result(result)

    async def close(self, *, save: bool) -> None:
        """Ends the work: what is under way is finished, what is waiting is done at the next start.
        With ``save``, the state is stored."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._finishing:
            await asyncio.wait(self._finishing)
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.to_thread(self._close, client, save=save and self.failed is None)

    def _close(self, client: TrainingClient, *, save: bool) -> None:
        try:
            if save and self._started:
                with contextlib.suppress(LostTrainerError):  # Its requests are repeated.
                    client.save_state(record={"seq": self._started}).result()
        finally:
            client.close(save=False)

    # The methods below run in the model's task.

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._serve()
                except LostTrainerError as error:
                    await self._recover(error)
        except asyncio.CancelledError:
            raise
        except DeltawireError as error:
            self._fail(error)
        except Exception as error:
            _LOG.exception("the model %s failed", self.record.id)
            self._fail(BugError(f"the server failed: {type(error).__name__}: {error}"))

    async def _serve(self) -> None:
        """Opens the model and works on its requests, until its trainer has ended."""
        # A thread cannot be cancelled: wait for it even if the model is closed meanwhile.
        opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        try:
            first = await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await opening
            raise
        await self._repeat(first)
        self._resolve(0, self._created())
        while True:
            number, request = await self._take()
            await self._work(number, request)

    async def _recover(self, error: LostTrainerError) -> None:
        """Forgets what the lost trainer had in memory, so that it is repeated from the bucket.
        Raises the error if that has not helped."""
        _LOG.warning("%s: %s", self.record.id, error)
        if self._finishing:
            await asyncio.wait(self._finishing)
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(self._close, client, save=False)
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise InputError(
                f"the trainer of {self.record.id} ended {self._losses} times in a row: "
                f"{error.message}",
                hint="see the server's log: a request may need more memory than there is",
            )
        self._lost = None
        self._steps = self._started = self._last_step = 0
        self._floors.clear()

    def _fail(self, error: DeltawireError) -> None:
        """Answers every waiting request with the error; the next use opens the model again."""
        self.failed = error
        _LOG.error("%s: %s", self.record.id, error)
        for number in self._queue.digests:
            if number not in self._queue.stored:
                self._resolve(number, RequestResult.of_error(error))

    def _created(self) -> RequestResult:
        if self.record.source:
            return RequestResult.json({"path": self.record.source, "type": "load_weights"})
        return RequestResult.json({"model_id": self.record.id, "type": "create_model"})

    def _open(self) -> int:
        """Opens the training client, on a new run if there is none; returns the number of the last
        request that its state has seen."""
        url = self._state.run_url(self.record.folder)
        bucket = open_bucket(url, create=True)
        start_run(bucket, self.record, self._options)
        client = TrainingClient.load(url, lost_state="repeat", ranks=self._options.ranks)
        self._client = client
        if self.record.source and "seq" not in client.state_record:
            folder, _, version = self.record.source.rpartition("@")
            where = f"{self._state.run_url(folder)}@{version}"
            client.load_state(where, optimizer=self.record.optimizer).result()
            client.save_state(record={"seq": 0}).result()
            return 0
        seen = client.state_record.get("seq", 0)
        return seen if isinstance(seen, int) else 0

    async def _repeat(self, seen: int) -> None:
        """Repeats the requests since the state: gradients that had no step yet, and all later
        ones. Then the work goes on with the first number that never came."""
        first = await asyncio.to_thread(self._first_pending, seen)
        queue = self._queue
        queue.next = max(seen + 1, 1)
        for number in sorted(queue.digests):
            if number < max(first, 1) or number in queue.waiting:
                continue
            stored = await asyncio.to_thread(self._state.request, self.record.id, number)
            if stored is None:
                continue
            request = await asyncio.to_thread(self._decoded, stored.kind, stored.body)
            if number <= seen:
                await self._work(number, request)
            else:
                self._add(number, request)

    def _first_pending(self, seen: int) -> int:
        """Returns the first of the gradients that are newer than the last step the state saw."""
        first = seen + 1
        for number in range(seen, 0, -1):
            stored = self._state.request(self.record.id, number)
            if stored is None:
                break
            if stored.kind in ("optim_step", "load_weights"):
                result = self._state.result(self.record.id, number)
                if result is None or result.kind != "error":
                    break
            if stored.kind == "forward_backward":
                first = number
        return first

    async def _take(self) -> tuple[int, TrainingRequest | RequestResult]:
        """Waits for the next number."""
        queue = self._queue
        while self._lost is None and queue.next not in queue.waiting:
            self._arrived.clear()
            try:
                async with asyncio.timeout(GAP_S if queue.waiting else None):
                    await self._arrived.wait()
            except TimeoutError:
                missing = queue.next
                queue.next = min(queue.waiting)
                lost = InputError(
                    f"seq_id {missing} of {self.record.id} did not come for {GAP_S:.0f} s, and "
                    f"{queue.next} waits for it",
                    hint="a request of this client was lost: open a new training client",
                )
                queue.waiting[queue.next] = RequestResult.of_error(lost)
        if self._lost is not None:
            raise self._lost
        number = queue.next
        queue.next += 1
        return number, queue.waiting.pop(number)

    async def _work(self, number: int, request: TrainingRequest | RequestResult) -> None:
        """Starts one request; the training client finishes them in the order of their start."""
        if isinstance(request, RequestResult):
            self._resolve(number, request)
            return
        known = None
        if number in self._queue.stored:
            known = await asyncio.to_thread(self._state.result, self.record.id, number)
        if known is not None and (known.kind == "error" or _changes_nothing(request)):
            return
        self._started = max(self._started, number)
        try:
            call = await asyncio.to_thread(self._start, number, request)
        except DeltawireError as error:
            await self._store(number, RequestResult.of_error(error), known)
            self._stop_if_fenced(error)
            return
        task = asyncio.create_task(self._await(number, call, known))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        if isinstance(request, OptimStep):
            await self._count_step(number)
        elif isinstance(request, LoadWeights):  # Its source may be deleted: do not repeat it.
            self._last_step = number
            await self._save_state(number)
        elif isinstance(request, SaveTrainingState):
            await self._state_saved()

    async def _await(self, number: int, call: _Call, known: RequestResult | None) -> None:
        try:
            value = await asyncio.wrap_future(call.future)
            if known is not None and known.kind != "proto":
                return  # Its checkpoint and its answer are stored.
            result = await asyncio.to_thread(call.finish, value)
        except LostTrainerError as error:  # The request is repeated by the next trainer.
            self._lost = error
            self._arrived.set()
            return
        except DeltawireError as error:
            result = RequestResult.of_error(error)
            self._stop_if_fenced(error)
        except Exception as error:  # The request's, whatever it is: the next one may succeed.
            _LOG.exception("request %s:%d failed", self.record.id, number)
            result = RequestResult.of_error(error)
        await self._store(number, result, known)

    def _stop_if_fenced(self, error: DeltawireError) -> None:
        if isinstance(error, FencedError):
            self.failed = error

    async def _store(self, number: int, result: RequestResult, known: RequestResult | None) -> None:
        if known is not None:
            if known.body != result.body:
                _LOG.warning(
                    "%s: request %d was repeated with another result than before the restart",
                    self.record.id,
                    number,
                )
            return
        try:
            await asyncio.to_thread(self._state.put_result, self.record.id, number, result)
        except DeltawireError as error:
            self._resolve(number, RequestResult.of_error(error))
            return
        self._queue.stored.add(number)
        self._losses = 0
        self._resolve(number, result)

    async def _count_step(self, number: int) -> None:
        self._last_step = number
        self._steps += 1
        if self._steps >= self._options.checkpoint_every:
            await self._save_state(number)

    async def _save_state(self, number: int) -> None:
        assert self._client is not None
        saved = await asyncio.to_thread(self._client.save_state, record={"seq": number})
        asyncio.wrap_future(saved.future()).add_done_callback(_log_failure)
        await self._state_saved()

    async def _state_saved(self) -> None:
        """Forgets requests and results that no stored state needs."""
        self._steps = 0
        self._floors.append(self._last_step)
        if len(self._floors) < 4:
            return
        # Two states are kept, and one more may be under way. Gradients may be older than a state,
        # but not than the last step before it.
        floor = self._floors.pop(0) - KEPT_RESULTS
        queue = self._queue
        old = {one for one in queue.digests if 0 < one < floor}
        if not old:
            return
        await asyncio.to_thread(self._state.forget, self.record.id, requests=old, results=old)
        for one in old:
            queue.digests.pop(one)
            self._results.pop(one, None)
        queue.stored -= old
        queue.floor = min(queue.digests, default=0)

    # The methods below run in threads.

    def _decoded(self, kind: str, body: bytes) -> TrainingRequest | RequestResult:
        try:
            found = requests.decode(kind, body)
            return requests.with_known_loss(found, self._options.stable_reinforce)
        except DeltawireError as error:
            return RequestResult.of_error(error)

    def _start(self, number: int, request: TrainingRequest) -> _Call:
        client = self._client
        assert client is not None
        match request:
            case ForwardBackward():
                verb = client.forward if request.forward_only else client.forward_backward
                call = verb(request.data, request.loss_fn, request.settings)
                return _Call(call.future(), forward_backward_result)
            case OptimStep():
                assert request.adam_params is not None
                step = client.optim_step(requests.adam_params(request.adam_params))
                return _Call(
                    step.future(), lambda value: RequestResult.json({"metrics": value.metrics})
                )
            case SaveTrainingState():
                self._check_free(number, request)
                state = client.save_state(request.path, keep=True, record={"seq": number})
                return _Call(state.future(), lambda value: self._named(number, request, value))
            case SaveForSampler():
                saved = client.save_weights_for_sampler(request.path, record={"seq": number})
                if request.path:
                    return _Call(saved.future(), lambda value: self._named(number, request, value))
                return _Call(saved.future(), lambda value: self._sampler(request, value))
            case LoadWeights():
                where = self._state.checkpoint(request.path, now=time.time())
                source = self._state.model(where.model)
                folder = source.folder if source else ""
                path = f"{self._state.run_url(folder)}@{where.version}"
                loaded = client.load_state(path, optimizer=request.optimizer)
                return _Call(loaded.future(), lambda _: RequestResult.json({"path": request.path}))
            case CreateModel():
                raise InputError("a model is created once", hint="open a new training client")

    def _check_free(self, number: int, request: SaveTrainingState) -> None:
        there = self._state.save(self.record.id, "weights", request.path)
        if there is None or there.seq_id == number or request.overwrite:
            return
        if there.expires_at is None or there.expires_at > time.time():
            raise InputError(
                f"there is a checkpoint {there.path}", hint="choose another name, or overwrite=True"
            )

    def _named(
        self, number: int, request: SaveTrainingState | SaveForSampler, saved: Any
    ) -> RequestResult:
        now = time.time()
        record = SaveRecord(
            model=self.record.id,
            kind="weights" if isinstance(request, SaveTrainingState) else "sampler_weights",
            name=request.path,
            version=saved.version,
            seq_id=number,
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            metadata=request.user_metadata,
        )
        before = self._state.save(record.model, record.kind, record.name)
        self._state.put_save(record)
        if before is not None:
            release_unused(self._state, self.record, before)
        for one in self._state.saves(self.record.id):
            if one.expires_at is not None and one.expires_at <= now:
                self._state.delete_save(one)
                release_unused(self._state, self.record, one)
        return RequestResult.json({"path": record.path})

    def _sampler(self, request: SaveForSampler, saved: Any) -> RequestResult:
        session = self.record.id.partition(":")[0]
        number = request.sampling_session_seq_id
        assert number is not None
        record = SamplerRecord(
            folder=self.record.folder,
            version=saved.version,
            kind=request.kind,
            base_model=self.record.base_model,
        )
        self._state.put_sampler(session, number, record)
        return RequestResult.json(
            {"path": None, "sampling_session_id": f"{session}:sample:{number}"}
        )


def release_unused(state: ServerState, model: ModelRecord, gone: SaveRecord) -> None:
    """Lets a deleted checkpoint's state be removed, unless another name needs it."""
    if gone.kind != "weights":
        return
    others = [one for one in state.saves(model.id) if one.kind == "weights"]
    if all(one.version != gone.version for one in others):
        release_checkpoint(open_bucket(state.run_url(model.folder)), gone.version)


def _changes_nothing(request: TrainingRequest) -> bool:
    return isinstance(request, ForwardBackward) and request.forward_only


def _log_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _LOG.warning("a state was not stored: %s", error)
