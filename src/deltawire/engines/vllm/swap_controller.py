"""Moves an engine core from version to version, between two of its steps.

Concurrency::

    watching thread            the core's loop                       each worker
      polls for a newer ─────▶  between two steps: prepare N ──────▶  starts a thread: fetch,
      version; wakes the        …steps continue…                      decode, verify, stage
      loop if it sleeps         between two steps: all staged? ◀────  reports its status
                                (drain: new requests wait until
                                the running ones have finished)
                                between two steps: swap to N ──────▶  scatter, agree, commit
                                relabel, resalt                       or undo
                                the next step is N's

The loop never waits for the bucket, and the workers agree on each swap among themselves: all of
them hold N afterwards, or none.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

from deltawire.engines.following.settings import FollowSettings, parse
from deltawire.engines.following.version_watcher import POLL_EVERY_S, VersionWatcher
from deltawire.engines.vllm import rank_calls
from deltawire.engines.vllm.adapter_slot import adapter_request
from deltawire.engines.vllm.caching import not_running, resalt
from deltawire.engines.vllm.refusals import refuse_configuration
from deltawire.engines.vllm.settings import in_use, settings_of
from deltawire.errors import BugError, DeltawireError, InputError, ResyncError
from deltawire.store import open_bucket

RETRY_AFTER_S = 1.0
"""The pause before a failed swap is tried again; it doubles each time, up to `RETRY_AT_MOST_S`."""

RETRY_AT_MOST_S = 30.0

FIRST_CALL_WITHIN_S = 30.0
"""Seconds that an engine that cannot start waits for a first caller, to answer with the reason;
vLLM's clients call at once.
"""

PROMPT_LOGPROBS = (
    "vLLM computes no log-probabilities of prompts with an adapter of the head: its kernels take "
    "one row of each request there, and a step with two such requests would end the engine"
)

Phase = Literal["serving", "preparing", "ready"]


def hook() -> None:
    """Gives every engine core in this process that uses deltawire a `SwapController`.

    A core in its own process loads plugins only during its construction, too late to wrap that: it
    gets its controller when its loop begins, before the first request.
    """
    from vllm.v1.engine import core

    core.EngineCore.__init__ = _then_attach(core.EngineCore.__init__)
    for kind in (core.EngineCoreProc, core.DPEngineCoreProc):
        if "run_busy_loop" in vars(kind):
            kind.run_busy_loop = _attached_first(kind.run_busy_loop)


def _then_attach(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if not hasattr(self, "input_queue"):
            _attach(self)

    return __init__


def _attached_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _attach(self)
        except Exception as error:
            _answer_first_caller(self, error)
            raise
        return original(self, *args, **kwargs)

    return run_busy_loop


def _answer_first_caller(core: Any, error: Exception) -> None:
    """Answers the first call with ``error``, before the core ends with it. vLLM's client considers
    the core started, and would wait forever for an answer."""
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput

    until = time.monotonic() + FIRST_CALL_WITHIN_S
    while (left := until - time.monotonic()) > 0:
        try:
            kind, request = core.input_queue.get(timeout=left)
        except queue.Empty:
            return
        if kind == EngineCoreRequestType.UTILITY:
            client, call, _, _ = request
            answer = UtilityOutput(call, failure_message=f"deltawire: {error}")
            core.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=answer)))
            return


def _attach(core: Any) -> None:
    if in_use(core.vllm_config) and not hasattr(core, "deltawire_status"):
        SwapController(core, settings_of(core.vllm_config))


class SwapController:
    """Moves an engine core from version to version.

    ``settings`` is None until they come with vLLM's weight-transfer calls. Raises `InputError` for
    parallelism that it cannot update.
    """

    def __init__(self, core: Any, settings: FollowSettings | None) -> None:
        self.core = core
        self.settings = settings
        self.phase: Phase = "serving"
        self.version = -1
        self.wanted = -1
        self.failure = ""
        self.swaps = 0
        self.last_swap: dict[str, Any] = {}
        self._failures = 0
        self._not_before = 0.0
        self._attest_at = float("inf")
        self._paused_as: Any = None
        self._watch: VersionWatcher | None = None
        self._adapter: Any = None
        self._head = False
        refuse_configuration(core.vllm_config)
        self._attach()
        if settings is not None:
            self._open(settings)

    # Methods that replace the core's own.

    def _attach(self) -> None:
        core = self.core
        self._core_step: Callable[[], Any] = core.step_fn
        self._core_add: Callable[..., None] = core.add_request
        self._core_rpc: Callable[..., list[Any]] = core.collective_rpc
        self._core_shutdown: Callable[[], None] = core.shutdown
        core.step_fn = self._step
        core.add_request = self._add_request
        core.collective_rpc = self._collective_rpc
        core.shutdown = self._shutdown
        core.deltawire_status = self.status
        core.deltawire_want = self.want
        core.deltawire_attest = self.attest
        if hasattr(core, "has_work"):
            self._core_has_work: Callable[[], bool] = core.has_work
            core.has_work = lambda: self._core_has_work() or self._due()

    def _step(self) -> Any:
        if self._due():
            self._advance()
        return self._core_step()

    def _shutdown(self) -> None:
        self.close()
        self._core_shutdown()

    def _add_request(self, request: Any, request_wave: int = 0) -> None:
        if self._head and getattr(request.sampling_params, "prompt_logprobs", None) is not None:
            self._refuse(request, PROMPT_LOGPROBS)
            return
        self._assign(request)
        self._core_add(request, request_wave)

    def _refuse(self, request: Any, reason: str) -> None:
        """Answers a request with an error; raises it where vLLM's client is in this process."""
        from vllm.logger import init_logger

        if not hasattr(self.core, "input_queue"):
            raise InputError(reason)
        init_logger("vllm.deltawire").warning("refuses %s: %s", request.request_id, reason)
        self.core._send_error_outputs_to_client([request.request_id], request.client_index)

    def _collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Handles vLLM's own calls and those that arrive over HTTP; deltawire's calls concern the
        whole engine and have one answer.
        """
        own: dict[Any, Callable[..., dict[str, Any]]] = {
            "deltawire_status": self.status, "deltawire_want": self.want,
            "deltawire_attest": self.attest,
        }  # fmt: skip
        if method in own:
            return [_answer(own[method], args)]
        answers = self._core_rpc(method, timeout, args, kwargs)
        if method == "init_weight_transfer_engine":
            values = (kwargs or {}).get("init_info", args[0] if args else None)
            settings = parse(values, where="init_info")
            self.settings = settings
            self._adopt()
            if settings.follow:
                self._follow(settings)
        elif method == "finish_weight_update":
            self._adopt()
            self.wanted = self.version
        return answers

    # Calls from outside.

    def status(self) -> dict[str, Any]:
        """Returns the version served, the one wanted, the last failure, and each rank's status."""
        ranks = self._call_ranks(rank_calls.status) if self.settings is not None else []
        return {
            "version": self.version,
            "digest": ranks[0]["digest"] if ranks else "",
            "wanted": self.wanted,
            "phase": self.phase,
            "failure": self.failure or (self._watch.failure_now() if self._watch else ""),
            "swaps": self.swaps,
            "last_swap": self.last_swap,
            "run": self.settings.run if self.settings else "",
            "ranks": ranks,
        }

    def want(self, version: int | str) -> dict[str, Any]:
        """Moves to ``version``, newer or older, once it is prepared; returns at once."""
        if self.settings is None:
            raise InputError("no run is open")
        self.wanted, self._not_before = int(version), 0.0
        self.failure, self._failures = "", 0
        self.wake()
        return self.status()

    def attest(self) -> dict[str, Any]:
        """Digests the live bits of all ranks, and repairs those that are not the version's before
        the next step."""
        answers = self._call_ranks(rank_calls.attest)
        bad = [answer for answer in answers if not answer.get("sound")]
        if bad:
            self.failure = "; ".join(answer["failure"] for answer in bad)
            self._repair()
            self.failure = f"repaired: {self.failure}"
        return {"version": self.version, "sound": not bad, "ranks": answers}

    def close(self) -> None:
        """Ends the thread that polls for versions; the engine's shutdown calls it."""
        if self._watch is not None:
            self._watch.close()

    # Following the run.

    def _open(self, settings: FollowSettings) -> None:
        for answer in self._call_ranks(rank_calls.open_run, settings):
            _raise_if_failed(answer)
        self._adopt()
        self._follow(settings)

    def _follow(self, settings: FollowSettings) -> None:
        if settings.attest_every_s:
            self._attest_at = time.monotonic() + settings.attest_every_s
        if self._watch is None and (settings.follow or settings.attest_every_s):
            bucket = open_bucket(settings.run)
            self._watch = VersionWatcher(
                self, bucket, polling=settings.follow, public_key=settings.public_key
            )
            self._watch.start()

    @property
    def _epoch(self) -> str:
        return f"{self.swaps} {self.version}"

    def _due(self) -> bool:
        """Returns whether the controller has work to do before the next step."""
        if self.phase == "ready":
            return True
        now = time.monotonic()
        if self.phase == "preparing":
            return now >= self._not_before
        return now >= self._attest_at or (self.wanted != self.version and now >= self._not_before)

    def busy(self) -> bool:
        """Returns whether the loop must be woken even if no newer version was found."""
        return self.phase != "serving" or self._due()

    def wake(self) -> None:
        """Wakes a sleeping loop."""
        from vllm.v1.engine import EngineCoreRequestType

        if (requests := getattr(self.core, "input_queue", None)) is not None and requests.empty():
            requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _advance(self) -> None:
        if self.phase == "serving" and time.monotonic() >= self._attest_at:
            assert self.settings is not None
            self._attest_at = time.monotonic() + self.settings.attest_every_s
            self.attest()
        elif self.phase == "serving":
            self._succeeded(self._call_ranks(rank_calls.prepare, self.wanted))
            self.phase = "preparing"
            self._not_before = time.monotonic() + POLL_EVERY_S
        elif self.phase == "preparing":
            answers = self._call_ranks(rank_calls.status)
            if not self._succeeded(answers):
                return
            self._not_before = time.monotonic() + POLL_EVERY_S
            if all(answer["prepared"] == self.wanted for answer in answers):
                self.phase = "ready"
            elif not any(answer["preparing"] for answer in answers):
                self.phase = "serving"  # The wanted version has changed meanwhile.
        if self.phase == "ready" and self._idle():
            self._swap()

    def _succeeded(self, answers: list[dict[str, Any]]) -> bool:
        """Returns whether nothing failed; otherwise keeps the old version and schedules a retry."""
        failed = [answer["failure"] for answer in answers if answer["failure"]]
        if not failed:
            return True
        self._fail(failed[0])
        return False

    def _fail(self, failure: str) -> None:
        from vllm.logger import init_logger

        self.failure = failure
        pause = min(RETRY_AFTER_S * 2**self._failures, RETRY_AT_MOST_S)
        init_logger("vllm.deltawire").warning(
            "stays at version %d, retrying in %.0f s: %s", self.version, pause, failure
        )
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self.phase = "serving"
        self._resume()

    def _idle(self) -> bool:
        """Returns whether a swap may happen: no step and, with ``drain``, no sequence is running.
        If not, pauses the scheduler until none is."""
        from vllm.v1.core.sched.interface import PauseState

        assert self.settings is not None
        core = self.core
        draining = self.settings.in_flight == "drain" and core.scheduler.running
        if not draining and not core.batch_queue:
            return True
        if self._paused_as is None:
            self._paused_as = core.scheduler.pause_state
            state = PauseState.PAUSED_NEW if draining else PauseState.PAUSED_ALL
            core.scheduler.set_pause_state(max(state, self._paused_as))
        return False

    def _resume(self) -> None:
        if self._paused_as is not None:
            self.core.scheduler.set_pause_state(self._paused_as)
            self._paused_as = None

    def _swap(self) -> None:
        began = time.perf_counter()
        answers = self._call_ranks(rank_calls.swap, self.wanted)
        if not self._succeeded(answers):
            self.attest()  # The live bits may have differed from the mirrors.
            return
        self._adopt()
        self._resume()
        self.phase, self._failures, self.failure = "serving", 0, ""
        self.last_swap = {
            "version": self.version,
            "engine_ms": (time.perf_counter() - began) * 1e3,
            "ranks": [answer["swap"] for answer in answers],
        }

    def _repair(self) -> None:
        """Writes the mirrors' bits over the live ones at once. Raises if that fails, which ends the
        engine: it then has no valid weights to serve.
        """
        for answer in self._call_ranks(rank_calls.repair):
            _raise_if_failed(answer)
        self._adopt()

    def _adopt(self) -> None:
        """Labels tokens with the version that the ranks hold now, and hides older cached prefixes
        from new requests."""
        answers = self._call_ranks(rank_calls.status)
        versions = {answer["version"] for answer in answers}
        if len(versions) != 1:
            raise BugError(f"the ranks hold versions {sorted(versions)}")
        self.version = versions.pop()
        self.wanted = self.version if self.wanted < 0 else self.wanted
        self.swaps += 1
        self.core.set_weight_version(str(self.version))
        if self.settings is not None and self.settings.in_flight == "recompute":
            self.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        if answers[0]["adapter"] and self._adapter is None:
            self._adapter = adapter_request()
            self._head = answers[0]["head"]
        for request in not_running(self.core.scheduler):
            self._assign(request)

    def _assign(self, request: Any) -> None:
        """Has a request that holds no keys and values served by this version: by the run's adapter,
        unless it names another one, and with the cached prefixes of this version only."""
        if request.lora_request is None:
            request.lora_request = self._adapter
        resalt(request, self._epoch)

    def _call_ranks(self, call: Callable[..., dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._core_rpc(call, None, args, None)
        return answers


def _answer(call: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return call(*args)
    except (DeltawireError, ValueError, TypeError) as error:
        return {"version": -1, "wanted": -1, "phase": "serving", "failure": str(error)}


def _raise_if_failed(answer: dict[str, Any]) -> None:
    if answer["failure"]:
        raise ResyncError(answer["failure"])
