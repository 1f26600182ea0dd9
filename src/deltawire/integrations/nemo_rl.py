"""Attests NeMo-RL's vLLM workers after each refit::

    deltawire.integrations.nemo_rl.verify(on_mismatch="stop")

in the script that runs the algorithm. The workers need ``DELTAWIRE_ATTEST=1`` where Ray starts.
Nothing is asked over HTTP.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from deltawire.attest import Digests
from deltawire.attest.engine import ranks_of, request_of
from deltawire.engines.live_parts import METHOD
from deltawire.integrations.asking import on_actors
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import digest_export

FUNCTION = "refit_policy_generation"


def verify(
    on_mismatch: OnMismatch = "warn", *, every: int = 1, dtype: str | None = "bfloat16"
) -> WeightCheck:
    """Compares the weights of all vLLM workers with the policy's after each refit. The options are
    those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, dtype=dtype)
    importlib.import_module("nemo_rl.algorithms.grpo")
    for module in list(sys.modules.values()):  # Other algorithms import the function by its name.
        name = getattr(module, "__name__", "")
        if name.startswith("nemo_rl.algorithms") and hasattr(module, FUNCTION):
            wrapped_once(module, FUNCTION, check, _refitted)
    return check


def _refitted(
    original: Any, check: WeightCheck, policy: Any, generation: Any, *args: Any, **kwargs: Any
) -> Any:
    reference = None
    if check.due():  # Before the refit: it may move the policy off the accelerator.
        reference = check.reference(
            lambda: on_actors(policy.worker_group.workers, digest_policy, check.dtype)[0]
        )
    result = original(policy, generation, *args, **kwargs)
    check.examine(reference, lambda: engines_of(generation))
    return result


def engines_of(policy_generation: Any) -> dict[str, Ask]:
    """Returns what asks each engine, by NeMo-RL's own call of the worker that owns it."""
    group = policy_generation.worker_group
    call = "checkpoint_engine_rpc"
    if policy_generation.cfg["vllm_cfg"]["async_engine"]:
        call = "checkpoint_engine_rpc_async"
    owners = [
        group.workers[group.get_dp_leader_worker_idx(shard)] for shard in range(group.dp_size)
    ]
    return {
        f"engine {number}": _asking(getattr(owner, call), f"engine {number}")
        for number, owner in enumerate(owners)
    }


def _asking(call: Any, name: str) -> Ask:
    import ray

    return lambda reference: ranks_of(ray.get(call.remote(METHOD, (request_of(reference),))), name)


def digest_policy(worker: Any, dtype: str | None) -> Digests | str | None:
    """Runs in each rank of the policy: exports the weights as NeMo-RL does for a refit."""
    export = getattr(worker, "_iter_params_with_optional_kv_scales", None)
    return digest_export((export or worker._checkpoint_engine_params)(), dtype)
