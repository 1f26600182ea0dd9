"""Grouping: chooses matured answers and makes a group of them, each answer with its own prompt.

A group is a batch: as many answers as ``rollout.group_size``, of different prompts. Its rewards are
advantages already, times the weights that the caps leave; ``train.loss.advantage = "given"`` takes
them as they are. So the trainer, its ledger and its recomputing of steps are those of any group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltawire.config import RunConfig
from deltawire.config.live import DEFAULT_REWARDS
from deltawire.live.learning.advantages import (
    Baseline,
    LearnedBaseline,
    ValueTracker,
    advantages,
    signs,
)
from deltawire.live.learning.influence import (
    age_weights,
    cap_weights,
    effective_sample_size,
    outlying_users,
)
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.live.learning.window import DelayModel, JoinWindow, fit_delays
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.wire.captures import Capture
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.rollouts import LIVE_TASK, Group, Trajectory

FITTED = 5000
"""The delay model is fitted to at most this many answers, the newest ones."""
VOCABULARY = 1 << 31
LEFT_OUT = ("waiting", "censored", "unusable", "expired", "others", "quarantined", "neutral")
"""The states of answers that no group takes now, and that are named when a group lacks answers."""


@dataclass(frozen=True)
class MaturedAnswer:
    """An answer that can be trained on, and its reward."""

    capture: Capture
    reward: float
    age_s: float

    @property
    def task(self) -> str:
        """See `deltawire.live.learning.advantages.BaselineCase`."""
        return self.capture.task

    @property
    def cohort(self) -> str:
        """See `deltawire.live.learning.advantages.BaselineCase`."""
        return self.capture.cohort

    @property
    def turn(self) -> int:
        """See `deltawire.live.learning.advantages.BaselineCase`."""
        return self.capture.turn

    @property
    def length(self) -> int:
        """See `deltawire.live.learning.advantages.BaselineCase`."""
        return len(self.capture.prompt) // 4

    @property
    def version(self) -> int:
        """The newest version that drew one of its tokens."""
        return max((version for version, _ in self.capture.spans), default=0)


class Quarantine(NamedTuple):
    """Users and cohorts whose answers wait because their rewards are unlike everybody's."""

    users: frozenset[str] = frozenset()
    cohorts: frozenset[str] = frozenset()


