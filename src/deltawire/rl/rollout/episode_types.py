"""Types and limits shared by the code that runs episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from deltawire.chat.requests import RequestSettings
from deltawire.chat.thinking import drawn_budget
from deltawire.config import OnFull, RolloutConfig, ThinkingConfig
from deltawire.config.scaffold import NO_SCAFFOLD, turn_limit
from deltawire.engines.base import EVERYTHING, Truncation
from deltawire.envs.base import Task, call_end
from deltawire.estimates import BudgetSetting
from deltawire.rl.rollout.exits import catch_exits
from deltawire.wire.rollouts import MAX_NAME, MAX_PROBES, MAX_TASK, Group, Reuse, Trajectory

MAX_CAUSE = 400


CANCEL_S = 1.0
"""How long a cancelled call may still take."""


MAX_MESSAGES = 1024
"""The most messages that an environment may return at once."""


MAX_REWARD = 1e6
"""The largest reward of one turn, or of a harness, either way. Sums and squares of larger ones
would overflow in the trainer's float32 numbers."""


T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of one episode: tokens per turn, turns, tokens in total (with the prompt), seconds for
    one call of the environment and for the whole episode, characters of a message; the
    ``truncation`` of what may be drawn; and the ``budget`` of thinking."""

    max_tokens: int
    max_turns: int
    context: int
    step_s: float = 120.0
    episode_s: float = 7200.0
    max_characters: int = 20_000
    on_full: OnFull = "end"
    summary_tokens: int = 256
    summary_prompt: str = "Summarize what was done and found so far; only this will be kept."
    truncation: Truncation = EVERYTHING
    thinking: ThinkingConfig | None = None
    budget: int = 0
    """Tokens of thinking in a turn, if ``thinking`` is set."""
    scaffold: str = NO_SCAFFOLD

    @classmethod
    def of(cls, rollout: RolloutConfig) -> EpisodeLimits:
        """The bounds of a configuration."""
        asked = RequestSettings.of(rollout)
        return cls(
            asked.max_tokens,
            turn_limit(rollout),
            asked.context,
            rollout.step_limit_s,
            rollout.episode_limit_s,
            asked.characters,
            rollout.on_full,
            rollout.summary_tokens,
            rollout.summary_prompt,
            asked.truncation,
            asked.thinking,
            asked.largest_budget,
            rollout.scaffold,
        )

    def requests(self, temperature: float) -> RequestSettings:
        """The settings of the episode's requests."""
        return RequestSettings(
            self.max_tokens,
            self.context,
            temperature,
            self.truncation,
            self.max_characters,
            self.thinking,
        )


def with_setting(rollout: RolloutConfig, setting: BudgetSetting) -> RolloutConfig:
    """The rollouts of a controller's setting; its thinking budget is told to `with_budget`."""
    return msgspec.structs.replace(
        rollout,
        group_size=setting.completions or rollout.group_size,
        scaffold=setting.scaffold or rollout.scaffold,
    )


def with_budget(
    limits: EpisodeLimits, *, version: int, group: str, episode: int, told: int = 0
) -> EpisodeLimits:
    """The limits of one episode of a group: with its budget of thinking, if the run has budgets.

    A budget that a controller ``told`` replaces the draw.
    """
    if limits.thinking is None:
        return limits
    if told in limits.thinking.allowed:
        return replace(limits, budget=told)
    budget = drawn_budget(limits.thinking, version, group, episode)
    return replace(limits, budget=budget)


@dataclass(frozen=True)
class Episode:
    """A finished episode: its segments in order (mostly one), each with the whole reward.

    ``cause`` is set if it failed for a reason other than the model; the reward is then 0, and
    ``prompt`` may be empty.
    """

    prompt: list[int]
    trajectories: list[Trajectory]
    solved: bool
    cause: str = ""
    turn_ends: tuple[int, ...] = ()
    """The number of tokens of the first segment up to the end of each of its turns."""
    thought_end: int = 0
    """The tokens of the first turn up to the end of its thinking, without inserted ones."""
    reuse: tuple[int, int] | None = None
    """The episode of the group that drew the first tokens, and their number; itself if others may
    have begun with its thinking."""

    @property
    def trajectory(self) -> Trajectory:
        """The first segment."""
        return self.trajectories[0]


