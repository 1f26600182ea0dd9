"""Attests SkyRL's vLLM servers after each update::

    deltawire.integrations.skyrl.verify(on_mismatch="stop")

in the function that builds and runs the trainer. The servers need ``DELTAWIRE_ATTEST=1`` where Ray
starts; SkyRL turns vLLM's development mode on by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

from deltawire.attest import Digests, digests
from deltawire.integrations.asking import on_actors, over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once
from deltawire.integrations.sharing import digest_export


def verify(on_mismatch: OnMismatch = "warn", *, every: int = 1, token: str = "") -> WeightCheck:
    """Compares the weights of all servers with the trainer's after each update. The dtype is that
    of SkyRL's configuration; the other options are those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, token=token)
    return wrapped_once(WorkerDispatch, "save_weights_for_sampler", check, _saved)


async def _saved(
    original: Any, check: WeightCheck, dispatch: Any, *args: Any, **kwargs: Any
) -> Any:
    reference = None
    if check.due():
        reference = await asyncio.to_thread(check.reference, partial(_exported, dispatch))
    result = await original(dispatch, *args, **kwargs)
    await asyncio.to_thread(check.examine, reference, partial(_engines_of, dispatch, check))
    return result


def _exported(dispatch: Any) -> Digests | str:
    dtype = dispatch.cfg.generator.inference_engine.model_dtype
    workers = dispatch._actor_groups["policy"]._actor_handlers
    found: list[Digests | str] = on_actors(workers, digest_policy, dtype)
    return found[0]


def _engines_of(dispatch: Any, check: WeightCheck) -> dict[str, Ask]:
    urls = dispatch._inference_engine_client.server_urls
    return {url: over_http(url, check.token) for url in urls}


def digest_policy(worker: Any, dtype: str) -> Digests | str | None:
    """Runs in each rank of the policy: digests its shards, or with Megatron what its bridge
    exports."""
    if getattr(worker, "_is_lora", False):
        return "adapters that SkyRL does not merge are not compared"
    model = getattr(getattr(worker, "model", None), "model", None)
    extractor = worker.weight_extractor
    if model is not None and hasattr(model, "named_parameters") and extractor.model is model:
        return digests(model, dtype=dtype)
    import torch

    return digest_export(extractor.extract_weights(getattr(torch, dtype)), pairs=_pairs)


def _pairs(chunk: Any) -> Iterable[tuple[str, Any]]:
    return zip(chunk.names, chunk.tensors, strict=True)
