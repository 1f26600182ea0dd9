"""Attaches a `SwapController` to vLLM's engine core, between two of whose steps it swaps.

It replaces methods of the core, and adds those that ``/collective_rpc`` calls.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from deltawire.engines.following.settings import FollowSettings, parse
from deltawire.engines.following.swap_controller import SwapController
from deltawire.engines.vllm import rank_calls
from deltawire.engines.vllm.adapter_slot import adapter_request
from deltawire.engines.vllm.caching import not_running, resalt
from deltawire.engines.vllm.refusals import refuse_configuration
from deltawire.engines.vllm.settings import in_use, only_attests, settings_of
from deltawire.errors import DeltawireError, InputError

FIRST_CALL_WITHIN_S = 30.0
"""Seconds that an engine that cannot start waits for a first caller, to answer with the reason;
vLLM's clients call at once.
"""

PROMPT_LOGPROBS = (
    "vLLM computes no log-probabilities of prompts with an adapter of the head: its kernels take "
    "one row of each request there, and a step with two such requests would end the engine"
)


def hook() -> None:
    """Gives every engine core in this process that uses deltawire a `CoreController`.

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
    if only_attests(core.vllm_config):
        return
    if in_use(core.vllm_config) and not hasattr(core, "deltawire_status"):
        CoreController(core, settings_of(core.vllm_config))


class CoreController(SwapController):
    """Moves an engine core from version to version.

    ``settings`` is None until they come with vLLM's weight-transfer calls. Raises `InputError` for
    parallelism that it cannot update.
    """

    ENGINE = "vllm"

    def __init__(self, core: Any, settings: FollowSettings | None) -> None:
        super().__init__(settings)
        self.core = core
        self._paused_as: Any = None
        self._adapter: Any = None
        self._head = False
        refuse_configuration(core.vllm_config)
        self._attach()
        if settings is not None:
            self.open(settings)

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
            core.has_work = lambda: self._core_has_work() or self.due()

    def _step(self) -> Any:
        if self.due():
            self.advance(attest=self.attest_is_due())
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
            self.adopt()
            if settings.follow:
                self.follow(settings)
        elif method == "finish_weight_update":
            self.adopt()
            self.wanted = self.version
        return answers

    # Methods that `SwapController` needs.

    def call_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """See `SwapController.call_ranks`."""
        answers: list[dict[str, Any]] = self._core_rpc(rank_calls.CALLS[method], None, args, None)
        return answers

    def wake(self) -> None:
        """See `SwapController.wake`."""
        from vllm.v1.engine import EngineCoreRequestType

        if (requests := getattr(self.core, "input_queue", None)) is not None and requests.empty():
            requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def may_swap(self) -> bool:
        """See `SwapController.may_swap`; pauses the scheduler."""
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

    def resume(self) -> None:
        """See `SwapController.resume`."""
        if self._paused_as is not None:
            self.core.scheduler.set_pause_state(self._paused_as)
            self._paused_as = None

    def label(self, answers: list[dict[str, Any]]) -> None:
        """See `SwapController.label`."""
        self.core.set_weight_version(str(self.version))
        if self.settings is not None and self.settings.in_flight == "recompute":
            self.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        if answers[0]["adapter"] and self._adapter is None:
            self._adapter = adapter_request()
            self._head = answers[0]["head"]
        for request in not_running(self.core.scheduler):
            self._assign(request)

    def warn(self, text: str) -> None:
        """See `SwapController.warn`."""
        from vllm.logger import init_logger

        init_logger("vllm.deltawire").warning("%s", text)

    def _assign(self, request: Any) -> None:
        """Has a request that holds no keys and values served by this version: by the run's adapter,
        unless it names another one, and with the cached prefixes of this version only."""
        if request.lora_request is None:
            request.lora_request = self._adapter
        resalt(request, self.epoch)


def _answer(call: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return call(*args)
    except (DeltawireError, ValueError, TypeError) as error:
        return {"version": -1, "wanted": -1, "phase": "serving", "failure": str(error)}
