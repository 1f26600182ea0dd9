"""Measures the distance of the trainer's log-probabilities from the sampler's.

Shapes: N sequences, C tokens after the prompt. With μ the sampler, π the trainer and tokens drawn
from μ, all figures are functions of the gap x = log π − log μ and the ratio r = eˣ, in double
precision: k3 cancels to about the square of the gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

EXTREME_RATIO = 2.0
"""A ratio above this, or below its inverse, is extreme. Source: Ma et al. 2025, "Stabilizing MoE
reinforcement learning by aligning training and inference routers" (arXiv 2510.11370)."""


@dataclass(frozen=True)
class Divergence:
    """Figures over ``tokens`` drawn tokens, in nats; without any token, those of full agreement.

    ``k1`` = mean(−x) and ``k3`` = mean(r − 1 − x) estimate KL(μ‖π), the second never below 0.
    Source: Schulman, "Approximating KL divergence", 2020. ``k1_reverse`` = mean(r·x) and
    ``k3_reverse`` = mean(r·x − r + 1) estimate KL(π‖μ) from the same draws, weighted by r.
    ``k3_swapped`` = mean(1/r − 1 + x) is k3 with sampler and trainer exchanged. It estimates
    nothing under these draws, but grows where the trainer finds a drawn token unlikely, as ``k3``
    does where it finds one likely; NeMo RL logs both for that reason.

    ``mean_gap`` and ``largest_gap`` are of |x|, ``ratio_max`` is the largest r, ``extreme_share``
    the share of tokens with r beyond a bound or below its inverse. ``effective_share`` is the
    effective sample size (Σr)² / Σr² over the number of tokens (Kong, 1992), from 1 / tokens to 1.

    Example::

        found = divergence(trainer_NC, sampler_NC, mask_NC)
        found.k3, found.largest_gap, found.tokens
    """

    k1: float
    k3: float
    largest_gap: float
    ratio_max: float
    k1_reverse: float = 0.0
    k3_reverse: float = 0.0
    k3_swapped: float = 0.0
    mean_gap: float = 0.0
    extreme_share: float = 0.0
    effective_share: float = 1.0
    tokens: int = 0


NO_DIVERGENCE = Divergence(0.0, 0.0, 0.0, 1.0)
"""The figures over no token."""


@dataclass(frozen=True)
class SequenceSums:
    """The terms of `Divergence`, summed over each sequence's tokens: float64[N] each.

    `joined` combines several micro-batches; any selection of sequences gives a divergence.

    Example::

        parts = [sequence_sums(b.trainer_NC, b.sampler_NC, b.mask_NC) for b in micro_batches]
        whole, by_sequence = joined(parts).total(), joined(parts).each()
    """

    tokens_N: Tensor
    gap_N: Tensor
    k3_N: Tensor
    weighted_gap_N: Tensor
    k3_reverse_N: Tensor
    k3_swapped_N: Tensor
    absolute_N: Tensor
    largest_N: Tensor
    highest_N: Tensor
    extreme_N: Tensor
    log_ratios_N: Tensor
    log_squares_N: Tensor

    def total(self) -> Divergence:
        """Returns the divergence over all sequences."""
        if not len(self.tokens_N):
            return NO_DIVERGENCE
        largest = {"largest_N", "highest_N"}
        logarithms = {"log_ratios_N", "log_squares_N"}

        def over_all(name: str) -> Tensor:
            terms_N: Tensor = getattr(self, name)
            if name in logarithms:
                return terms_N.logsumexp(0, keepdim=True)
            return (
                terms_N.amax(0, keepdim=True) if name in largest else terms_N.sum(0, keepdim=True)
            )

        return SequenceSums(*map(over_all, _FIELDS)).each()[0]

    def each(self) -> list[Divergence]:
        """Returns the divergence of each sequence."""
        count_N = self.tokens_N.clamp(min=1)
        log_shares_N = 2 * self.log_ratios_N - self.log_squares_N
        columns = {
            "k1": -self.gap_N / count_N,
            "k3": self.k3_N / count_N,
            "largest_gap": self.largest_N,
            "k1_reverse": self.weighted_gap_N / count_N,
            "k3_reverse": self.k3_reverse_N / count_N,
            "k3_swapped": self.k3_swapped_N / count_N,
            "mean_gap": self.absolute_N / count_N,
            "extreme_share": self.extreme_N / count_N,
            "effective_share": log_shares_N.exp() / count_N,
        }
        rows = zip(*(column_N.tolist() for column_N in columns.values()), strict=True)
        ends = zip(self.highest_N.tolist(), self.tokens_N.tolist(), strict=True)
        return [
            Divergence(
                **dict(zip(columns, row, strict=True)), ratio_max=_exp(highest), tokens=int(tokens)
            )
            if tokens
            else NO_DIVERGENCE
            for row, (highest, tokens) in zip(rows, ends, strict=True)
        ]

    def rows(self) -> list[list[float]]:
        """Returns the terms as plain numbers, one list a field, for `of_rows`."""
        return [getattr(self, name).tolist() for name in _FIELDS]

    @classmethod
    def of_rows(cls, rows: list[list[float]]) -> SequenceSums:
        """Returns the sums that `rows` listed."""
        return cls(*(torch.tensor(row, dtype=torch.float64) for row in rows))

    def of(self, row: int) -> SequenceSums:
        """Returns the sums of one sequence."""
        return SequenceSums(*(getattr(self, name)[row : row + 1] for name in _FIELDS))


