"""The section of episodes that share a finished beginning."""

from __future__ import annotations

from typing import Literal, Protocol

from deltawire.config.base import Count, Section
from deltawire.config.thinking import ThinkingConfig


class ReuseConfig(Section, frozen=True, kw_only=True):
    """Lets episodes of a group begin with the same finished turns (`deltawire.rl.rollout.reuse`).

    One episode draws the turns, the others continue from them and draw only what follows.

    Example::

        [rollout]
        scaffold = "plan_then_solve"
        group_size = 8

        [rollout.reuse]
        episodes = 4
    """

    episodes: Count = 1
    """Episodes that share a beginning; 1 shares nothing."""
    turns: Count = 1
    """Turns of the model that they share."""
    train: Literal["once", "every"] = "once"
    """Train on shared tokens once, with the sum of the advantages of the episodes that share them,
    relative to those that do not, or once for every such episode, with its advantage."""

    def contradiction(self, group_size: int, turns: int) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None.

        ``turns`` is the most turns of an episode.
        """
        if self.episodes == 1:
            return None
        where = "rollout.reuse"
        if self.episodes > group_size:
            reason = f"{where}: {self.episodes} episodes cannot share a beginning in a group"
            return f"{reason} of rollout.group_size = {group_size}", "lower rollout.reuse.episodes"
        if self.turns >= turns:
            reason = f"{where}: no turn follows the {self.turns} that are shared, since an episode"
            hint = "lower rollout.reuse.turns, raise rollout.max_turns, or set a scaffold"
            return f"{reason} has at most {turns}", hint
        return None


class _Sharing(Protocol):
    @property
    def reuse(self) -> ReuseConfig: ...
    @property
    def thinking(self) -> ThinkingConfig | None: ...


def sharing_of(rollout: _Sharing) -> int:
    """Returns how many episodes of a group share a beginning, 1 if none do."""
    thinking = 1 if rollout.thinking is None else rollout.thinking.answers_a_thought
    return max(thinking, rollout.reuse.episodes)
