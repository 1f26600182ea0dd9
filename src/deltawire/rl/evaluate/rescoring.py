"""Rescoring: recomputes a sample of groups, to find workers that report false results.

Of a group that `deltawire.rl.control.worker_guard` drew, this checks

1. **the task**: it must be the one that the trainer gave the group's number
   (`deltawire.rl.control.draws`);
2. **the episodes**: they are played again with a sampler that returns the recorded tokens. The
   prompt and what the environment says in between must be the recorded tokens, nothing may follow
   the episode's end, and the reward must be the recorded one. Only environments that declare
   `deterministic` are judged, and failed episodes are not. Episodes that fail only on replay cast
   doubt on a worker if those of others do not;
3. **the log-probabilities**: they are computed again with the weights of the version that each
   token states. Tokens that one version drew after a prefix of that version differ by arithmetic
   only: at most ``trust.logprob_gap`` nats a token in the mean, and 30 times as much for one token.
   After a swap the sampler's cache mixes versions, so those tokens may be near any version of their
   sequence, and may differ by four times as much.

Not judged: versions that are pruned or cannot be read, and environments that this machine
does not have. Probes and expert choices are not compared; they are self-attested.

A thread does this, one group at a time and at low priority. Episodes are played as groups arrive;
log-probabilities wait until groups of older versions are unlikely to come, so that the model moves
forward from version to version: going back takes an anchor and every delta since. It has a separate
model and mirror, in main memory: 4 bytes a parameter in fp32 and the published bytes, 2 a parameter
in bf16, and the activations of one group's forward pass. If that is more than half of what is
available, log-probabilities are not judged. The trainer never waits for this thread.

Time to detection: each of its groups is drawn with probability s, so that n groups with a
detectable lie pass with (1 - s)^n. For s = 0.1 and n = 50 that is 0.0052.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire.chat.requests import text_of
from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.base import Completion, OnToken, Sampling
from deltawire.envs import Task, TaskSource, open_tasks
from deltawire.errors import DeltawireError, RetryError
from deltawire.estimates import BudgetSetting
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.rl.control.challenges import stream_of
from deltawire.rl.control.draws import NOT_KNOWN, RUN_STREAM
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.control.worker_guard import Verdict
from deltawire.rl.evaluate.recorded_model import Logprobs, RecordedModel
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, one_line, with_setting
from deltawire.store import Bucket
from deltawire.wire.rollouts import MAX_NAME, MAX_TASK, Group, Trajectory
from deltawire.wire.run import Run

ONE_TOKEN = 30.0
"""How many times the mean limit one token may differ."""
MIXED = 4.0
"""How many times more the tokens after a swap may differ."""
REPLAYS = 2
"""How often an episode is played again before a worker is blamed for its reward."""
PLAYED_ELSEWHERE = 8
"""Episodes of others that were played again without a failure before failures of a worker's count
as a doubt about it, and not about this machine."""
MOST_LAG = 16
"""Log-probabilities wait for at most so many later versions, whatever staleness is allowed."""
IDLE_S = 60.0
"""Without a new group for this long, those that wait are judged."""
NICE = 10
_JOIN_S = 60.0


@dataclass(frozen=True)
class _Work:
    buffered: BufferedGroup
    lease: int
    number: int
    secret: str


@dataclass
class _Held:
    """A group whose episodes were right, log π of its tokens by version so far, and an error."""

    buffered: BufferedGroup
    versions: frozenset[int]
    found: dict[int, Logprobs] = field(default_factory=dict)
    cause: str = ""


class DepartedError(Exception):
    """The episode asks for a completion of other tokens than were recorded."""


class RecordedSampler:
    """A `Sampler` that continues the sequences of one recorded episode, and no others.

    A sampler ends a completion with the first of the ``stops``; a recorded one that goes on after
    it was not sampled.
    """

    version, slots, capacity, active = 0, 1, 1 << 31, 0

    def __init__(
        self, group: Group, trajectories: Sequence[Trajectory], stops: Collection[int] = ()
    ) -> None:
        self._known = [(group.prompt_of(t).tolist(), t.tokens_T.tolist(), t) for t in trajectories]
        self._stops = frozenset(stops)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Completion:
        """Returns the recorded tokens after ``prompt``; raises `DepartedError` if there are
        none."""
        asked = list(prompt)
        for start, tokens, t in self._known:
            place = len(asked) - len(start)
            if place < 0 or place >= len(tokens) or start + tokens[:place] != asked:
                continue
            drawn = t.mask_T[place:] == 1
            count = len(drawn) if drawn.all() else int(np.argmin(drawn))
            count = min(count, sampling.max_tokens)
            if not count:
                continue
            if on_token is not None:
                enough = (n for n, k in enumerate(tokens[place : place + count], 1) if on_token(k))
                count = next(enough, count)
            end = place + count
            if not self._stops.isdisjoint(tokens[place : end - 1]):
                continue
            last = end == len(tokens) and t.finish in ("stop", "length")
            # A run of drawn tokens may also end where thinking was closed by force.
            ends = tokens[end - 1] in self._stops if t.thinking else count < sampling.max_tokens
            cut = t.finish == "length" if last else not ends
            return Completion(
                tokens[place:end],
                t.logprobs_T[place:end].tolist(),
                t.versions_T[place:end].tolist(),
                "length" if cut else "stop",
            )
        raise DepartedError

    async def advance(self) -> int:
        """Does nothing: every answer is known."""
        return 0

    def cancel_all(self) -> None:
        """Does nothing: no request waits."""


class GroupChecker:
    """Judges groups; ``tasks`` is None if this machine lacks the run's environment.

    Example::

        checker = GroupChecker(config, tasks, text, model)
        verdict = checker.check(buffered, lease=0, number=3, secret=secret)
    """

    def __init__(
        self, config: RunConfig, tasks: TaskSource | None, text: Text, model: RecordedModel
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._text = text
        self._model = model
        self._limits = EpisodeLimits.of(config.rollout)
        self._scaffolds = list(dict.fromkeys((config.rollout.scaffold, *config.budget.scaffolds)))
        self._stops = model.stops
        self._played: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._rewards = bool(getattr(tasks, "deterministic", False))
        self.unjudged: list[str] = []
        """The parts that cannot be judged here, with the reason."""
        if model.lacking:
            self.unjudged.append(f"log-probabilities: {model.lacking}")
        if not self._rewards:
            self._leave_rewards(
                "this machine does not have the environment"
                if tasks is None
                else "the environment does not declare deterministic"
            )

    def check(self, buffered: BufferedGroup, *, lease: int, number: int, secret: str) -> Verdict:
        """Computes a group again."""
        verdict = self.check_episodes(buffered, lease=lease, number=number, secret=secret)
        if verdict.kind:
            return verdict
        found: dict[int, Logprobs] = {}
        for version in sorted(versions_of(buffered.group)):
            found[version] = self.logprobs(buffered.group, version)
        return self.check_logprobs(buffered, found)

    def check_episodes(
        self, buffered: BufferedGroup, *, lease: int, number: int, secret: str
    ) -> Verdict:
        """Compares a group's task, and plays its episodes again."""
        group = buffered.group
        kind, detail, certain = "", "", True
        if self._tasks is not None and secret and buffered.drawn != NOT_KNOWN:
            own = stream_of(group.worker, secret, lease), number
            stream, place = own if buffered.drawn is None else (RUN_STREAM, buffered.drawn)
            kind, detail, certain = self._rewards_of(group, self._tasks.draw(stream, place))
        return Verdict(group.worker, buffered.sequence, kind if detail else "", detail, certain)

    def logprobs(self, group: Group, version: int) -> Logprobs:
        """See `RecordedModel.logprobs`."""
        return self._model.logprobs(group, version)

    def check_logprobs(self, buffered: BufferedGroup, found: Mapping[int, Logprobs]) -> Verdict:
        """Compares a group's log-probabilities with those ``found`` for each of its versions."""
        detail = self._gap(buffered.group, found)
        kind = "log-probabilities" if detail else ""
        return Verdict(buffered.group.worker, buffered.sequence, kind, detail, certain=True)

    def fails_here(self, worker: str, cause: str) -> tuple[str, str, bool] | None:
        """A doubt about a worker whose episodes fail on replay; None unless those of others are
        known to succeed."""
        self._failed[worker] += 1
        others = self._failed.total() - self._failed[worker]
        if others or self._played.total() - self._played[worker] < PLAYED_ELSEWHERE:
            return None
        return "failure", f"it fails when it is played again: {cause}", False

    def _rewards_of(self, group: Group, task: Task) -> tuple[str, str, bool]:
        if group.task != one_line(task.identity, MAX_TASK):
            return "task", f"its task is {group.task[:80]}, not {task.identity[:80]}", True
        if group.family != one_line(task.family, MAX_NAME):
            return "task", f"its family is {group.family[:80]}, not {task.family[:80]}", True
        if not self._rewards:
            return "", "", True
        episodes: dict[int, list[Trajectory]] = {}
        for place, episode, _ in group.trained():
            episodes.setdefault(episode, []).append(group.whole(place))
        for episode, segments in episodes.items():
            if wrong := self._thinking_fault(segments):
                return "budget", f"episode {episode}: {wrong}", True
            shown, stated = _turns(segments), sum(t.turns for t in segments)
            if shown < stated and self._text.has_template:
                return (
                    "turns",
                    f"episode {episode}: {stated} turns, of which {shown} are there",
                    True,
                )
            if shown < stated:
                # Without a template, an environment may say nothing between two turns.
                reason = "rewards: of episodes whose turns run together"
                self.unjudged += [reason] if reason not in self.unjudged else []
                continue
            fault = self._replay(group, task, segments)
            if fault is not None:
                kind, detail, certain = fault
                return kind, f"episode {episode}: {detail}", certain
        return "", "", True

    def _replay(
        self, group: Group, task: Task, segments: list[Trajectory]
    ) -> tuple[str, str, bool] | None:
        """Replays an episode and returns the first disagreement; None if there is none."""
        claimed = segments[0].reward
        found, cause = self._reward_again(group, task, segments)
        if cause:
            return self.fails_here(group.worker, cause)
        self._played[group.worker] += 1
        if _equal(found, claimed):
            return None
        again = [self._reward_again(group, task, segments) for _ in range(REPLAYS)]
        if any(failed or not _equal(one, found) for one, failed in again):
            self._leave_rewards("the environment earns other rewards when it is played again")
            return None
        if found != found:  # noqa: PLR0124
            return "prompt", "the environment gives another prompt, answer or end to it", True
        slow = bool(getattr(self._tasks, "may_time_out", False)) and not claimed
        return "reward", f"it reports {claimed:g}, computed again it is {found:g}", not slow

    def _leave_rewards(self, reason: str) -> None:
        self._rewards = False
        kept = [one for one in self.unjudged if not one.startswith("rewards: ")]
        self.unjudged = [f"rewards: {reason}", *kept]

    def _reward_again(
        self, group: Group, task: Task, segments: list[Trajectory]
    ) -> tuple[float, str]:
        """The reward of an episode that is played again, NaN if its tokens are not the recorded
        ones; and why it fails here, empty if it does not."""
        found = float("nan"), ""
        for scaffold in self._scaffolds:
            found = self._reward_with(scaffold, group, task, segments)
            if found[0] == found[0]:
                return found
        return found

    def _reward_with(
        self, scaffold: str, group: Group, task: Task, segments: list[Trajectory]
    ) -> tuple[float, str]:
        """See `_reward_again`; a group does not say which of the run's scaffolds it had."""
        assert self._tasks is not None
        play = run_episode(
            RecordedSampler(group, segments, self._stops),
            self._tasks.open(task),
            self._text,
            temperature=group.temperature,
            limits=self._limits_of(segments, scaffold),
        )
        try:
            episode = asyncio.run(play)
        except DepartedError:
            return float("nan"), ""
        if episode.cause:
            return float("nan"), episode.cause
        thought = segments[0].reuse
        same = _same_tokens(episode.trajectories, segments) and (
            thought is None or thought.count == episode.thought_end
        )
        return episode.trajectory.reward if same else float("nan"), ""

    def _limits_of(self, segments: Sequence[Trajectory], scaffold: str) -> EpisodeLimits:
        """The limits of an episode, with the budget of thinking that it states."""
        thinking = segments[0].thinking
        rollout = with_setting(self._config.rollout, BudgetSetting(scaffold=scaffold))
        limits = EpisodeLimits.of(rollout)
        return limits if thinking is None else replace(limits, budget=thinking.budget)

    def _thinking_fault(self, segments: Sequence[Trajectory]) -> str:
        """Why the stated thinking cannot be that of an honest worker; empty if it can."""
        config = self._limits.thinking
        for t in segments:
            if (t.thinking is None) != (config is None):
                return "its thinking is missing" if t.thinking is None else "it has no budget"
            if t.thinking is None or config is None:
                continue
            if t.thinking.budget not in config.allowed:
                return f"a budget of {t.thinking.budget} tokens, which the run does not have"
        return ""

    def _gap(self, group: Group, given: Mapping[int, Logprobs]) -> str:
        """Why the log-probabilities are not those of the versions that the tokens state; empty if
        they are, or cannot be computed."""
        trained = [t for _, _, t in group.trained()]
        found = {version: rows for version, rows in given.items() if rows is not None}
        if len(found) < len(given):
            return ""
        pure, mixed = [np.zeros(0)], [np.zeros(0)]
        for place, t in enumerate(trained):
            drawn = t.mask_T == 1
            first = int(t.versions_T[drawn][0])
            same = drawn & (t.versions_T == first)
            pure.append(np.abs(found[first][place] - t.logprobs_T)[same])
            own = {int(v) for v in np.unique(t.versions_T[drawn])}
            if len(own) > 1:
                near = np.min([np.abs(found[v][place] - t.logprobs_T) for v in own], axis=0)
                mixed.append(near[drawn & ~same])
        limit = self._config.trust.logprob_gap
        return _beyond(np.concatenate(pure), limit) or _beyond(np.concatenate(mixed), MIXED * limit)


