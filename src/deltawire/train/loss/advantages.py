"""Advantages: the reward of an episode relative to its group. Every episode counts once, whatever
its number of segments or tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4


def _centred(rewards_E: Tensor, groups_E: Tensor) -> tuple[Tensor, Tensor]:
    """r − mean of its group, and the group's size, float64[E] each. In double precision the mean of
    equal float32 rewards is exact, so that equal rewards give exact zeros."""
    rewards = rewards_E.double()
    count = torch.bincount(groups_E).double()
    mean = torch.zeros_like(count).index_add_(0, groups_E, rewards) / count
    return rewards - mean[groups_E], count[groups_E]


def group_mean(rewards_E: Tensor, groups_E: Tensor) -> Tensor:
    """r − mean of the group: float32[E].

    ``groups_E`` numbers each episode's group. Without the division, prompts weigh in proportion
    to the spread of their rewards. Source: Dr. GRPO, Liu et al. 2025, section 3.2.
    """
    return _centred(rewards_E, groups_E)[0].float()


def group_std(rewards_E: Tensor, groups_E: Tensor) -> Tensor:
    """(r − mean) / (std + ε) within the group, std over n − 1, ε = 1e-4: float32[E].

    A group of equal rewards gets zeros. Source: GRPO, Shao et al. 2024 (DeepSeekMath), section 4.1.
    """
    centred, count = _centred(rewards_E, groups_E)
    squares = centred.new_zeros(int(groups_E.max()) + 1)
    squares = squares.index_add_(0, groups_E, centred**2)[groups_E]
    return (centred / ((squares / (count - 1).clamp(min=1)).sqrt() + EPSILON)).float()


def leave_one_out(rewards_E: Tensor, groups_E: Tensor) -> Tensor:
    """r − mean of the group's other episodes = (r − mean)·n / (n − 1): float32[E].

    An unbiased baseline, because it does not depend on the episode itself. A group of one gets 0.
    Source: RLOO, Ahmadian et al. 2024, eq. 8; Kool et al. 2019.
    """
    centred, count = _centred(rewards_E, groups_E)
    return (centred * count / (count - 1).clamp(min=1)).float()


def given(rewards_E: Tensor, groups_E: Tensor) -> Tensor:
    """The reward itself: float32[E]. For groups whose rewards are advantages already, such as a
    learner's (`deltawire.live.learning`)."""
    del groups_E
    return rewards_E.float()


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_std": group_std,
    "leave_one_out": leave_one_out,
    "given": given,
}
"""The advantage estimators, by their names in ``train.loss.advantage``."""
