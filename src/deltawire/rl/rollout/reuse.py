"""Reuses finished beginnings within a group: turns of a scaffold, or one thought at each budget.

::

    first      P ▒▒▒▒▒▒▒▒ a a a ■         draws its turns or its thought, and ends
    others     P ░░░░░░░░ b b b ■         continue from it once it is finished
               P ░░░░ ) c c c ■           the same, cut at a smaller budget

▒ was drawn, ░ is reused: the same tokens, log-probabilities and versions, with mask 0. Each episode
has an environment of its own, which reads the reused turns again; if it then says something else,
reuse ends there and the model draws. If the first episode fails, the others draw everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deltawire.chat.text import Text
from deltawire.config import RolloutConfig
from deltawire.config.reuse import sharing_of
from deltawire.engines.base import Completion, OnToken, Sampler, Sampling
from deltawire.envs.base import AgentHarness, Environment
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits
from deltawire.wire.rollouts import Trajectory

Open = Callable[[], Environment | AgentHarness]


@dataclass(frozen=True)
class _RecordedCall:
    place: int
    """Tokens of the trajectory before it."""
    completion: Completion


class RecordingSampler:
    """Passes requests on to an engine, and keeps what it returned.

    Example::

        recorded = RecordingSampler(engine)
        await recorded.generate(prompt, Sampling(max_tokens=16))
        recorded.calls   # [(len(prompt), completion)]
    """

    active = 0

    def __init__(self, engine: Sampler) -> None:
        self.version, self.slots, self.capacity = engine.version, engine.slots, engine.capacity
        self._engine = engine
        self.calls: list[tuple[int, Completion]] = []
        """The length of each prompt, and the completion."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Completion:
        """See `Sampler.generate`."""
        found = await self._engine.generate(prompt, sampling, on_token=on_token)
        self.calls.append((len(prompt), found))
        return found

    async def advance(self) -> int:
        """Does nothing: the engine's owner calls its own."""
        return 0

    def cancel_all(self) -> None:
        """Does nothing: see `advance`."""


class Beginning:
    """The finished beginning of an episode: ``count`` tokens, and the requests that drew them.

    Example::

        recorded = RecordingSampler(engine)
        first = await run_episode(recorded, environment, text, temperature=1.0, limits=limits)
        beginning = Beginning(first, recorded.calls, first.turn_ends[0])
    """

    def __init__(
        self, episode: Episode, calls: Sequence[tuple[int, Completion]], count: int
    ) -> None:
        t = episode.trajectory
        self.prompt, self.count = episode.prompt, count
        self.tokens = t.tokens_T.tolist()
        self.logprobs, self.versions = t.logprobs_T.tolist(), t.versions_T.tolist()
        self.drawn = t.mask_T.tolist()
        self._calls = [_RecordedCall(length - len(self.prompt), found) for length, found in calls]

    def after(self, prompt: Sequence[int]) -> tuple[int, int, Completion] | None:
        """Returns the range of tokens that were drawn after ``prompt``, and their completion; None
        if there are none."""
        place = len(prompt) - len(self.prompt)
        if not 0 <= place < self.count or [*self.prompt, *self.tokens[:place]] != list(prompt):
            return None
        for call in self._calls:
            end = place
            while (
                end < self.count
                and call.place <= end < call.place + len(call.completion.tokens)
                and self.drawn[end]
                and self.tokens[end] == call.completion.tokens[end - call.place]
            ):
                end += 1
            if end > place:
                whole = end == call.place + len(call.completion.tokens)
                return (
                    place,
                    end,
                    replace(call.completion, finish=call.completion.finish if whole else "length"),
                )
        return None


class ReusingSampler:
    """Answers requests from a beginning as long as they follow it, then from the engine.

    Example::

        sampler = ReusingSampler(engine, beginning)
        episode = await run_episode(sampler, environment, text, temperature=1.0, limits=limits)
    """

    active = 0

    def __init__(self, engine: Sampler, beginning: Beginning) -> None:
        self.version, self.slots, self.capacity = engine.version, engine.slots, engine.capacity
        self._engine = engine
        self._beginning = beginning
        self.reached = 0
        """The number of tokens of the trajectory up to the last one that was reused."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Completion:
        """See `Sampler.generate`."""
        begun = self._beginning
        found = begun.after(prompt)
        if found is None:
            return await self._engine.generate(prompt, sampling, on_token=on_token)
        place, end, completion = found
        finish = completion.finish
        if end > place + sampling.max_tokens:
            end, finish = place + sampling.max_tokens, "length"
        if on_token is not None:
            for number in range(place, end):
                if on_token(begun.tokens[number]):
                    end, finish = number + 1, "stop"
                    break
        self.reached = end
        return Completion(
            begun.tokens[place:end], begun.logprobs[place:end], begun.versions[place:end], finish
        )

    async def advance(self) -> int:
        """Does nothing: the engine's owner calls its own."""
        return 0

    def cancel_all(self) -> None:
        """Does nothing: see `advance`."""


