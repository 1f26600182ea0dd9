"""Attests AReaL's vLLM servers after each update of an FSDP trainer::

    deltawire.integrations.areal.verify(on_mismatch="stop")

in the training script. The servers need ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``. The
line must run in the processes of the trainer's ranks: a script that controls them from another
process cannot use it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from areal.engine.fsdp_engine import FSDPEngine

from deltawire.attest import digests
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import act_together


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

    def wrap(original: Any) -> Any:
        @wraps(original)
        def update_weights(self: Any, meta: Any) -> None:
            reference = None
            if check.due() and not self.config.use_lora:
                reference = check.reference(lambda: digests(self.model, dtype=check.dtype))
            original(self, meta)
            if self.config.use_lora:
                check.warn_once("adapters of AReaL are not compared")
            if reference is not None:
                problem = ""
                if not self.rank:
                    urls = addresses_of(self.rollout_engine)
                    engines = {url: over_http(url, check.token) for url in urls}
                    problem = check.compare(reference, engines)
                act_together(check, problem)

        return update_weights

    wrapped_once(FSDPEngine, "update_weights", check, wrap)
    return check


def addresses_of(rollout: Any) -> list[str]:
    """Returns the addresses of the servers of AReaL's remote engine."""
    inner = getattr(rollout, "_engine", rollout)
    return list(inner.addresses)