@dataclass
class GroupMaker:
    """Joins answers and feedback by a run's rules, and makes groups of what matured.

    ``claimed`` are the answers of lineages, and ``owns`` tells which answers are this learner's to
    take (`deltawire.live.learning.owners`). ``delays`` is the last fit, and ``states`` counts the
    answers of the last `prepare` by state: those of the join window, and ``unusable``, ``expired``
    (older than ``max_age_s``), ``late`` (reports about answers that were trained on already),
    ``others`` (those that another learner owns), ``quarantined`` (matured answers of the users and
    cohorts that are ``quarantined``) and ``neutral`` (matured answers of reward 0, with the
    baseline ``sign``). ``lacks`` says why the last `prepare` made no group.
    """

    config: RunConfig
    records: LiveRecords
    claimed: set[str] = field(default_factory=set)
    owns: Callable[[str], bool] = lambda _answer: True
    delays: DelayModel | None = None
    states: Counter[str] = field(default_factory=Counter)
    quarantined: Quarantine = field(default_factory=Quarantine)
    lacks: str = ""

    def __post_init__(self) -> None:
        live = self.config.live
        self.rules = RewardRules(
            live.rewards or DEFAULT_REWARDS, live.silent, function=live.reward_function
        )
        self._own = self.rules.load()
        self._window = JoinWindow(live.window_s, live.settle_s, live.still_likely)
        self._bounds = Bounds.of(self.config, VOCABULARY)
        self._faults: dict[str, str] = {}
        self._rewards: dict[str, float] = {}
        self._baseline: Baseline | None = None
        if live.baseline == "value_tracker":
            self._baseline = ValueTracker(*self.rules.bounds)
        elif live.baseline == "learned":
            self._baseline = LearnedBaseline()

    def claim(self, lineage: Lineage) -> None:
        """Takes the answers of a lineage out of the choice, and lets the baseline learn them."""
        for one in lineage.answers:
            self.claimed.add(one.answer)
            self._rewards[one.answer] = one.reward
            capture = self.records.answers.get(one.answer)
            if capture is not None and self._baseline is not None:
                matured = MaturedAnswer(capture, one.reward, one.age_s)
                self._baseline.add(matured, one.reward, matured.version)

    def matured(self, now: float) -> list[MaturedAnswer]:
        """Returns the answers that can be trained on, oldest first; raises `InputError` if the
        reward's function does."""
        self._fit(now)
        self.states = Counter()
        found = []
        for answer, capture in self.records.answers.items():
            reports = self.records.reports.get(answer, {}).values()
            counted = [r for r in reports if r.kind in self.rules.kinds or self._own]
            if answer in self.claimed:
                known = self.records.reports.get(answer, {})
                self.states["trained"] += 1
                self.states["late"] += any(
                    r.received - capture.at > self._window.window_s for r in known.values()
                )
                continue
            age_s = max(0.0, now - capture.at)
            if self._known_fault(capture):
                self.states["unusable"] += 1
                continue
            if age_s > self.config.live.max_age_s:
                self.states["expired"] += 1
                continue
            last = max((r.received for r in counted), default=None)
            state = self._window.state(
                age_s, None if last is None else last - capture.at, self.delays
            )
            self.states[state] += 1
            if state in ("matured", "silent"):
                reward = self.rules.reward(values_of(counted), capture, self._own)
                if reward is not None:
                    self._rewards[answer] = reward
                    if self.owns(answer):
                        found.append(MaturedAnswer(capture, reward, age_s))
                    else:
                        self.states["others"] += 1
        self._quarantine()
        kept = [one for one in found if not self._is_quarantined(one.capture)]
        self.states["quarantined"] += len(found) - len(kept)
        return sorted(kept, key=lambda one: (one.capture.at, one.capture.answer))

    def _quarantine(self) -> None:
        """Finds the users and cohorts whose rewards are unlike everybody's, of all answers that
        have one. Attackers that act together show as a cohort long before each shows as a user."""
        known = self.records.answers
        rows = [(known[a], reward) for a, reward in self._rewards.items() if a in known]
        tasks = [capture.task for capture, _ in rows]
        rewards_E = np.array([reward for _, reward in rows])
        limit = self.config.live.outlier_limit
        users = outlying_users([one.user for one, _ in rows], tasks, rewards_E, limit=limit)
        cohorts = outlying_users([one.cohort for one, _ in rows], tasks, rewards_E, limit=limit)
        self.quarantined = Quarantine(frozenset(users), frozenset(cohorts))

    def _is_quarantined(self, capture: Capture) -> bool:
        held = self.quarantined
        return capture.user in held.users or capture.cohort in held.cohorts

    def prepare(self, now: float, count: int) -> list[LearnedAnswer] | None:
        """Chooses ``count`` matured answers, weighs them and takes their advantages.

        Returns None if there are too few, of too few users for the caps. One user contributes no
        more answers than its cap, so that others need not be cut.
        """
        live, self.lacks = self.config.live, ""
        cap = live.largest_share(count)
        most = max(1, int(cap * count))
        chosen: list[MaturedAnswer] = []
        taken: Counter[str] = Counter()
        for one in self.matured(now):
            if live.baseline == "sign" and not one.reward:
                self.states["neutral"] += 1
            elif taken[one.capture.user] < most:
                taken[one.capture.user] += 1
                chosen.append(one)
                if len(chosen) == count:
                    break
        if len(chosen) < count:
            self.lacks = self._lacking(len(chosen), len(taken), count)
            return None
        weights_E = cap_weights(
            age_weights(np.array([one.age_s for one in chosen]), live.half_life_s),
            [one.capture.user for one in chosen],
            [one.cohort for one in chosen],
            user_cap=cap,
            cohort_cap=live.cohort_cap,
        )
        if effective_sample_size(weights_E) < count / 4:
            self.lacks = f"{count} answers of {len(taken)} users weigh too little under the caps"
            return None
        rewards_E = np.array([one.reward for one in chosen])
        versions = [one.version for one in chosen]
        if live.baseline == "sign":
            advantages_E = signs(rewards_E)
        else:
            advantages_E = advantages(self._baseline, chosen, rewards_E, weights_E, versions)
        self.claimed |= {one.capture.answer for one in chosen}
        return [
            LearnedAnswer(
                one.capture.answer, one.capture.user, one.reward, advantage, min(weight, 1.0),
                one.age_s,
            )
            for one, advantage, weight in zip(
                chosen, advantages_E.tolist(), weights_E.tolist(), strict=True
            )
        ]  # fmt: skip

    def _lacking(self, found: int, users: int, count: int) -> str:
        """Says what a group of ``count`` answers lacks, and where the other answers are."""
        others = [f"{self.states[name]} {name}" for name in LEFT_OUT if self.states[name]]
        faults = Counter(fault for fault in self._faults.values() if fault).most_common(1)
        why = f" (most often: {faults[0][0]})" if faults else ""
        rest = f"; {', '.join(others)}{why}" if others else ""
        of_users = f" of {users} users" if found else ""
        return f"{found} answers{of_users} can be trained on, a group takes {count}{rest}"

    def _fit(self, now: float) -> None:
        delays, silent = [], []
        newest = sorted(self.records.answers.values(), key=lambda one: one.at)[-FITTED:]
        for capture in newest:
            first = min(
                (
                    r.received
                    for r in self.records.reports.get(capture.answer, {}).values()
                    if r.kind in self.rules.kinds
                ),
                default=None,
            )
            if first is None:
                silent.append(max(0.0, now - capture.at))
            else:
                delays.append(max(0.0, first - capture.at))
        self.delays = fit_delays(delays, silent)

    def _known_fault(self, capture: Capture) -> str:
        """Returns `_fault`, which does not change, and is asked for at every turn."""
        found = self._faults.get(capture.answer)
        if found is None:
            found = self._faults[capture.answer] = self._fault(capture)
        return found

    def _fault(self, capture: Capture) -> str:
        if capture.unusable:
            return capture.unusable
        if capture.truncated:
            return "sampled by other settings than the run's"
        return self._bounds.fault(
            Group(
                "live",
                "",
                "live",
                capture.temperature,
                capture.prompt_ids,
                [trajectory_of(capture)],
            )
        )


