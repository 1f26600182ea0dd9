"""An engine that says given texts, and a way to play episodes with it."""

import asyncio
import json

from deltawire.chat.text import Text
from deltawire.engines.base import Completion
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits


class Scripted:
    """Says one text after another, and the last one again."""

    version, slots, capacity, active = 3, 4, 65536, 0

    def __init__(self, *texts):
        self._texts = list(texts)

    async def generate(self, prompt, sampling, *, on_token=None):
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        tokens = [*text.encode(), 256]
        return Completion(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")


def called(name, **arguments):
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(environment, tokenizer, *texts, **limits):
    """Plays an episode; returns it, and all of its text."""
    settings = {"max_tokens": 4000, "max_turns": 8, "context": 60_000, **limits}
    episode = await run_episode(
        Scripted(*texts),
        environment,
        Text(tokenizer),
        temperature=1.0,
        limits=EpisodeLimits(**settings),
    )
    tokens = [*episode.prompt, *episode.trajectory.tokens_T.tolist()]
    return episode, bytes(token for token in tokens if token < 256).decode(errors="replace")


def play(*arguments, **limits):
    """Plays one episode."""
    return asyncio.run(played(*arguments, **limits))
