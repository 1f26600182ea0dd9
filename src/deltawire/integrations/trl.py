"""Attests TRL's vLLM after each transfer of its trainers that sample with vLLM::

    deltawire.integrations.trl.verify(on_mismatch="stop")

before training. The server runs with ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``; an
engine in the trainer's process (colocate) needs ``DELTAWIRE_ATTEST=1`` there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import msgspec
from trl.generation.vllm_generation import VLLMGeneration

from deltawire.attest import digests
from deltawire.attest.engine import ranks_of, request_of
from deltawire.attest.sides import Side
from deltawire.attest.torch_tensors import torch_ranks
from deltawire.engines.live_parts import METHOD
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import act_together


def verify(
    on_mismatch: OnMismatch = "warn",
    *,
    every: int = 1,
    dtype: str | None = "bfloat16",
    token: str = "",
) -> WeightCheck:
    """Compares vLLM's weights with the trainer's after each of TRL's transfers. ``token`` is the
    server's ``--api-key``; the other options are those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, dtype=dtype, token=token)

    def wrap(original: Any) -> Any:
        @wraps(original)
        def sync_weights(self: Any) -> None:
            original(self)
            if check.due():
                _examine(self, check)

        return sync_weights

    wrapped_once(VLLMGeneration, "sync_weights", check, wrap)
    return check


def _examine(generation: Any, check: WeightCheck) -> None:
    model = generation.accelerator.unwrap_model(generation.model)
    merged = hasattr(model, "get_base_model")  # TRL merges adapters for the transfer.
    reference = check.reference(lambda: digests(model, dtype=check.dtype, merged=merged))
    if reference is None:
        return
    engines: dict[str, Ask] = {}
    if generation.mode == "colocate":
        engines = _colocated(generation, reference)
    elif generation.accelerator.is_main_process:
        url = generation.vllm_client.base_url
        engines = {url: over_http(url, check.token)}
    examines = generation.accelerator.is_main_process
    act_together(check, check.compare(reference, engines) if examines else "")


def _colocated(generation: Any, reference: Side) -> dict[str, Ask]:
    """Asks the engine of each rank, which holds one part of it, and returns all engines."""
    found = generation.llm.collective_rpc(METHOD, args=(request_of(reference),))
    ranks = torch_ranks(None)
    every = [found] if ranks is None else [
        msgspec.json.decode(one) for one in ranks.gather(msgspec.json.encode(found))
    ]  # fmt: skip
    size = max(1, int(getattr(generation, "tensor_parallel_size", 1) or 1))
    engines: dict[str, Ask] = {}
    for first in range(0, len(every), size):
        answers = [one for part in every[first : first + size] for one in part]
        name = f"the engine of rank {first}"
        engines[name] = _answered(answers, name)
    return engines


def _answered(answers: list[Any], name: str) -> Ask:
    return lambda _reference: ranks_of(answers, name)