def trajectory_of(capture: Capture, reward: float = 0.0, episode: int = 0) -> Trajectory:
    """Returns a usable answer as an episode of one turn."""
    tokens = capture.token_ids
    return Trajectory(
        tokens,
        capture.token_logprobs,
        capture.token_versions,
        np.ones(len(tokens), np.uint8),
        reward,
        "length" if capture.finish == "length" else "stop",
        episode,
        capture.prompt_ids,
    )


def group_of_answers(
    answers: Sequence[LearnedAnswer],
    captures: Sequence[Capture | None],
    *,
    worker: str,
    nonce: str,
    temperature: float,
) -> Group:
    """Returns the group of these answers: one episode each, with its own prompt, whose reward is
    its advantage times its weight. An answer without a capture was its user's who was forgotten."""
    trajectories = [
        _forgotten_trajectory(episode)
        if capture is None
        else trajectory_of(capture, one.advantage * one.weight, episode)
        for episode, (one, capture) in enumerate(zip(answers, captures, strict=True))
    ]
    prompt = _first_prompt(trajectories)
    return Group(worker, nonce, LIVE_TASK, temperature, prompt, trajectories, LIVE_TASK)


def group_without_users(group: Group, lineage: Lineage, users: Container[str]) -> Group:
    """Returns a group in which the trajectories of these users failed, without their tokens. The
    trainer waits for each number of a worker, so a group that it may not have read yet cannot be
    deleted."""
    trajectories = [
        _forgotten_trajectory(t.episode) if one.user and one.user in users else t
        for t, one in zip(group.trajectories, lineage.answers, strict=True)
    ]
    return replace(group, trajectories=trajectories, prompt=_first_prompt(trajectories))


def _forgotten_trajectory(episode: int) -> Trajectory:
    nothing = np.zeros(1, np.int32)
    return Trajectory(
        nothing,
        np.zeros(1, np.float32),
        nothing,
        np.zeros(1, np.uint8),
        0.0,
        "stop",
        episode,
        nothing,
        cause="forgotten",
    )


def _first_prompt(trajectories: Sequence[Trajectory]) -> NDArray[np.int32]:
    """Returns the first prompt of an answer that is left, one token of number 0 if none is."""
    found = (t.prompt for t in trajectories if not t.cause and t.prompt is not None)
    return next(found, np.zeros(1, np.int32))
