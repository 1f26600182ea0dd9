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
from deltawire.integrations.asking import in_actor, on_actors
from deltawire.integrations.checking import OnMismatch, WeightCheck, wrapped_once

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
            found = None
            if check.due():  # Before the refit: it may move the policy off the accelerator.
                workers = policy.worker_group.workers
                found = on_actors(workers, digest_policy, check.dtype)[0]
            result = original(policy, policy_generation, *args, **kwargs)
            if found is not None:
                check.examine(check.reference(found), engines_of(policy_generation))
            return result

        return refit_policy_generation

    importlib.import_module("nemo_rl.algorithms.grpo")
    for module in list(sys.modules.values()):  # Other algorithms import the function by its name.
        name = getattr(module, "__name__", "")
        if name.startswith("nemo_rl.algorithms") and hasattr(module, FUNCTION):
            wrapped_once(module, FUNCTION, check, wrap)
    return check


def engines_of(policy_generation: Any) -> dict[str, Any]:
    """Returns what asks each engine: the first worker of each is its owner."""
    group = policy_generation.worker_group
    owners = [
        group.workers[group.get_dp_leader_worker_idx(shard)] for shard in range(group.dp_size)
    ]
    return {
        f"engine {number}": in_actor(owner, "llm", f"engine {number}")
        for number, owner in enumerate(owners)
    }


def digest_policy(worker: Any, dtype: str | None) -> Digests | None:
    """Runs in each rank of the policy: exports the weights as NeMo-RL does for a refit."""
    import torch

    export = getattr(worker, "_iter_params_with_optional_kv_scales", None)
    stream = (export or worker._checkpoint_engine_params)()
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        for _ in stream:  # Exporting is collective.
            pass
        return None
    return digests_of_stream(stream, dtype=dtype)
