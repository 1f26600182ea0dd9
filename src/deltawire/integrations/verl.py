"""Attests verl's vLLM replicas after each update. Configuration of verl::

    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=deltawire.integrations.verl

verl imports the module in the process that updates the replicas, with any checkpoint engine, also
the default one of trainers that share accelerators with the sampler. ``DELTAWIRE_ON_MISMATCH`` says
"warn" (default) or "stop", ``DELTAWIRE_CHECK_EVERY`` which updates are compared. The servers need
``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``: set them where Ray starts.

::

    driver ── each trainer rank exports its weights, rank 0 digests them ── verl's own update
           ── each server's ranks digest what they hold ── compare
"""

from __future__ import annotations

import os
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineManager

from deltawire.attest import Digests
from deltawire.errors import InputError
from deltawire.integrations.asking import on_actors, over_http
from deltawire.integrations.checking import OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import digest_export


def verify(
    on_mismatch: OnMismatch = "warn",
    *,
    every: int = 1,
    dtype: str | None = "bfloat16",
    token: str = "",
) -> WeightCheck:
    """Compares the weights of all replicas with the trainer's after each update. The options are
    those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, dtype=dtype, token=token)
    return wrapped_once(CheckpointEngineManager, "update_weights", check, _updated)


def _updated(original: Any, check: WeightCheck, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Updates, then compares; returns what verl's function does, which may be awaitable."""
    reference = None
    if check.due():
        reference = check.reference(lambda: exported(manager.actor_wg.workers, check.dtype))
    result = original(manager, *args, **kwargs)
    if reference is None:
        return result
    engines = lambda: {  # noqa: E731
        one.server_address: over_http(one.server_address, check.token) for one in manager.replicas
    }
    if not hasattr(result, "__await__"):
        check.examine(reference, engines)
        return result

    async def updated() -> Any:
        import asyncio

        done = await result
        await asyncio.to_thread(check.examine, reference, engines)
        return done

    return updated()


def exported(workers: Any, dtype: str | None) -> Digests | str:
    """Returns the digests of what the trainer's ranks export, or why there are none."""
    found: list[Digests | str | None] = on_actors(workers, digest_trainer, dtype)
    return next(one for one in found if one is not None)


def digest_trainer(holder: Any, dtype: str | None) -> Digests | str | None:
    """Runs in each trainer rank: exports the weights as verl does for an update."""
    stream, adapter = trainer_of(holder).get_per_tensor_param()
    if adapter is not None:
        return "adapters that verl does not merge are not compared"
    return digest_export(stream, dtype)


def trainer_of(holder: Any) -> Any:
    """Returns the training engine of one of verl's actors, which may hold several workers."""
    held = [holder, *getattr(holder, "worker_dict", {}).values()]
    held += getattr(holder, "fused_worker_dict", {}).values()
    for one in held:
        engine = getattr(getattr(one, "actor", None), "engine", None)
        if engine is not None:
            return engine
    raise InputError(f"{type(holder).__name__} has no trainer that exports weights")


verify(
    "stop" if os.environ.get("DELTAWIRE_ON_MISMATCH") == "stop" else "warn",
    every=int(os.environ.get("DELTAWIRE_CHECK_EVERY", "1")),
)
