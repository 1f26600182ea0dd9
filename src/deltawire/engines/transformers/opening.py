"""Opens the embedded engine on a run's newest version."""

from __future__ import annotations

from collections.abc import Sequence

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.wire.run import TensorSpec


def check_machine() -> None:
    """See `deltawire.engines.registry`: torch runs everywhere."""


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """See `deltawire.engines.registry`: this engine computes with the trainer's model."""


def open_engine(request: EngineRequest) -> OpenEngine:
    """See `deltawire.engines.registry.open_engine`."""
    from deltawire.engines.transformers.engine import TransformersEngine
    from deltawire.placement.base_check import check_module
    from deltawire.placement.live import LiveWeights
    from deltawire.sync import Subscriber, load_mirror
    from deltawire.sync.chain.base_statement import read_base

    model = request.build_model()
    mirror = load_mirror(request.bucket, request.run, at=request.version)
    weights = LiveWeights(model, request.run.tensors, aliases=request.run.aliases)
    weights.load(mirror)
    statement = read_base(request.bucket, request.run)
    check_module(statement, model, who="sampler", run=request.bucket.url)
    sampler = TransformersEngine(
        model,
        stop_tokens=request.stop_tokens(model),
        slots=request.slots,
        capacity=request.capacity,
        seed=request.seed,
        version=mirror.version,
        record_routes=request.record_routes,
    )
    steps = Subscriber(request.bucket, request.run, mirror, stepwise=request.stepwise)
    return OpenEngine(sampler=sampler, weights=weights, steps=steps)
