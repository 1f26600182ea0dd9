"""Measures how far sampler and trainer agree, and limits how far they may not."""

from deltawire.parity.divergence import Divergence, SequenceSums, divergence, sequence_sums
from deltawire.parity.gate import NO_VERSION, BatchParity, Crossing, ParityMeter, numeric_mask
from deltawire.parity.record import finite, parity_event

__all__ = [
    "NO_VERSION",
    "BatchParity",
    "Crossing",
    "Divergence",
    "ParityMeter",
    "SequenceSums",
    "divergence",
    "finite",
    "numeric_mask",
    "parity_event",
    "sequence_sums",
]
