"""Figures of a step that depend on its groups only, not on the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from deltawire.config import RunConfig
from deltawire.wire.rollouts import Group


def pairs_of(groups: Sequence[Group], config: RunConfig) -> int | None:
    """Returns the number of pairs of a served and a better answer that a step trains on; None in a
    run that does not train on pairs."""
    if config.train.loss.preference.kind == "none":
        return None
    return sum(t.better is not None for group in groups for _, _, t in group.trained())


@dataclass(frozen=True)
class GroupStatistics:
    """Means over the episodes of a step that were not failed, and over its groups.

    ``completion_length`` is the number of tokens that the model drew in an episode; ``truncated``
    the share of episodes that were cut off, at ``max_tokens`` or by a full context.
    ``reward_spread`` is the standard deviation of the rewards in a group (over n − 1), averaged
    over groups; ``zero_advantage`` the share of groups whose rewards are all equal, which move
    nothing. All are 0 without an episode. ``thinking_length`` is the number of tokens of thinking
    in a turn, and ``forced_share`` the share of turns whose thinking was closed by force; None
    without budgets. ``reused_length`` is the number of tokens of an episode that another episode
    of its group drew; they are no part of ``completion_length``.

    Example::

        GroupStatistics.of(groups).truncated
    """

    completion_length: float = 0.0
    truncated: float = 0.0
    reward_spread: float = 0.0
    zero_advantage: float = 0.0
    thinking_length: float | None = None
    forced_share: float | None = None
    reused_length: float = 0.0

    @classmethod
    def of(cls, groups: Sequence[Group], parts: Sequence[int] = ()) -> GroupStatistics:
        """Returns the figures of these groups; ``parts[i]`` consecutive ones are prompt i's."""
        lengths: list[int] = []
        cut: list[bool] = []
        thoughts: list[tuple[int, bool]] = []
        reused = 0
        earned: dict[int, list[float]] = {}
        counts = parts or [1] * len(groups)
        prompts = [number for number, count in enumerate(counts) for _ in range(count)]
        for prompt, group in zip(prompts, groups, strict=True):
            tokens: dict[int, int] = {}
            rewards: dict[int, float] = {}
            overlong = group.overlong_episodes
            for place, episode, trajectory in group.trained():
                reused += int(group.whole(place).mask_T.sum() - trajectory.mask_T.sum())
                if trajectory.thinking is not None:
                    turns = trajectory.thinking.turns
                    thoughts += [(count, ended == "forced") for count, ended in turns]
                drawn = int(trajectory.mask_T.sum())
                tokens[episode] = tokens.get(episode, 0) + drawn
                rewards[episode] = trajectory.reward
            lengths += tokens.values()
            cut += [episode in overlong for episode in tokens]
            if rewards:
                earned.setdefault(prompt, []).extend(rewards.values())
        if not lengths:
            return cls()
        spreads = [
            0.0 if min(values) == max(values) else stdev(values) for values in earned.values()
        ]
        return cls(
            fmean(lengths),
            fmean(cut),
            fmean(spreads),
            fmean(s == 0 for s in spreads),
            fmean(count for count, _ in thoughts) if thoughts else None,
            fmean(forced for _, forced in thoughts) if thoughts else None,
            reused / len(lengths),
        )
