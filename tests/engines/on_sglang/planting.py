"""A plugin by which tests plant faults on ranks of SGLang; see `faults`.

``/set_internal_state`` takes numbers only, so a fault is named by its place in `FAULTS`; the
answers of all ranks are in ``/server_info``.
"""

from __future__ import annotations

import faults

FAULTS = ("weigh", "plant_bit", "plant_failure")
STAGES = tuple(faults.STAGES)
KINDS = ("", "die-", "kill-")
PLANT, ANSWERS = "plant", "planted"

_answers = []


def register():
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from deltawire.engines.sglang.hooks import SCHEDULER, STATE

    HookRegistry.register(f"{SCHEDULER}.set_internal_state", around_order, HookType.AROUND)
    HookRegistry.register(f"{STATE}.get_internal_state", after_state, HookType.AFTER)


def encoded(fault, number=0, value=0):
    """The settings that ask for a fault; ``value`` is a seed or a stage."""
    kind = ""
    if isinstance(value, str):
        kind, dash, at = value.rpartition("-")
        kind, value = kind + dash, STAGES.index(at)
    place = FAULTS.index(fault)
    return {PLANT: place, "rank": number, "value": value, "kind": KINDS.index(kind)}


def around_order(original, scheduler, request):
    """Plants what was asked for, on all ranks in the same pass."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    from deltawire.engines.sglang import hooks

    order = request.server_args
    if PLANT not in order:
        return original(scheduler, request)
    (controller,) = hooks._held
    fault, number, value = FAULTS[int(order[PLANT])], int(order["rank"]), int(order["value"])
    if fault == "weigh":
        model = scheduler.tp_worker.model_runner.model
        own = faults.weigh(dict(model.named_parameters()))
    elif fault == "plant_bit":
        own = faults.plant_bit(controller._rank, number, value)
    else:
        stage = KINDS[int(order["kind"])] + STAGES[value]
        own = faults.plant_failure(controller._rank, number, stage)
    _answers[:] = controller.peers.gather_structs(own)
    return SetInternalStateReqOutput(updated=True)


def after_state(result, *_args):
    """Adds the answers to what SGLang reports of itself."""
    result.internal_state[ANSWERS] = list(_answers)