def versions_of(group: Group) -> frozenset[int]:
    """The versions that drew the tokens that are trained on."""
    drawn = (t.versions_T[t.mask_T == 1] for _, _, t in group.trained())
    return frozenset(int(version) for versions_D in drawn for version in np.unique(versions_D))


def _beyond(gaps: NDArray[np.float64], limit: float) -> str:
    if not len(gaps):
        return ""
    mean, largest = float(gaps.mean()), float(gaps.max())
    if mean <= limit and largest <= ONE_TOKEN * limit:
        return ""
    return (
        f"log-probabilities differ by {mean:.3g} nats a token, at most {largest:.3g}; "
        f"{limit:g} and {ONE_TOKEN * limit:g} are allowed"
    )


def _turns(segments: Sequence[Trajectory]) -> int:
    """Runs of drawn tokens."""
    return sum(
        int((np.diff(t.turn_mask.astype(np.int8), prepend=np.int8(0)) == 1).sum()) for t in segments
    )


def _same_tokens(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> bool:
    """Returns whether two episodes have the same tokens, drawn by the same side."""
    return len(one) == len(other) and all(
        np.array_equal(left.tokens_T, right.tokens_T)
        and np.array_equal(left.mask_T, right.mask_T)
        and left.thinking == right.thinking
        for left, right in zip(one, other, strict=True)
    )


def _equal(one: float, other: float) -> bool:
    both_departed = one != one and other != other  # noqa: PLR0124
    return both_departed or abs(one - other) <= 1e-6 * max(1.0, abs(one), abs(other))


class Rescoring:
    """The thread that computes groups again; it starts with the first group.

    Example::

        rescoring = Rescoring(bucket, run, config)
        rescoring.submit(buffered, lease, number, secret)
        for verdict in rescoring.verdicts(): ...
        rescoring.close()
    """

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig) -> None:
        self._bucket = bucket
        self._run = run
        self._config = config
        self._waiting: queue.Queue[_Work | None] = queue.Queue(config.trust.rescore_waiting)
        self._verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._checker: GroupChecker | None = None
        self.error = ""
        """Why the last group could not be judged."""

    def submit(self, buffered: BufferedGroup, lease: int, number: int, secret: str) -> bool:
        """Queues a group; False if as many as ``trust.rescore_waiting`` wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._check_all, name="rescoring", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(_Work(buffered, lease, number, secret))
        except queue.Full:
            return False
        return True

    @property
    def unjudged(self) -> list[str]:
        """The parts that cannot be judged, with the reason; empty before the first group."""
        return self._checker.unjudged if self._checker else []

    def verdicts(self) -> list[Verdict]:
        """The verdicts since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._verdicts.get_nowait())
        return found

    def close(self) -> None:
        """Stops after the current group; the others are not judged."""
        self._closed.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(_JOIN_S)

    def _check_all(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        held: list[_Held] = []
        newest, lag = -1, min(self._config.train.largest_age, MOST_LAG)
        while True:
            due = newest
            try:
                work = self._waiting.get(timeout=IDLE_S if held else None)
            except queue.Empty:
                pass
            else:
                if work is None or self._closed.is_set():
                    return
                held += self._check_episodes(work)
                newest = max([newest, *(max(one.versions, default=-1) for one in held)])
                due = newest if len(held) > self._config.trust.rescore_waiting else newest - lag
            held = self._check_logprobs(held, due)

    def _check_episodes(self, work: _Work) -> list[_Held]:
        """Reports a group whose episodes are false; returns any other, to be held."""
        verdict = Verdict(work.buffered.worker, work.buffered.sequence)
        try:
            self._checker = self._checker or self._open()
            verdict = self._checker.check_episodes(
                work.buffered, lease=work.lease, number=work.number, secret=work.secret
            )
            if not verdict.kind:
                return [_Held(work.buffered, versions_of(work.buffered.group))]
        except RetryError as error:
            self.error = str(error)
        except Exception as error:  # The environment's code can raise anything.
            self.error = f"{type(error).__name__}: {error}"
            verdict = self._doubt(verdict, self.error)
        self._verdicts.put(verdict)
        return []

    def _check_logprobs(self, held: list[_Held], due: int) -> list[_Held]:
        """Computes log-probabilities of versions up to ``due``, in order, and judges the groups
        that need no later one; returns the others."""
        wanted = {v for one in held for v in one.versions - one.found.keys() if v <= due}
        for version in sorted(wanted):
            for one in held:
                if version in one.versions and version not in one.found:
                    one.found[version] = self._logprobs(one, version)
        rest = []
        for one in held:
            if one.found.keys() < one.versions:
                rest.append(one)
            else:
                self._verdicts.put(self._verdict(one))
        return rest

    def _logprobs(self, one: _Held, version: int) -> Logprobs:
        if self._closed.is_set() or self._checker is None:
            return None
        try:
            return self._checker.logprobs(one.buffered.group, version)
        except RetryError as error:
            self.error = str(error)
        except Exception as error:  # A group may break the model's code.
            self.error = one.cause = f"{type(error).__name__}: {error}"
        return None

    def _verdict(self, one: _Held) -> Verdict:
        verdict = Verdict(one.buffered.worker, one.buffered.sequence)
        if self._checker is None or one.cause:
            return self._doubt(verdict, one.cause)
        try:
            return self._checker.check_logprobs(one.buffered, one.found)
        except Exception as error:  # As above.
            self.error = f"{type(error).__name__}: {error}"
            return self._doubt(verdict, self.error)

    def _doubt(self, verdict: Verdict, cause: str) -> Verdict:
        found = self._checker.fails_here(verdict.worker, cause) if self._checker else None
        return verdict if found is None else Verdict(verdict.worker, verdict.sequence, *found)

    def _open(self) -> GroupChecker:
        with fetch_model_files(self._bucket, self._run) as folder:
            tokenizer = load_tokenizer(Path(folder))
            text = text_of(self._config, tokenizer, bucket=self._bucket.url)
            model = RecordedModel(self._bucket, self._run, self._config, Path(folder))
        tasks: Any = None
        try:
            tasks = open_tasks(self._config.task, seed=self._config.seed)
        except DeltawireError as error:
            self.error = str(error)
        return GroupChecker(self._config, tasks, text, model)
