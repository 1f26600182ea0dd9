"""Measures which part of the training reaches the published weights: the served share.

Published weights are rounded masters. Their change since a run's start, projected on that of the
masters, is the part of the training that a fleet receives::

    served share    ⟨served − served₀, master − master₀⟩ / |master − master₀|²

It is near 1 for dithered masters (`deltawire.train.dither`), and small for masters that start at
the published values while updates are below half a step of the published format. Sums over all
weights would need a second copy of the model, so they are taken over evenly spread elements of each
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltawire.export.shards import is_first_holder, local_part
from deltawire.train.parallel import TrainerMesh

SAMPLED = 4096
"""Elements of a tensor that this rank looks at, at most."""
_LAYER = re.compile(r"\.(?:layers|layer|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class ServedShare:
    """The served share since version ``since``: over all weights, and by layer. A layer whose
    masters have not moved is left out."""

    since: int
    share: float
    layers: dict[str, float]


class ServedShares:
    """Remembers where sampled elements of the masters started, and measures how far they came.

    ``starts`` are this rank's parts of the masters at version ``since``. Elements are at evenly
    spread places; each stands for as many of its tensor as lie between two of them.

    Example::

        shares = ServedShares(masters, masters.items(), torch.bfloat16, since=0)
        ...  # train
        shares.measure(masters, mesh).share
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        starts: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        *,
        since: int,
    ) -> None:
        self._dtype, self._since = dtype, since
        counted = {
            name
            for name, master in masters.items()
            if not isinstance(master, DTensor) or is_first_holder(master)
        }
        self._starts = {
            name: _sampled(start).clone().to(local_part(masters[name]).device)
            for name, start in starts
            if name in counted
        }

    @torch.no_grad()
    def measure(self, masters: Mapping[str, Tensor], mesh: TrainerMesh) -> ServedShare | None:
        """Measures the share now; None if no master has moved. All ranks call this together."""
        names = sorted(masters)
        sums = {name: torch.zeros(2, dtype=torch.float64) for name in names}
        found = []
        for name, start in self._starts.items():
            master = local_part(masters[name])
            now = _sampled(master)
            moved = now.double() - start.double()
            served = now.to(self._dtype).double() - start.to(self._dtype).double()
            weight = master.numel() / max(1, now.numel())
            found.append(torch.stack([(served * moved).sum(), moved.square().sum()]) * weight)
        if found:  # One transfer from the device for all.
            sums |= dict(zip(self._starts, torch.stack(found).cpu(), strict=True))
        total = mesh.sum(torch.cat([sums[name] for name in names])).view(-1, 2)
        layers: dict[str, Tensor] = {}
        for name, pair in zip(names, total, strict=True):
            layer = _layer_of(name)
            layers[layer] = layers.get(layer, torch.zeros_like(pair)) + pair
        along, whole = (float(one) for one in total.sum(0))
        if not whole:
            return None
        shares = {name: float(pair[0] / pair[1]) for name, pair in layers.items() if pair[1]}
        return ServedShare(self._since, along / whole, shares)


def _sampled(values: Tensor) -> Tensor:
    """Returns evenly spread elements of a tensor. Their distance is odd, so that they are not all
    in a few columns of a matrix with a width that is a power of two."""
    flat = values.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED) | 1]


def _layer_of(name: str) -> str:
    """Returns the layer of a parameter, such as ``layers.3``, or its own name."""
    found = _LAYER.search(f".{name}")
    return f"layers.{found[1]}" if found else name.removesuffix(".weight")
