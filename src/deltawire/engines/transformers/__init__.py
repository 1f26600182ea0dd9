"""Samples in batches from a ``transformers`` causal LM in this process: the embedded engine."""

from deltawire.engines.transformers.engine import IDLE_S, SamplingRequest, TransformersEngine

__all__ = ["IDLE_S", "SamplingRequest", "TransformersEngine"]
