"""How far sampler and trainer agree."""

from deltawire.parity.divergence import Divergence, divergence

__all__ = ["Divergence", "divergence"]
