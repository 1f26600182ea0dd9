"""The trainer: forward passes, master weights, checkpoints, and the client for custom training
loops.

`TrainingClient` and its types are importable from here; they are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.train.client.client import TrainingClient
    from deltawire.train.client.sampling import SamplingClient
    from deltawire.train.client.types import (
        AdamParams,
        APIFuture,
        Datum,
        ForwardBackwardOutput,
        ModelInput,
        OptimStepResponse,
        SampledSequence,
        SampleResponse,
        SamplingParams,
        SaveResponse,
    )

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "ForwardBackwardOutput",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveResponse",
    "TrainingClient",
]

_HOMES = {"TrainingClient": "client", "SamplingClient": "sampling"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"deltawire.train.client.{_HOMES.get(name, 'types')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
