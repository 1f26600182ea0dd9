"""Grouping: chooses matured answers and makes a group of them, each answer with its own prompt.

A group is a batch: as many answers as ``rollout.group_size``, of different prompts. Its rewards are
advantages already, times the weights that the caps leave; ``train.loss.advantage = "given"`` takes
them as they are. So the trainer, its ledger and its recomputing of steps are those of any group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
from deltawire.live.learning.choosing import Turns, choose
from deltawire.live.learning.corrections import Corrections
from deltawire.live.learning.influence import age_weights, cap_influence, influence_sizes
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.live.learning.window import DelayModel, JoinWindow, fit_delays, sampled
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.rollouts import LIVE_TASK, Group, Trajectory

FITTED = 5000
"""The delays are fitted to at most this many answers of the last two windows."""
VOCABULARY = 1 << 31
FADED = 2.0
"""Answers older than so many half-lives are not trained on: they would hardly weigh anything."""
LEAST_MOVED = 0.05
"""A group is made if the mean of weight · |advantage| is as large; that of equal answers is 1."""
LEFT_OUT = (
    "waiting", "censored", "unusable", "expired", "others", "stale", "faded", "neutral",
    "over_share",
)  # fmt: skip
"""The states of answers that no group takes now, and that are named when a group lacks answers."""


@dataclass(frozen=True)
class MaturedAnswer:
    """An answer that can be trained on, its reward, when it was found to be matured, and whether
    that is because no report is likely to come any more."""

    capture: Capture
    reward: float
    age_s: float
    matured_at: float = 0.0
    silent: bool = False

    @property
    def user(self) -> str:
        """The user's pseudonym; the name is the one that a back end sends with its API key."""
        return self.capture.user

    @property
    def served_at(self) -> float:
        """See `deltawire.live.learning.choosing.Choosable`."""
        return self.capture.at

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


