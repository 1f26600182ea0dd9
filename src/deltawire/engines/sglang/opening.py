"""Starts an SGLang server on a run's model and moves it to the newest version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.engines.following.environment import engine_python
from deltawire.engines.sglang.adapters import refuse_adapter_tensors
from deltawire.errors import InputError
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

    Raises what `open_followed` raises, and `InputError` if there is no SGLang, or if it cannot
    serve the run.
    """
    import torch

    from deltawire.engines.following.opening import open_followed
    from deltawire.engines.sglang.sampler import SglangSampler
    from deltawire.engines.sglang.server import SglangServer

    if request.record_routes:
        raise InputError(
            "deltawire does not read the expert choices that SGLang returns",
            hint='set parity.routes = "off", or rollout.engine = "vllm"',
        )
    check_tensors(request.run.tensors)
    with torch.device("meta"):
        stop_tokens = request.stop_tokens(request.build_model())
    start = partial(
        SglangServer,
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

    def sampler_of(path: str, version: int) -> SglangSampler:
        return SglangSampler(
            path,
            stop_tokens=stop_tokens,
            slots=request.slots,
            capacity=request.capacity,
            version=version,
        )

    return open_followed(request, start, sampler_of)
