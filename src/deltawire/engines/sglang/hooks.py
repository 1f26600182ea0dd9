"""Hooks into SGLang's schedulers, loaders and HTTP server, for `plugin`.

SGLang applies hooks after all plugins have registered theirs, and logs those that it cannot apply.
Here a hook that was not applied ends the process: without one of them, a server would serve
weights that do not follow the run, or label tokens with a wrong version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltawire.engines.following.http_calls import ATTEST, REFUSAL, WANT
from deltawire.engines.following.parameter_sums import observed, parameter_sums, record_changes
from deltawire.engines.following.replicated_controller import Command
from deltawire.engines.following.settings import from_environment
from deltawire.engines.sglang import FOLLOW, http_calls
from deltawire.engines.sglang.in_flight import DONE
from deltawire.engines.sglang.rank_controller import RankController
from deltawire.engines.sglang.refusals import refuse_version

MANAGERS = "sglang.srt.managers"
SCHEDULER = f"{MANAGERS}.scheduler.Scheduler"
RECEIVER = f"{MANAGERS}.scheduler_components.request_receiver.SchedulerRequestReceiver"
STATE = f"{MANAGERS}.scheduler_components.internal_state.SchedulerInternalStateController"
UPDATER = f"{MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
LOADER = "sglang.srt.model_loader.loader"

REFUSED = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "check_weights": "CheckWeightsReqOutput",
}
"""SGLang's own calls that write weights, and the type of their answers."""

READS = frozenset({"checksum", "snapshot", "compare"})
"""The actions of ``check_weights`` that write none."""

_BEFORE = "_deltawire_before"
"""The attribute of a model that holds its sums before post-processing."""

_held: list[RankController] = []
"""The controller of this process, once its scheduler has one."""


def install() -> None:
    """Registers all hooks; raises `InputError` for a version that is too old, or bad settings."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    refuse_version(sglang.__version__)
    from_environment(FOLLOW)
    targets: dict[str, tuple[Callable[..., Any], HookType]] = {
        f"{SCHEDULER}.__init__": (after_start, HookType.AFTER),
        f"{RECEIVER}._pull_raw_reqs": (around_pull, HookType.AROUND),
        f"{SCHEDULER}.process_input_requests": (before_requests, HookType.BEFORE),
        f"{SCHEDULER}.process_batch_result": (around_result, HookType.AROUND),
        f"{SCHEDULER}.get_new_batch_prefill": (around_prefill, HookType.AROUND),
        f"{SCHEDULER}.set_internal_state": (around_order, HookType.AROUND),
        f"{STATE}.get_internal_state": (after_state, HookType.AFTER),
        f"{MANAGERS}.schedule_batch.Req.init_next_round_input": (before_match, HookType.BEFORE),
        f"{LOADER}.DefaultModelLoader.postprocess_weights": (observed, HookType.AROUND),
        f"{LOADER}.initialize_dummy_weights": (after_random_weights, HookType.AFTER),
        f"{LOADER}.DummyModelLoader.load_model": (after_random_load, HookType.AFTER),
        **{
            f"{UPDATER}.{name}": (_refusing(answer), HookType.AROUND)
            for name, answer in REFUSED.items()
        },
    }  # fmt: skip
    for target, (hook, kind) in targets.items():
        HookRegistry.register(target, hook, kind)
    require_applied(HookRegistry, sorted(targets), version=sglang.__version__)
    http_calls.install()


def require_applied(registry: Any, targets: list[str], *, version: str) -> None:
    """Has ``registry`` end the process if it has applied its hooks and not all of ``targets``."""
    original = registry.apply_hooks

    def apply_hooks() -> None:
        original()
        if missing := [target for target in targets if target not in registry._patched]:
            raise SystemExit(
                f"deltawire does not fit SGLang {version}, which has no {missing[0]} to hook into. "
                "Versions 0.5.21 and 0.5.23 are known to have"
            )

    registry.apply_hooks = apply_hooks


def after_start(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Loads and attests the newest version before the scheduler reports that it has started."""
    _held[:] = [RankController(scheduler, from_environment(FOLLOW))]


def around_pull(original: Callable[..., Any], receiver: Any) -> Any:
    """On rank 0, adds its commands to the requests that all ranks see in this pass."""
    found = original(receiver)
    if _held and found is not None:
        return [*_held[0].commands(), *found]
    return found


def before_requests(scheduler: Any, requests: list[Any]) -> Any:
    """Does what rank 0 asked for, and leaves the other requests."""
    own = [one for one in requests if isinstance(one, Command)]
    if not own:
        return None
    for command in own:
        _held[0].handle(command)
    return (scheduler, [one for one in requests if not isinstance(one, Command)]), {}


def around_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Leaves out the result of a step that a swap has processed already."""
    return None if result is DONE else original(scheduler, batch, result)


def around_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Starts no sequence while a swap waits for those that run. A prompt that is read in chunks
    goes on, without the requests that wait."""
    if not _held or not _held[0].in_flight.draining:
        return original(scheduler, running_batch)
    if scheduler.chunked_req is not None:
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return original(scheduler, running_batch)
        finally:
            scheduler.waiting_queue = [*waiting, *scheduler.waiting_queue]
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def before_match(request: Any, tree_cache: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Salts a request whose prompt is looked for in the cache."""
    if _held and tree_cache is not None:
        _held[0].in_flight.salt(request)


def around_order(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Takes the orders that `http_calls` sends as settings of the scheduler."""
    order = request.server_args
    if not _held or not order.keys() & {WANT, ATTEST}:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    if WANT in order:
        _held[0].want(int(order[WANT]))
    if ATTEST in order:
        _held[0].attest()
    return SetInternalStateReqOutput(updated=True)


def after_state(result: Any, *_args: Any) -> None:
    """Adds the status to what SGLang reports of itself."""
    if _held:
        status = {**_held[0].status(), "attested": _held[0].last_attested}
        result.internal_state[http_calls.MEMBER] = status


def after_random_weights(_result: None, model: Any, *_args: Any) -> None:
    """Sums the weights that a server starts with that loads no checkpoint."""
    model.__dict__[_BEFORE] = parameter_sums(model)


def after_random_load(model: Any, *_args: Any, **_kwargs: Any) -> None:
    """Records how such weights were changed for kernels."""
    record_changes(model, model.__dict__.pop(_BEFORE))


def _refusing(answer: str) -> Callable[..., Any]:
    def refuse(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        if not _held or getattr(request, "action", "") in READS:
            return original(updater, request)
        from sglang.srt.managers import io_struct

        return getattr(io_struct, answer)(success=False, message=REFUSAL)

    return refuse
