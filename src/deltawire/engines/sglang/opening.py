"""Starts an SGLang server on a run's model and moves it to the newest version."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.engines.following.environment import engine_python
from deltawire.engines.following.refusals import refuse_adapters
from deltawire.wire.run import TensorSpec


def check_machine() -> None:
    """Raises `InputError` if no environment with SGLang is found."""
    engine_python("sglang")


def check_tensors(tensors: Iterable[TensorSpec]) -> None:
    """Raises `InputError` for the first tensor of an adapter: SGLang's slots are not written to."""
    refuse_adapters("SGLang", tensors)


def open_engine(request: EngineRequest) -> OpenEngine:
    """Starts the server and has it serve the newest version.

    Raises what `open_followed` raises, and `InputError` if there is no SGLang, or if it cannot
    serve the run.
    """
    import torch

    from deltawire.engines.following.opening import open_followed, shape_of
    from deltawire.engines.sglang.sampler import SglangSampler
    from deltawire.engines.sglang.server import SglangServer

    check_tensors(request.run.tensors)
    start = partial(SglangServer, on_cpu=not torch.cuda.is_available())
    return open_followed(request, shape_of(request), start, SglangSampler)
