"""Length terms: change an episode's reward by the number of tokens that the model drew.

n is that number for an episode, over all its turns; where a budget is meant, n and the budget are
those of the thinking. Each term takes rewards and returns rewards, float64[E]; several apply in the
order in which they are listed. They change what a step learns from; groups keep their rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltawire.config import LengthTerm, RunConfig
from deltawire.config.scaffold import turn_limit
from deltawire.errors import CorruptError
from deltawire.wire.rollouts import Group

Rewards = NDArray[np.float64]


@dataclass(frozen=True)
class EpisodeLengths:
    """The lengths of E episodes: ``drawn_E`` tokens of the model, ``thought_E`` tokens
    of its thinking, ``budget_E`` for it (the budget of a turn times the turns, 0 without one), and
    ``groups_E``, the number of each episode's group."""

    drawn_E: Rewards
    thought_E: Rewards
    budget_E: Rewards
    groups_E: NDArray[np.int64]


def overlong(rewards_E: Rewards, of: EpisodeLengths, term: LengthTerm, limit: int) -> Rewards:
    """Adds 0 up to L - C tokens, (L - C - n) / C up to L, and -1 beyond, with the limit L and the
    cushion C. Source: DAPO, Yu et al. 2025 (arXiv 2503.14476), eq. 13."""
    largest, cushion = term.limit or limit, term.cushion
    excess_E = (largest - cushion - of.drawn_E) / cushion
    return rewards_E + np.clip(excess_E, -1.0, 0.0)


def l1_exact(rewards_E: Rewards, of: EpisodeLengths, term: LengthTerm, limit: int) -> Rewards:
    """Subtracts α·|budget - n|. Source: L1-Exact, Aggarwal and Welleck 2025 (arXiv 2503.04697)."""
    del limit
    return rewards_E - term.alpha * np.abs(of.budget_E - of.thought_E)


def l1_max(rewards_E: Rewards, of: EpisodeLengths, term: LengthTerm, limit: int) -> Rewards:
    """Multiplies by clip(α·(budget - n) + δ, 0, 1). Source: L1-Max, the same paper."""
    del limit
    return rewards_E * np.clip(term.alpha * (of.budget_E - of.thought_E) + term.delta, 0.0, 1.0)


def group_share(rewards_E: Rewards, of: EpisodeLengths, term: LengthTerm, limit: int) -> Rewards:
    """Subtracts α · mean reward of the group · n / largest n of the group, so that a group in which
    nothing succeeds is not taught to be short. Source: prime-rl's ``length_penalty``."""
    del limit
    result = rewards_E.copy()
    for group in np.unique(of.groups_E):
        members = of.groups_E == group
        most = max(1.0, float(of.drawn_E[members].max()))
        mean = float(rewards_E[members].mean())
        result[members] -= term.alpha * mean * of.drawn_E[members] / most
    return result


TERMS: dict[str, Callable[[Rewards, EpisodeLengths, LengthTerm, int], Rewards]] = {
    "overlong": overlong,
    "l1_exact": l1_exact,
    "l1_max": l1_max,
    "group_share": group_share,
}
"""The terms, by their names in ``train.loss.lengths``."""


def with_length_terms(
    rewards: dict[tuple[int, int], float],
    groups: Sequence[Group],
    config: RunConfig,
    prompts: Sequence[int] = (),
) -> dict[tuple[int, int], float]:
    """The rewards of a step's episodes, by (group, episode), after the configured terms.

    ``prompts`` numbers the prompt of each group, if several groups are one prompt's.
    Raises `CorruptError` for a term on budgets and a group without them.
    """
    terms = config.train.loss.lengths
    if not terms:
        return rewards
    of = lengths_of(rewards, groups)
    if prompts:
        of = replace(of, groups_E=np.array([prompts[n] for n, _ in rewards], np.int64))
    if any(term.kind.startswith("l1_") for term in terms) and not of.budget_E.all():
        raise CorruptError("a group has no thinking budget, and train.loss.lengths reads them")
    limit = config.rollout.max_tokens * turn_limit(config.rollout)
    values_E = np.array(list(rewards.values()), np.float64)
    for term in terms:
        values_E = TERMS[term.kind](values_E, of, term, limit)
    return dict(zip(rewards, values_E.tolist(), strict=True))


def lengths_of(episodes: dict[tuple[int, int], float], groups: Sequence[Group]) -> EpisodeLengths:
    """Counts the tokens of the episodes that are trained on."""
    rows = {key: np.zeros(3) for key in episodes}
    for number, group in enumerate(groups):
        for place, episode, t in group.trained():
            thinking = t.thinking
            rows[number, episode] += (
                float(group.whole(place).mask_T.sum()),
                0.0 if thinking is None else float(sum(count for count, _ in thinking.turns)),
                0.0 if thinking is None else float(thinking.budget * len(thinking.turns)),
            )
    drawn_E, thought_E, budget_E = np.array(list(rows.values())).T
    return EpisodeLengths(drawn_E, thought_E, budget_E, np.array([n for n, _ in rows], np.int64))
