"""Inputs and outputs shared by all losses.

Shapes: N trajectories, C tokens after the prompt, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltawire.config import KtoConfig

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this value. Beyond it exp() overflows into gradients that are not
numbers, and every bound in use has long been passed."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch as every loss sees it.

    ``logprobs_NC`` are those of the trained policy, the only tensor with a gradient;
    ``rollout_NC`` those of the sampler. ``old_NC`` are those of the policy before this step, None
    where that is the policy being differentiated, as in the only update of a batch.
    ``reference_NC`` are those of the reference, None without a KL penalty. ``entropy_NC`` is the
    entropy of the policy at each token, in nats, with a gradient if there is a bonus for it.
    ``advantages_NC`` are those of single tokens, None if all of a row have ``advantages_N``.
    ``reference_point`` is the mean distance of a step's sequences to the reference, in nats, which
    ``kto`` compares each with; ``kto`` are its settings.
    ``mask_NC`` is 1 where the model drew the token. ``sequences_N`` numbers each row's sequence
    from 0. ``keep_N`` is 0 for rows that something else rejected; they stay in the denominators.

    Example::

        inputs = LossInputs(logprobs_NC, rollout_NC, advantages_N, mask_NC, sequences_N)
        part = policy_loss(LossConfig(surrogate="cispo"), inputs, totals)
    """

    logprobs_NC: Tensor
    rollout_NC: Tensor
    advantages_N: Tensor
    mask_NC: Tensor
    sequences_N: Tensor
    old_NC: Tensor | None = None
    reference_NC: Tensor | None = None
    entropy_NC: Tensor | None = None
    keep_N: Tensor | None = None
    ratio_base: Literal["old", "rollout"] = "rollout"
    advantages_NC: Tensor | None = None
    reference_point: float | None = None
    kto: KtoConfig | None = None

    @property
    def advantages(self) -> Tensor:
        """The advantages as a column, float[N, 1], or those of each token, float[N, C]."""
        return self.advantages_N[:, None] if self.advantages_NC is None else self.advantages_NC

    @property
    def before(self) -> Tensor:
        """Log-probabilities of the policy before this step, without a gradient."""
        return self.logprobs_NC.detach() if self.old_NC is None else self.old_NC.detach()

    @property
    def base_logprobs(self) -> Tensor:
        """Log-probabilities that the ratio divides by."""
        return self.rollout_NC if self.ratio_base == "rollout" else self.before

    @property
    def log_ratio(self) -> Tensor:
        """log π − log base, within ± `LARGEST_LOG_RATIO`."""
        return log_ratio(self.logprobs_NC, self.base_logprobs)

    @property
    def ratio(self) -> Tensor:
        """ρ = π / base. With the sampler as the base it covers every version between sampling
        and training."""
        return self.log_ratio.exp()


class ClipBounds(NamedTuple):
    """The bounds of a surrogate: ``low`` and ``high`` as `LossConfig` defines them, ``dual`` the
    constant of the dual clip, 0 for none.

    Example::

        bounds = ClipBounds(low=0.2, high=0.28, dual=3.0)
    """

    low: float
    high: float
    dual: float = 0.0


@dataclass(frozen=True)
class TokenLosses:
    """Losses and, as a bool mask, the tokens whose gradient a bound removed or shortened; both
    [N, C].

    Example::

        def reinforce(inputs: LossInputs) -> TokenLosses:
            losses = -inputs.advantages * inputs.logprobs_NC
            return TokenLosses(losses, torch.zeros_like(losses, dtype=torch.bool))
    """

    losses_NC: Tensor
    clipped_NC: Tensor


Surrogate = Callable[[LossInputs, ClipBounds], TokenLosses]
"""A surrogate objective. Add one in a module of this folder and name it in
`deltawire.config.SURROGATES`."""


def log_ratio(logprobs_NC: Tensor, base_NC: Tensor) -> Tensor:
    """log π − log base, within ± `LARGEST_LOG_RATIO`."""
    return (logprobs_NC - base_NC).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_sums(values_NC: Tensor, mask_NC: Tensor, sequences_N: Tensor) -> Tensor:
    """Sum of the unmasked values of each sequence: [S], S = 1 + the largest number."""
    rows = (values_NC * mask_NC).sum(1)
    sums = rows.new_zeros(int(sequences_N.max()) + 1)
    return sums.index_add(0, sequences_N, rows)


def sequence_means(values_NC: Tensor, mask_NC: Tensor, sequences_N: Tensor) -> Tensor:
    """Mean of the unmasked values of each sequence: [S]; 0 for a sequence without any."""
    counts = sequence_sums(torch.ones_like(mask_NC), mask_NC, sequences_N)
    return sequence_sums(values_NC, mask_NC, sequences_N) / counts.clamp(min=1)


def clipped_gain(ratio: Tensor, advantages: Tensor, bounds: ClipBounds) -> TokenLosses:
    """−min(ρA, clip(ρ, 1 − low, 1 + high)·A); with a dual clip c, at most −c·A where A < 0."""
    free = ratio * advantages
    held = ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages
    gain, clipped = torch.minimum(free, held), held < free
    if bounds.dual:
        floor = (bounds.dual * advantages).expand_as(gain)
        low = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(low, floor, gain), clipped | low
    return TokenLosses(-gain, clipped)
