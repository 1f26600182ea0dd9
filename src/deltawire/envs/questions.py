"""Plays an episode of one question: several attempts, each scored by a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deltawire.envs.base import Action, Environment, Message, Turn


@dataclass
class QuestionEpisode(Environment):
    """One question and up to ``attempts`` answers. The reward is the score of the last one; a score
    of 1 or more ends the episode.

    Example::

        async def score(answer: str) -> float:
            return float(answer.strip() == "5")

        episode = QuestionEpisode(score, "2+3=", attempts=2)
    """

    score: Callable[[str], Awaitable[float]]
    prompt: str | Sequence[Message]
    attempts: int = 1
    retry: str = ""

    async def reset(self) -> Turn:
        """Asks the question."""
        return Turn(self.prompt)

    async def step(self, action: Action) -> Turn:
        """Scores the answer; a wrong one may be followed by another."""
        self.attempts -= 1
        score = await self.score((action.content or action.text).strip())
        if score < 1.0 and self.attempts > 0:
            return Turn(self.retry)
        return Turn(reward=score, done=True)
