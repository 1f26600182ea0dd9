"""Advantages of tokens that several episodes share, and of thoughts that are cut at each budget.

A token that was drawn once and is reused by others is trained on once, with the sum of the
advantages of the episodes that share it, each relative to the episodes that do not. So its gradient
has the expectation of as many separate samples. With ``rollout.reuse.train = "every"`` it is
instead trained on as part of each of them, with that episode's advantage (`with_reused_tokens`).
Tokens of a thought have the advantages of
`deltawire.train.loss.anytime`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from deltawire.config import RunConfig, ThinkingConfig
from deltawire.train.loss.anytime import answer_advantages, thought_advantages
from deltawire.wire.rollouts import Group, Trajectory

Episodes = Mapping[tuple[int, int], float]
"""A value of each (group, episode) of a step."""


class TokenSpan(NamedTuple):
    """The advantage of the tokens from ``start`` up to ``end`` of a trajectory.

    Example::

        spans[0, 2] = [TokenSpan(0, 12, 0.25)]   # group 0, trajectory 2
    """

    start: int
    end: int
    advantage: float


Spans = dict[tuple[int, int], list[TokenSpan]]
"""By (group, index of the trajectory in it), spans whose advantage is not the episode's."""


def with_reused_tokens(groups: Sequence[Group], config: RunConfig) -> Sequence[Group]:
    """Returns the groups as they are trained on: with ``train = "every"``, each trajectory as if it
    had drawn its reused tokens itself."""
    if config.rollout.reuse.train != "every" or config.rollout.reuse.episodes == 1:
        return groups
    return [
        replace(group, trajectories=[group.whole(n) for n in range(len(group.trajectories))])
        for group in groups
    ]


def shared_spans(groups: Sequence[Group], advantages: Episodes, *, centred: bool = True) -> Spans:
    """Returns the advantages of tokens that several episodes share.

    Of n episodes with advantages Aᵢ, let K share a token and m be the mean of the others'. Its
    advantage is (n − 1) / n · Σ over K of (Aᵢ − m). A baseline that contains other sharers would
    depend on the token itself. Without sharers this is Aᵢ of ``group_mean`` and ``leave_one_out``,
    whose expectation it has for any sharing. Advantages that are not ``centred`` are added up. If
    all share a token there is nothing to compare with, and it has none.
    """
    spans: Spans = {}
    for number, group in enumerate(groups):
        trained = {place: (episode, t) for place, episode, t in group.trained()}
        of_group = {episode: advantages[number, episode] for episode, _ in trained.values()}
        sharers: dict[int, list[tuple[int, int]]] = {}
        for place, (episode, t) in trained.items():
            if t.reuse is not None and t.reuse.source != place:
                sharers.setdefault(t.reuse.source, []).append((t.reuse.count, episode))
        for source, others in sharers.items():
            own = trained[source][0]
            start = 0
            for end in sorted({count for count, _ in others}):
                sharing = {own, *(episode for count, episode in others if count >= end)}
                value = _shared_advantage(of_group, sharing, centred=centred)
                spans.setdefault((number, source), []).append(TokenSpan(start, end, value))
                start = end
    return spans


def _shared_advantage(
    advantages: Mapping[int, float], sharing: Collection[int], *, centred: bool
) -> float:
    """Returns the advantage of a token that these episodes of a group share."""
    total = math.fsum(advantages[episode] for episode in sharing)
    if not centred:
        return total
    others = [value for episode, value in advantages.items() if episode not in sharing]
    if not others:
        return 0.0
    count = len(advantages)
    return (count - 1) / count * (total - len(sharing) * math.fsum(others) / len(others))


def budget_relative(
    rewards: Episodes, groups: Sequence[Group], config: RunConfig
) -> tuple[dict[tuple[int, int], float], Spans]:
    """Returns the advantage of each episode's answer, and those of the parts of each thought."""
    thinking = config.rollout.thinking
    assert thinking is not None  # held by the configuration
    order = np.argsort(thinking.budgets)
    prior_S = np.array(thinking.weights or [1.0] * len(order), np.float64)[order]
    advantages: dict[tuple[int, int], float] = {}
    spans: Spans = {}
    for number, group in enumerate(groups):
        grid = _Grid(group, number, rewards, thinking)
        answers_HSA = answer_advantages(grid.rewards_HSA)
        for episode, cell in grid.cells.items():
            if (number, episode) in rewards:
                advantages[number, episode] = float(answers_HSA[cell])
        thoughts_HS = thought_advantages(
            grid.of_thoughts_HSA, prior_S, config.train.loss.budget_discount
        )
        for thought, (place, ends) in grid.parts.items():
            starts = [0, *ends[:-1]]
            spans[number, place] = [
                TokenSpan(start, end, float(value))
                for start, end, value in zip(starts, ends, thoughts_HS[thought], strict=True)
                if end > start
            ]
    return {key: advantages[key] for key in rewards}, spans


class _Grid:
    """The answers of a group by thought, budget and number."""

    def __init__(
        self, group: Group, number: int, rewards: Episodes, thinking: ThinkingConfig
    ) -> None:
        budgets, family = len(thinking.budgets), thinking.answers_a_thought
        firsts: dict[int, tuple[int, Trajectory]] = {}
        for place, (episode, t) in enumerate(zip(group.episodes, group.trajectories, strict=True)):
            firsts.setdefault(episode, (place, t))
        thoughts = -(-len(firsts) // family)
        self.rewards_HSA = np.full((thoughts, budgets, thinking.answers), np.nan)
        """NaN where an episode failed or is missing."""
        self.cells: dict[int, tuple[int, int, int]] = {}
        self.parts: dict[int, tuple[int, list[int]]] = {}
        """By thought, the trajectory that drew it, and the end of each part in its tokens."""
        for episode in firsts:
            thought, rest = divmod(episode, family)
            cell = thought, budgets - 1 - rest // thinking.answers, rest % thinking.answers
            self.cells[episode] = cell
            if (number, episode) in rewards:
                self.rewards_HSA[cell] = rewards[number, episode]
        self.of_thoughts_HSA = self.rewards_HSA.copy()
        """The same, without answers after a thought of their own."""
        for thought in range(thoughts):
            place, leader = firsts[thought * family]
            if leader.reuse is None or leader.cause:
                continue
            ends = [0] * budgets
            ends[-1] = leader.reuse.count
            for episode in range(thought * family + 1, min((thought + 1) * family, len(firsts))):
                reuse, (_, s, _) = firsts[episode][1].reuse, self.cells[episode]
                if reuse is None or reuse.source != place:
                    self.of_thoughts_HSA[self.cells[episode]] = np.nan
                else:
                    ends[s] = max(ends[s], reuse.count)
            self.parts[thought] = place, np.maximum.accumulate(ends).tolist()
