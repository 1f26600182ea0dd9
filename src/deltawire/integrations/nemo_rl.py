"""Attests NeMo-RL's vLLM workers after each refit::

    deltawire.integrations.nemo_rl.verify(on_mismatch="stop")

in the script that runs the algorithm. The workers need ``DELTAWIRE_ATTEST=1`` where Ray starts.
Nothing is asked over HTTP.
"""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from typing import Any

from deltawire.attest import Digests, digests_of_stream
from deltawire.attest.engine import ranks_of, request_of
from deltawire.engines.live_parts import METHOD
from deltawire.integrations.asking import on_actors
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, drained, wrapped_once

FUNCTION = "refit_policy_generation"


def verify(
    on_mismatch: OnMismatch = "warn", *, every: int = 1, dtype: str | None = "bfloat16"
) -> WeightCheck:
    """Compares the weights of all vLLM workers with the policy's after each refit. The options are
    those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, dtype=dtype)

    def wrap(original: Any) -> Any:
        @wraps(original)
        def refit_policy_generation(
            policy: Any, policy_generation: Any, *args: Any, **kwargs: Any
        ) -> Any:
            reference = None
            if check.due():  # Before the refit: it may move the policy off the accelerator.
                reference = check.reference(
                    lambda: on_actors(policy.worker_group.workers, digest_policy, check.dtype)[0]
                )
            result = original(policy, policy_generation, *args, **kwargs)
            check.examine(reference, lambda: engines_of(policy_generation))
            return result

        return refit_policy_generation

    importlib.import_module("nemo_rl.algorithms.grpo")
    for module in list(sys.modules.values()):  # Other algorithms import the function by its name.
        name = getattr(module, "__name__", "")
        if name.startswith("nemo_rl.algorithms") and hasattr(module, FUNCTION):
            wrapped_once(module, FUNCTION, check, wrap)
    return check


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
    import torch

    export = getattr(worker, "_iter_params_with_optional_kv_scales", None)
    stream = (export or worker._checkpoint_engine_params)()
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        for _ in stream:  # Exporting is collective.
            pass
        return None
    return drained(stream, lambda whole: digests_of_stream(whole, dtype=dtype))
