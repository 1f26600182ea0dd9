"""Attests SkyRL's vLLM servers after each update::

    deltawire.integrations.skyrl.verify(on_mismatch="stop")

in the function that builds and runs the trainer. The servers need ``DELTAWIRE_ATTEST=1`` where Ray
starts; SkyRL turns vLLM's development mode on by itself.
"""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

from deltawire.attest import Digests, digests, digests_of_stream
from deltawire.integrations.asking import on_actors, over_http
from deltawire.integrations.checking import OnMismatch, WeightCheck, wrapped_once


def verify(on_mismatch: OnMismatch = "warn", *, every: int = 1, token: str = "") -> WeightCheck:
    """Compares the weights of all servers with the trainer's after each update. The dtype is that
    of SkyRL's configuration; the other options are those of `WeightCheck`, which is returned."""
    check = WeightCheck(on_mismatch, every=every, token=token)

    def wrap(original: Any) -> Any:
        @wraps(original)
        async def save_weights_for_sampler(self: Any, *args: Any, **kwargs: Any) -> Any:
            reference = None
            if check.due():
                dtype = self.cfg.generator.inference_engine.model_dtype
                workers = self._actor_groups["policy"]._actor_handlers
                digest = lambda: on_actors(workers, digest_policy, dtype)[0]  # noqa: E731
                reference = await asyncio.to_thread(check.reference, digest)
            result = await original(self, *args, **kwargs)
            if reference is not None:
                urls = self._inference_engine_client.server_urls
                engines = {url: over_http(url, check.token) for url in urls}
                await asyncio.to_thread(check.examine, reference, engines)
            return result

        return save_weights_for_sampler

    wrapped_once(WorkerDispatch, "save_weights_for_sampler", check, wrap)
    return check


def digest_policy(worker: Any, dtype: str) -> Digests | str:
    """Runs in each rank of the policy: digests its shards, or with Megatron what its bridge
    exports."""
    if getattr(worker, "_is_lora", False):
        return "adapters that SkyRL does not merge are not compared"
    model = getattr(getattr(worker, "model", None), "model", None)
    extractor = worker.weight_extractor
    if model is not None and hasattr(model, "named_parameters") and extractor.model is model:
        return digests(model, dtype=dtype)
    import torch

    chunks = extractor.extract_weights(getattr(torch, dtype))
    pairs = (pair for chunk in chunks for pair in zip(chunk.names, chunk.tensors, strict=True))
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        for _ in pairs:  # Exporting is collective.
            pass
        return ""
    return digests_of_stream(pairs)
