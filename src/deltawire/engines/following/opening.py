"""Opens an engine whose server fetches a run's weights itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.engines.following.engine_client import RemoteWeights
from deltawire.engines.following.engine_server import EngineServer, ServedModel
from deltawire.engines.following.remote_sampler import RemoteSampler
from deltawire.engines.following.routed_experts import experts_of
from deltawire.errors import InputError
from deltawire.sync import ManifestFollower
from deltawire.wire.roles import pin_of


def shape_of(request: EngineRequest) -> Any:
    """Builds the run's model without memory."""
    with torch.device("meta"):
        return request.build_model()


def open_followed(
    request: EngineRequest,
    model: Any,
    start: Callable[[ServedModel], EngineServer],
    sampler: type[RemoteSampler],
) -> OpenEngine:
    """Starts a server of ``model``, from `shape_of`, and has it serve the newest version.

    The server fetches the weights; this process reads only the manifests, and holds the server to
    their digests. Raises `InputError` if the run has no version, or routes are asked for of a model
    without experts, or the server does not come up; `ResyncError` if it does not reach the version,
    or reaches it with another digest.
    """
    experts = experts_of(model.config) if request.record_routes else None
    steps = ManifestFollower(request.bucket, request.run)
    newest = steps.prepare()
    if newest is None:
        raise InputError("the run has no version yet", run=request.bucket.url)
    server = start(
        ServedModel(
            request.folder,
            request.bucket.url,
            slots=request.slots,
            capacity=request.capacity,
            precision=request.precision,
            seed=request.seed,
            threads=request.threads,
            public_key=pin_of(request.run),
            routes=experts is not None,
        )
    )
    try:
        server.wait_until_up(stopping=request.is_stopping)
        weights = RemoteWeights(server.calls)
        weights.swap({}, newest.version, newest.digest)
        steps.commit(newest)
    except BaseException:
        server.close()
        raise
    opened = sampler(
        server.socket,
        stop_tokens=request.stop_tokens(model),
        slots=request.slots,
        capacity=request.capacity,
        version=newest.version,
        experts=experts,
    )

    async def close() -> None:
        await opened.close()
        server.close()

    return OpenEngine(sampler=opened, weights=weights, steps=steps, close=close, external=True)
