"""Attests TRL's vLLM after each transfer of its trainers that sample with vLLM::

    deltawire.integrations.trl.verify(on_mismatch="stop")

before training. The server runs with ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``; an
engine in the trainer's process (colocate) needs ``DELTAWIRE_ATTEST=1`` there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from trl.generation.vllm_generation import VLLMGeneration

from deltawire.attest import Digests, digests
from deltawire.attest.engine import ranks_of, request_of
from deltawire.attest.sides import Side
from deltawire.attest.torch_tensors import torch_ranks
from deltawire.engines.live_parts import METHOD, RankParts
from deltawire.errors import InputError
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, said, wrapped_once
from deltawire.integrations.sharing import act_together, rank_here


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
    return wrapped_once(VLLMGeneration, "sync_weights", check, _synced)


def _synced(original: Any, check: WeightCheck, generation: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(generation, *args, **kwargs)
    if check.due():
        _examine(generation, check)
    return result


def _examine(generation: Any, check: WeightCheck) -> None:
    """Compares on the first rank. Each rank takes part in what is shared, whatever failed on it:
    the others wait for it there."""
    reference = check.reference(lambda: _digests(generation, check))
    every: list[Any] = []
    if getattr(generation, "mode", "") == "colocate":
        every = _shared(_asked(generation, reference))
    problem = ""
    if reference is not None and not rank_here():
        engines = partial(_engines_of, generation, every, check)
        problem = check.compare(reference, engines)
    act_together(check, problem)


def _digests(generation: Any, check: WeightCheck) -> Digests:
    model = generation.accelerator.unwrap_model(generation.model)
    merged = hasattr(model, "get_base_model")  # TRL merges adapters for the transfer.
    return digests(model, dtype=check.dtype, merged=merged)


def _asked(generation: Any, reference: Side | None) -> list[Any] | str:
    """Returns what the ranks of this process' engine answer, or what failed."""
    if reference is None:
        return "its rank has no weights to compare with"
    try:
        answers: list[Any] = generation.llm.collective_rpc(METHOD, args=(request_of(reference),))
        return [msgspec.to_builtins(one) for one in answers]
    except Exception as error:
        return said(error)


def _shared(found: list[Any] | str) -> list[Any]:
    """Returns what all ranks found."""
    ranks = torch_ranks(None)
    if ranks is None:
        return [found]
    return [msgspec.json.decode(one) for one in ranks.gather(msgspec.json.encode(found))]


def _engines_of(generation: Any, every: list[Any], check: WeightCheck) -> dict[str, Ask]:
    """Returns what asks each engine; those of the trainer's processes, each of which holds one part
    of an engine, have answered already."""
    if generation.mode != "colocate":
        url = generation.vllm_client.base_url
        return {url: over_http(url, check.token)}
    size = max(1, int(getattr(generation, "tensor_parallel_size", 1) or 1))
    engines: dict[str, Ask] = {}
    for first in range(0, len(every), size):
        name = f"the engine of rank {first}"
        engines[name] = partial(_answered, every[first : first + size], name)
    return engines


def _answered(parts: list[Any], name: str, _reference: Side) -> list[RankParts]:
    for part in parts:
        if isinstance(part, str):
            raise InputError(f"it was not asked: {part}")
    return ranks_of([one for part in parts for one in part], name)
