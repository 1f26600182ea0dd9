"""Draws the noise of sampling: of the engine, or of a request that has its own seed.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def seeded(seed: int | None, device: torch.device) -> Generator | None:
    """Returns the generator of a request's seed, None without one."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def log_exponential(like_NV: Tensor, shared: Generator, own: Sequence[Generator | None]) -> Tensor:
    """Returns logarithms of exponential noise, float32[N, V]: rows whose ``own`` generator is set
    draw from that, so that they do not depend on what else is drawn."""
    noise_NV = torch.empty_like(like_NV).exponential_(generator=shared)
    for row_V, generator in zip(noise_NV, own, strict=True):
        if generator is not None:
            row_V.exponential_(generator=generator)
    return noise_NV.log_()
