"""Attests AReaL's vLLM servers after each update of an FSDP trainer::

    deltawire.integrations.areal.verify(on_mismatch="stop")

in the training script. The servers need ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``. The
line must run in the processes of the trainer's ranks: a script that controls them from another
process cannot use it.
"""

from __future__ import annotations

from typing import Any

from areal.engine.fsdp_engine import FSDPEngine

from deltawire.attest import Digests, digests
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import act_together, rank_here


def verify(
    on_mismatch: OnMismatch = "warn",
    *,
    every: int = 1,
    dtype: str | None = "bfloat16",
    token: str = "",
) -> WeightCheck:
    """Compares the weights of all servers with the trainer's after each update. The options are
    those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, dtype=dtype, token=token)
    return wrapped_once(FSDPEngine, "update_weights", check, _updated)


def _updated(original: Any, check: WeightCheck, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    due = check.due()
    reference = check.reference(lambda: _digests(trainer, check)) if due else None
    result = original(trainer, *args, **kwargs)
    if due:  # On each rank, whatever failed on it: the others wait for it.
        problem = ""
        if reference is not None and not rank_here():
            problem = check.compare(reference, lambda: _engines_of(trainer, check))
        act_together(check, problem)
    return result


def _digests(trainer: Any, check: WeightCheck) -> Digests | str:
    if trainer.config.use_lora:
        return "adapters of AReaL are not compared"
    return digests(trainer.model, dtype=check.dtype)


def _engines_of(trainer: Any, check: WeightCheck) -> dict[str, Ask]:
    urls = addresses_of(trainer.rollout_engine)
    return {url: over_http(url, check.token) for url in urls}


def addresses_of(rollout: Any) -> list[str]:
    """Returns the addresses of the servers of AReaL's remote engine."""
    inner = getattr(rollout, "_engine", rollout)
    return list(inner.addresses)
