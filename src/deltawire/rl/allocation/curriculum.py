"""Curriculum: draws each task as often as the band of its estimated pass rate says.

A position of the run's order is passed over with probability 1 − weight. The decision is a hash of
the run's seed and the position, so that a trainer that restarts decides alike. Source: the
difficulty bands of prime-rl (``curriculum.sampler.type = difficulty_pool``).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from deltawire.config.allocation import BandConfig


def weight_of(bands: Sequence[BandConfig], rate: float) -> float:
    """Returns the weight of the first band whose ``up_to`` is at least ``rate``; 1 beyond all.

    Example::

        weight_of([BandConfig(up_to=0.25, weight=0.2)], 0.1)   # 0.2
    """
    return next((band.weight for band in bands if rate <= band.up_to), 1.0)


def is_drawn(position: int, weight: float, *, seed: int) -> bool:
    """Returns whether a position is drawn, with probability ``weight``."""
    digest = blake2b(f"band {seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < weight * 2**64
