"""Figures of a step that depend on its groups only, not on the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class GroupStatistics:
    """Means over the episodes of a step that were not failed, and over its groups.

    ``completion_length`` is the number of tokens that the model drew in an episode; ``truncated``
    the share of episodes that were cut off, at ``max_tokens`` or by a full context.
    ``reward_spread`` is the standard deviation of the rewards in a group (over n − 1), averaged
    over groups; ``zero_advantage`` the share of groups whose rewards are all equal, which move
    nothing. All are 0 without an episode.

    Example::

        GroupStatistics.of(groups).truncated
    """

    completion_length: float = 0.0
    truncated: float = 0.0
    reward_spread: float = 0.0
    zero_advantage: float = 0.0

    @classmethod
    def of(cls, groups: Sequence[Group]) -> GroupStatistics:
        """Returns the figures of these groups."""
        lengths: list[int] = []
        cut: list[bool] = []
        spreads: list[float] = []
        for group in groups:
            tokens: dict[int, int] = {}
            rewards: dict[int, float] = {}
            overlong = group.overlong_episodes
            for _, episode, trajectory in group.trained():
                drawn = int(trajectory.mask_T.sum())
                tokens[episode] = tokens.get(episode, 0) + drawn
                rewards[episode] = trajectory.reward
            lengths += tokens.values()
            cut += [episode in overlong for episode in tokens]
            if rewards:
                values = list(rewards.values())
                equal = min(values) == max(values)
                spreads.append(0.0 if equal else stdev(values))
        if not lengths:
            return cls()
        return cls(fmean(lengths), fmean(cut), fmean(spreads), fmean(s == 0 for s in spreads))