_FIELDS = tuple(SequenceSums.__dataclass_fields__)


def joined(parts: Iterable[SequenceSums]) -> SequenceSums:
    """Concatenates the sequences of several sums."""
    kept = list(parts)
    return SequenceSums(*(torch.cat([getattr(part, name) for part in kept]) for name in _FIELDS))


def sequence_sums(
    trainer_NC: Tensor, sampler_NC: Tensor, mask_NC: Tensor, *, extreme: float = EXTREME_RATIO
) -> SequenceSums:
    """Compares log-probabilities of the drawn tokens, float[N, C] each.

    Only tokens whose mask is not 0 count; other values may be anything, NaN included.
    """
    drawn = mask_NC.bool()
    gap = trainer_NC.detach().double() - sampler_NC.double()
    gap = torch.where(drawn, gap, 0.0)  # x = 0 adds nothing to any sum below
    weighted = torch.where(gap == -math.inf, 0.0, gap.exp() * gap)
    nothing = torch.where(drawn, gap, -math.inf)
    return SequenceSums(
        tokens_N=drawn.sum(1).double(),
        gap_N=gap.sum(1),
        k3_N=(torch.expm1(gap) - gap).sum(1),
        weighted_gap_N=weighted.sum(1),
        k3_reverse_N=_k3_reverse(gap).sum(1),
        k3_swapped_N=torch.where(gap == -math.inf, math.inf, torch.expm1(-gap) + gap).sum(1),
        absolute_N=gap.abs().sum(1),
        largest_N=gap.abs().amax(1),
        highest_N=nothing.amax(1),
        extreme_N=((gap.abs() > math.log(extreme)) & drawn).sum(1).double(),
        log_ratios_N=nothing.logsumexp(1),
        log_squares_N=(2 * nothing).logsumexp(1),
    )


def _k3_reverse(gap: Tensor) -> Tensor:
    """Computes r·x − r + 1 without cancellation near x = 0 and without ∞ − ∞ if r overflows."""
    near = gap.clamp(-1, 1)
    close = near.exp() * near - torch.expm1(near)
    far = torch.where(gap == -math.inf, 1.0, gap.exp() * (gap - 1) + 1)
    return torch.where(gap.abs() <= 1, close, far)


def divergence(trainer_NC: Tensor, sampler_NC: Tensor, mask_NC: Tensor) -> Divergence:
    """Returns the total of `sequence_sums`; the tensors may also be flat, float[C] each."""
    if mask_NC.ndim == 1:
        trainer_NC, sampler_NC, mask_NC = trainer_NC[None], sampler_NC[None], mask_NC[None]
    return sequence_sums(trainer_NC, sampler_NC, mask_NC).total()


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