class EpisodeFailure(Exception):  # noqa: N818  (it names an event of an episode)
    """An episode cannot continue, for a reason other than the model."""


def checked_reward(what: str, reward: Any) -> float:
    """Returns a reward as a number; raises `EpisodeFailure` unless it is a finite one of at most
    `MAX_REWARD`, and `TypeError` or `ValueError` for a text and what is no number."""
    if isinstance(reward, str | bytes):
        raise ValueError(f"the reward {reward[:40]!r} is a text")  # noqa: TRY004
    found = float(reward)
    if not abs(found) <= MAX_REWARD:
        raise EpisodeFailure(f"{what} gave the reward {found}")
    return found


async def ask_probes(
    call: Callable[[], Awaitable[Mapping[str, float]]], seconds: float
) -> dict[str, float]:
    """Reads the probes; raises `EpisodeFailure` unless they are finite numbers by name."""
    found: Any = await within("probes", call, seconds)
    try:
        probes = {one_line(str(n), MAX_NAME): float(value) for n, value in dict(found).items()}
    except (TypeError, ValueError) as error:
        raise EpisodeFailure(f"probes returned no numbers by name: {error}") from error
    if len(probes) > MAX_PROBES:
        raise EpisodeFailure(f"probes returned {len(probes)} values")
    for name, value in probes.items():
        if not math.isfinite(value):
            raise EpisodeFailure(f"probe {name} gave {value}")
    return probes


async def within(what: str, call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Awaits a call of the environment for at most ``seconds``; raises `EpisodeFailure`.

    A call that does not end when it is cancelled is abandoned."""

    async def calling() -> T:
        catch_exits()
        call_end.set(asyncio.get_running_loop().time() + seconds)
        try:
            return await call()
        except SystemExit as error:  # The event loop would let it end the whole worker.
            raise EpisodeFailure(f"{what} raised SystemExit: {error}") from error

    task = asyncio.ensure_future(calling())
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        in_time = task.done()
        if not in_time:
            task.cancel()
            task.add_done_callback(_overhear)
            await asyncio.wait({task}, timeout=CANCEL_S)
    if not in_time:
        raise EpisodeFailure(f"{what} took longer than {seconds:g} s")
    if task.cancelled():
        raise EpisodeFailure(f"{what} cancelled itself")
    if (error := task.exception()) is not None:
        if isinstance(error, EpisodeFailure) or not isinstance(error, Exception):
            raise error
        raise EpisodeFailure(f"{what} raised {type(error).__name__}: {error}") from error
    return task.result()


def one_line(cause: str, limit: int = MAX_CAUSE) -> str:
    """A cause, or another text of an environment's, as it is stored."""
    return " ".join(cause.split())[:limit].encode(errors="replace").decode()


def _overhear(task: asyncio.Task[Any]) -> None:
    """Retrieves an abandoned call's exception, so that the event loop does not warn."""
    if not task.cancelled():
        task.exception()


def group_of(
    worker: str, nonce: str, task: Task, temperature: float, episodes: Sequence[Episode]
) -> Group:
    """Makes the group of a task's episodes, including failed ones."""
    prompt = next((e.prompt for e in episodes if e.prompt), [0])
    trajectories: list[Trajectory] = []
    places: list[int] = []
    for number, episode in enumerate(episodes):
        several = len(episode.trajectories) > 1
        places.append(len(trajectories))
        for segment, trajectory in enumerate(episode.trajectories):
            own = trajectory.prompt
            if own is None and episode.prompt and episode.prompt != prompt:
                own = np.array(episode.prompt, np.int32)
            reuse = episode.reuse if segment == 0 else None
            trajectories.append(
                replace(
                    trajectory,
                    prompt=own,
                    episode=number if several else -1,
                    reuse=None if reuse is None else Reuse(places[reuse[0]], reuse[1]),
                )
            )
    return Group(
        worker,
        nonce,
        one_line(task.identity, MAX_TASK),
        temperature,
        np.array(prompt, np.int32),
        trajectories,
        one_line(task.family, MAX_NAME),
    )