async def play_group(
    engine: Sampler,
    opened: Open,
    text: Text,
    rollout: RolloutConfig,
    limits: Sequence[EpisodeLimits],
    *,
    ended: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Plays the episodes of a group, one for each of ``limits``; ``opened`` makes an environment.

    ``ended`` is called at the end of each episode. Raises `InputError` for a harness if episodes
    are to share a beginning.
    """
    sharing = sharing_of(rollout)
    families = [
        _play_family(engine, opened, text, rollout, limits[first : first + sharing], first, ended)
        for first in range(0, len(limits), sharing)
    ]
    return [episode for family in await asyncio.gather(*families) for episode in family]


async def _play_family(
    engine: Sampler,
    opened: Open,
    text: Text,
    rollout: RolloutConfig,
    limits: Sequence[EpisodeLimits],
    first: int,
    ended: Callable[[], None],
) -> list[Episode]:
    """Plays the episodes that share a beginning: number ``first`` of the group and the next."""

    async def play(sampler: Sampler, own: EpisodeLimits) -> Episode:
        environment = opened()
        if isinstance(environment, AgentHarness) and sharing_of(rollout) > 1:
            raise InputError(
                "episodes of a harness cannot share a beginning: it leads its own conversation",
                hint='set rollout.reuse.episodes = 1, and rollout.thinking.per = "group"',
            )
        found = await run_episode(
            sampler, environment, text, temperature=rollout.temperature, limits=own
        )
        ended()
        return found

    if len(limits) == 1:
        return [await play(engine, limits[0])]
    recorder = RecordingSampler(engine)
    leading = await play(recorder, limits[0])
    cuts = limits[0].thinking is not None and limits[0].thinking.per == "prefix"
    count = _shared_tokens(leading, rollout.reuse.turns, cuts=cuts)
    if not count:
        return [leading, *await asyncio.gather(*(play(engine, own) for own in limits[1:]))]
    beginning = Beginning(leading, recorder.calls, count)

    async def follow(own: EpisodeLimits) -> Episode:
        sampler = ReusingSampler(engine, beginning)
        found = _marked(await play(sampler, own), beginning, sampler.reached, first)
        # Nothing was left to draw, for instance in a full context.
        return await play(engine, own) if found is None else found

    others = await asyncio.gather(*(follow(own) for own in limits[1:]))
    return [replace(leading, reuse=(first, count)) if cuts else leading, *others]


def _shared_tokens(episode: Episode, turns: int, *, cuts: bool) -> int:
    """The tokens of a finished episode that others may begin with; 0 if it failed."""
    if episode.cause:
        return 0
    if cuts:
        return episode.thought_end
    end = episode.turn_ends[turns - 1] if len(episode.turn_ends) >= turns else 0
    return end if end < len(episode.trajectory.tokens_T) else 0


def _marked(episode: Episode, beginning: Beginning, reached: int, first: int) -> Episode | None:
    """The episode with its reused tokens marked; None if it drew no others."""
    t = episode.trajectory
    own = episode.prompt if t.prompt is None else t.prompt.tolist()
    if not reached or own != beginning.prompt or episode.cause:
        return episode
    limit = min([reached, *(start for start, _ in (t.thinking.forced if t.thinking else ()))])
    same = t.tokens_T[:limit] == np.array(beginning.tokens[:limit], np.int32)
    count = limit if same.all() else int(np.argmin(same))
    if not count:
        return episode
    marked = _unlearned(t, count)
    if not marked.mask_T.any():
        return None
    return replace(episode, trajectories=[marked, *episode.trajectories[1:]], reuse=(first, count))


def _unlearned(trajectory: Trajectory, count: int) -> Trajectory:
    """The trajectory whose first tokens are no part of the loss."""
    mask_T = trajectory.mask_T.copy()
    mask_T[:count] = 0
    return replace(trajectory, mask_T=mask_T)