@dataclass
class GroupMaker:
    """Joins answers and feedback by a run's rules, and makes groups of what matured.

    ``claimed`` are the answers of lineages, and ``owns`` tells which answers are this learner's to
    take (`deltawire.live.learning.owners`). ``delays`` is the last fit, and ``states`` counts the
    answers of the last `prepare` by state: those of the join window, and ``unusable``, ``expired``
    (older than ``max_age_s``), ``late`` (reports after the window about answers that were trained
    on), ``corrected`` (trained answers whose reward is another one by now), and of the matured ones
    ``others`` (those that another learner owns), ``stale`` (drawn by a version that is too old),
    ``faded`` (older than `FADED` half-lives), ``neutral`` (of reward 0, with the baseline ``sign``)
    and ``over_share`` (of users who had their share for now). ``lacks`` says why
    the last `prepare` made no group.
    """

    config: RunConfig
    records: LiveRecords
    claimed: set[str] = field(default_factory=set)
    owns: Callable[[str], bool] = lambda _answer: True
    delays: DelayModel | None = None
    states: Counter[str] = field(default_factory=Counter)
    lacks: str = ""
    corrections: Corrections = field(default_factory=Corrections)

    def __post_init__(self) -> None:
        live = self.config.live
        self.rules = RewardRules(
            live.rewards or DEFAULT_REWARDS, live.silent, function=live.reward_function
        )
        self._own = self.rules.load()
        self._window = JoinWindow(live.window_s, live.settle_s, live.still_likely)
        self._bounds = Bounds.of(self.config, VOCABULARY)
        self._faults: dict[str, str] = {}
        self._matured_at: dict[str, float] = {}
        self._turns = Turns(ratio=live.user_ratio)
        self._baseline: Baseline | None = None
        if live.baseline == "value_tracker":
            self._baseline = ValueTracker(*self.rules.bounds)
        elif live.baseline == "learned":
            self._baseline = LearnedBaseline()

    def claim(self, lineage: Lineage, *, own: bool = False) -> None:
        """Takes the answers of a lineage out of the choice, and lets the baseline learn them;
        ``own`` if this learner stored it."""
        self._turns.add([one.user for one in lineage.answers], at=lineage.at)
        for one in lineage.answers:
            self.claimed.add(one.answer)
            self.corrections.add(one.answer, one.reward, own=own)
            self._matured_at.pop(one.answer, None)
            capture = self.records.answers.get(one.answer)
            if capture is not None and self._baseline is not None:
                matured = MaturedAnswer(capture, one.reward, one.age_s, lineage.at)
                self._baseline.add(matured, one.reward, matured.version)
        for correction in lineage.corrections:
            self.corrections.recorded(correction)

    def matured(self, now: float) -> list[MaturedAnswer]:
        """Returns the answers that can be trained on, oldest first; raises `InputError` if the
        reward's function does."""
        self._fit(now)
        self.states = Counter()
        found = []
        for answer, capture in self.records.answers.items():
            counted = self._counted(answer)
            if answer in self.claimed:
                known = self.records.reports.get(answer, {})
                self.states["trained"] += 1
                self.states["late"] += any(
                    r.received - capture.at > self._window.window_s for r in known.values()
                )
                self.states["corrected"] += self.corrections.check(
                    answer,
                    len(counted),
                    partial(self.rules.reward, values_of(counted), capture, self._own),
                    now=now,
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
                if reward is None:
                    continue
                since = self._matured_at.setdefault(answer, now)
                if self.owns(answer):
                    silent = state == "silent"
                    found.append(MaturedAnswer(capture, reward, age_s, since, silent))
                else:
                    self.states["others"] += 1
        return sorted(found, key=lambda one: (one.capture.at, one.capture.answer))

    def prepare(self, now: float, count: int, *, oldest: int = 0) -> list[LearnedAnswer] | None:
        """Chooses ``count`` matured answers, takes their advantages and weighs them.

        Only answers whose tokens version ``oldest`` or newer ones drew are chosen. One user
        contributes no more answers than its cap, so that others need not be cut. Returns None if
        there are too few answers, or of too few users for the cap; ``lacks`` says so.
        """
        live, self.lacks = self.config.live, ""
        cap = live.largest_share(count)
        found = [one for one in self.matured(now) if self._may_be_chosen(one, oldest)]
        self.states["over_share"] = sum(not self._turns.left(one.user) for one in found)
        chosen = self.choose(found, count)
        chosen.sort(key=lambda one: (one.served_at, one.capture.answer))
        users = [one.user for one in chosen]
        if len(chosen) < count:
            self.lacks = self._lacking(len(chosen), len({*users}), count)
            return None
        rewards_E = np.array([one.reward for one in chosen])
        ages_E = age_weights(np.array([one.age_s for one in chosen]), live.half_life_s)
        if live.baseline == "sign":
            advantages_E = signs(rewards_E)
        else:
            advantages_E = advantages(self._baseline, chosen, rewards_E, ages_E)
        sizes_E = influence_sizes(
            advantages_E,
            np.array([float(len(one.capture.tokens) // 4) for one in chosen]),
            self.config.train.loss.aggregation,
        )
        weights_E = cap_influence(ages_E, sizes_E, users, cap)
        if float((weights_E * np.abs(advantages_E)).mean()) < LEAST_MOVED:
            self.lacks = (
                f"{count} answers of {len({*users})} users differ too little in their rewards, or "
                f"too few of them do for live.user_cap {cap:g}"
            )
            self._turns.skip(users, at=now)
            return None
        self._take(chosen, now)
        return [
            LearnedAnswer(
                one.capture.answer,
                one.user,
                one.reward,
                advantage,
                min(weight, 1.0),
                one.age_s,
                one.silent,
            )
            for one, advantage, weight in zip(
                chosen, advantages_E.tolist(), weights_E.tolist(), strict=True
            )
        ]

    def choose(self, found: Sequence[MaturedAnswer], count: int) -> list[MaturedAnswer]:
        """Chooses up to ``count`` of the answers (`deltawire.live.learning.choosing`)."""
        most = max(1, int(self.config.live.largest_share(count) * count))
        return choose(found, count, most=most, turns=self._turns)

    def _may_be_chosen(self, one: MaturedAnswer, oldest: int) -> bool:
        """Returns whether a matured answer can be in a group now, and counts it if not."""
        live = self.config.live
        if live.baseline == "sign" and not one.reward:
            self.states["neutral"] += 1
        elif min((version for version, _ in one.capture.spans), default=0) < oldest:
            self.states["stale"] += 1
        elif live.half_life_s and one.age_s > FADED * live.half_life_s:
            self.states["faded"] += 1
        else:
            return True
        return False

    def _take(self, chosen: Sequence[MaturedAnswer], now: float) -> None:
        """Notes that these answers are in a group, and lets the baseline learn them."""
        self._turns.add([one.user for one in chosen], at=now)
        for one in chosen:
            self.claimed.add(one.capture.answer)
            self.corrections.add(one.capture.answer, one.reward, own=True)
            self._matured_at.pop(one.capture.answer, None)
            if self._baseline is not None:
                self._baseline.add(one, one.reward, one.version)

    def _lacking(self, found: int, users: int, count: int) -> str:
        """Says what a group of ``count`` answers lacks, and where the other answers are."""
        others = [f"{self.states[name]} {name}" for name in LEFT_OUT if self.states[name]]
        faults = Counter(fault for fault in self._faults.values() if fault).most_common(1)
        why = f" (most often: {faults[0][0]})" if faults else ""
        rest = f"; {', '.join(others)}{why}" if others else ""
        of_users = f" of {users} users" if found else ""
        return f"{found} answers{of_users} can be trained on, a group takes {count}{rest}"

    def _fit(self, now: float) -> None:
        """Fits the delays of each kind to the first report of that kind about each answer."""
        captures = list(self.records.answers.values())
        ages_s = [max(0.0, now - capture.at) for capture in captures]
        window_s = self._window.window_s
        places = sampled(ages_s, window_s=window_s, most=FITTED)
        reports: dict[str, list[tuple[float, float]]] = {}
        for place in places:
            capture, firsts = captures[place], dict[str, float]()
            for one in self._counted(capture.answer):
                delay_s = max(0.0, one.received - capture.at)
                firsts[one.kind] = min(delay_s, firsts.get(one.kind, delay_s))
            for kind, delay_s in firsts.items():
                reports.setdefault(kind, []).append((delay_s, max(delay_s, ages_s[place])))
        self.delays = fit_delays(
            reports, len(places), window_s=window_s, still_likely=self._window.still_likely
        )

    def _counted(self, answer: str) -> list[Feedback]:
        """Returns the reports about an answer that its reward depends on."""
        reports = self.records.reports.get(answer, {}).values()
        return [one for one in reports if one.kind in self.rules.kinds or self._own]

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
