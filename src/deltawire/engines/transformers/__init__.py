"""The embedded engine: batched sampling on a ``transformers`` causal LM in this process."""

from deltawire.engines.transformers.engine import IDLE_S, SamplingRequest, TransformersEngine

__all__ = ["IDLE_S", "SamplingRequest", "TransformersEngine"]
