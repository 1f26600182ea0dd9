"""Digests the live weights of a vLLM engine whose weights another system updates: attest-only mode.

Start vLLM with ``--worker-extension-cls deltawire.engines.vllm.attesting.AttestWorker``. On a CPU
its packing kernels are then replaced, as they drop the weights as loaded; on a GPU nothing is. No
run is followed, and no weight is written. All ranks answer one call of ``/collective_rpc``, which
vLLM's workers serve one after the other with its own updates, so no update happens in a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import msgspec

from deltawire.engines.live_digests import answer_of


class AttestWorker:
    """Mixed into vLLM's worker class."""

    def deltawire_live_digests(self, request: str) -> dict[str, Any]:
        """Digests what this rank holds of the tensors of an `AttestRequest` in JSON."""
        from vllm.config import set_current_vllm_config

        worker: Any = self
        config = worker.vllm_config
        draft_config = getattr(config.speculative_config, "draft_model_config", None)
        answer = answer_of(
            worker.get_model(),
            request,
            worker.rank,
            context=lambda: set_current_vllm_config(config),
            draft=getattr(getattr(worker.model_runner, "drafter", None), "model", None),
            # A multi-token head is loaded from the model's checkpoint. Other drafts have their own,
            # in which names such as model.layers.0 mean other tensors.
            one_checkpoint=getattr(draft_config, "model", "") == config.model_config.model,
        )
        found: dict[str, Any] = msgspec.to_builtins(answer)
        return found


class OnInstances:
    """A method that a class does not show, only its instances do. vLLM refuses to start if its
    worker class shows a method of the worker extension, which may be `AttestWorker` too."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Any:
        """Returns the bound method; raises `AttributeError` for the class."""
        if instance is None:
            raise AttributeError(f"{owner.__name__} has it on its instances only")
        return MethodType(self._method, instance)
