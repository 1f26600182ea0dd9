"""Starts an SGLang server on a run's model and moves it to the newest version."""

from __future__ import annotations

from collections.abc import Sequence

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.engines.following.environment import engine_python
from deltawire.engines.sglang.adapters import refuse_adapter_tensors
from deltawire.errors import InputError
from deltawire.store.retrying import RetryingBucket
from deltawire.wire.roles import pin_of
from deltawire.wire.run import TensorSpec


def check_machine() -> None:
    """Raises `InputError` if no environment with SGLang is found."""
    engine_python("sglang")


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raises `InputError` for the first tensor of an adapter: SGLang's slots are not written to."""
    refuse_adapter_tensors(tensors)


def open_engine(request: EngineRequest) -> OpenEngine:
    """Starts the server and has it serve the newest version.

    SGLang fetches the weights itself; this process reads only the manifests, and holds the server
    to their digests. Raises `InputError` if there is no SGLang, it cannot serve the run, or it does
    not come up; `ResyncError` if it does not reach the version, or reaches it with another digest.
    """
    import torch

    from deltawire.engines.following.engine_client import RemoteWeights
    from deltawire.engines.sglang.sampler import SglangSampler
    from deltawire.engines.sglang.server import SglangServer
    from deltawire.sync import ManifestFollower

    if request.record_routes:
        raise InputError(
            "deltawire does not read the expert choices that SGLang returns",
            hint='set parity.routes = "off", or rollout.engine = "vllm"',
        )
    check_tensors(request.run.tensors)
    steps = ManifestFollower(RetryingBucket(request.bucket), request.run)
    newest = steps.prepare()
    if newest is None:
        raise InputError("the run has no version yet", run=request.bucket.url)
    with torch.device("meta"):
        stop_tokens = request.stop_tokens(request.build_model())
    server = SglangServer(
        request.folder,
        request.bucket.url,
        public_key=pin_of(request.run),
        slots=request.slots,
        capacity=request.capacity,
        precision=request.precision,
        seed=request.seed,
        threads=request.threads,
        on_cpu=not torch.cuda.is_available(),
    )
    try:
        server.wait_until_up(stopping=request.is_stopping)
        weights = RemoteWeights(server.calls)
        weights.swap({}, newest.version, newest.digest)
        steps.commit(newest)
    except BaseException:
        server.close()
        raise
    sampler = SglangSampler(
        server.socket,
        stop_tokens=stop_tokens,
        slots=request.slots,
        capacity=request.capacity,
        version=newest.version,
    )

    async def close() -> None:
        await sampler.close()
        server.close()

    return OpenEngine(sampler=sampler, weights=weights, steps=steps, close=close, external=True)
