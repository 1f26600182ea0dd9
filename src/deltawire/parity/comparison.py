"""Compares two engines on the same sequences: how far apart they are, and where it begins.

Shapes as in `deltawire.parity.scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltawire.parity.divergence import Divergence, divergence
from deltawire.parity.scores import DrawnSequence, Precision, Scorer, Scores

TOLERANCE: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 3e-2}
"""The relative drift of a layer's output that rounding to the coarser of two precisions explains:
several units in the last place (2⁻⁸ in bf16), as errors of a few dozen layers add up like noise."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``drift`` is ‖right − left‖ / ‖left‖ of its output, averaged over tokens,
    and ``worst`` the largest of any token; both include what earlier layers added. ``own`` is the
    mean where the layer was given the left engine's input, so it is due to this layer only."""

    number: int
    drift: float
    worst: float
    own: float


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`. ``divergence`` treats the left engine as the sampler. ``replayed``
    is the same with the left engine's expert choices on the right, and ``flipped_M`` the shares of
    choices that differ without."""

    left: str
    right: str
    divergence: Divergence
    tolerance: float
    layers: tuple[Layer, ...] = ()
    flipped_M: tuple[float, ...] = ()
    replayed: Divergence | None = None

    @property
    def first_drift(self) -> Layer | None:
        """The first layer whose output exceeds the tolerance."""
        return next((layer for layer in self.layers if not layer.drift <= self.tolerance), None)

    @property
    def first_own(self) -> Layer | None:
        """The first layer that exceeds the tolerance when given the same input."""
        return next((layer for layer in self.layers if not layer.own <= self.tolerance), None)


def compare(
    left: Scorer,
    right: Scorer,
    sequences: Sequence[DrawnSequence],
    *,
    layers: bool = False,
    replay: bool = False,
    tolerance: float | None = None,
) -> Comparison:
    """Scores the sequences with both engines and compares the results; raises `InputError` if an
    engine cannot provide what is requested."""
    ours = left.score(sequences, layers=layers)
    theirs = right.score(sequences, layers=layers)
    coarser: Precision = "float32"
    if "bfloat16" in (left.precision, right.precision):
        coarser = "bfloat16"
    found: tuple[Layer, ...] = ()
    if layers:
        fed = right.score(sequences, layers=True, feed=ours)
        found = _layers(ours, theirs, fed)
    return Comparison(
        left.name,
        right.name,
        _divergence(ours, theirs),
        TOLERANCE[coarser] if tolerance is None else tolerance,
        found,
        _flipped(ours, theirs),
        _divergence(ours, right.score(sequences, replay=ours)) if replay else None,
    )


def _divergence(ours: Sequence[Scores], theirs: Sequence[Scores]) -> Divergence:
    sampler = torch.from_numpy(np.concatenate([scores.logprobs_T for scores in ours]))
    trainer = torch.from_numpy(np.concatenate([scores.logprobs_T for scores in theirs]))
    return divergence(trainer, sampler, torch.ones(len(sampler)))


def _layers(
    ours: Sequence[Scores], theirs: Sequence[Scores], fed: Sequence[Scores]
) -> tuple[Layer, ...]:
    drift, own = _drift(ours, theirs), _drift(ours, fed)
    return tuple(
        Layer(number, float(there.mean()), float(there.max()), float(here.mean()))
        for number, (there, here) in enumerate(zip(drift, own, strict=True))
    )


def _drift(ours: Sequence[Scores], theirs: Sequence[Scores]) -> torch.Tensor:
    """Returns ‖right − left‖ / ‖left‖ of each layer's output at each token: float64[L, tokens]."""
    parts = []
    for one, other in zip(ours, theirs, strict=True):
        assert one.hidden_LSH is not None
        assert other.hidden_LSH is not None
        left, right = one.hidden_LSH[1:].double(), other.hidden_LSH[1:].double()
        parts.append((right - left).norm(dim=2) / left.norm(dim=2).clamp(min=1e-30))
    return torch.cat(parts, dim=1)


def _flipped(ours: Sequence[Scores], theirs: Sequence[Scores]) -> tuple[float, ...]:
    """Returns, by expert layer, the share of the left engine's choices that the right one did not
    make; empty if one of them recorded none."""
    flips, count = np.zeros(0), 0
    for one, other in zip(ours, theirs, strict=True):
        if one.routes_SMK is None or other.routes_SMK is None:
            return ()
        missing = (one.routes_SMK[..., :, None] != other.routes_SMK[..., None, :]).all(-1)
        flips = missing.sum(axis=(0, 2)) + (flips if count else 0)
        count += missing.shape[0] * missing.shape[2]
    return tuple((flips / max(count, 1)).tolist())
