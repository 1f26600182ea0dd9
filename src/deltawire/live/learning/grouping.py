"""Grouping: chooses matured answers and makes a group of them, each answer with its own prompt.

A group is a batch: as many answers as ``rollout.group_size``, of different prompts. Its rewards are
advantages already, times the weights that the caps leave; ``train.loss.advantage = "given"`` takes
them as they are. So the trainer, its ledger and its recomputing of steps are those of any group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from deltawire.config import RunConfig
from deltawire.config.live import DEFAULT_REWARDS
from deltawire.config.ranges import JUDGED
from deltawire.live.learning.advantages import (
    Baseline,
    LearnedBaseline,
    ValueTracker,
    advantages,
    signs,
)
from deltawire.live.learning.choosing import Turns, choose
from deltawire.live.learning.corrections import Corrections
from deltawire.live.learning.edits import EDIT, EditEncoder, edit_name, newest_edit
from deltawire.live.learning.influence import age_weights, cap_influence, influence_sizes
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.live.learning.window import DelayModel, JoinWindow, fit_delays, sampled
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.rollouts import LIVE_TASK, BetterAnswer, Group, Trajectory

FITTED = 5000
"""The delays are fitted to at most this many answers of the last two windows."""
VOCABULARY = 1 << 31
FADED = 2.0
"""Answers older than so many half-lives are not trained on: they would hardly weigh anything."""
LEAST_MOVED = 0.05
"""A group is made if the mean of weight · |advantage| is as large; that of equal answers is 1."""
LEFT_OUT = (
    "waiting", "censored", "unusable", "expired", "others", "stale", "faded", "neutral",
    "over_share", "unpaired",
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
    judged: bool = True
    """False if only an edit is known of it: it is in a pair, and has no advantage."""
    edit: Feedback | None = None

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
    take (`deltawire.live.learning.owners`). ``edits`` encodes better answers, None for a run that
    does not train on pairs. ``delays`` is the last fit, and ``states`` counts the
    answers of the last `prepare` by state: those of the join window, and ``unusable``, ``expired``
    (older than ``max_age_s``), ``late`` (reports after the window about answers that were trained
    on), ``corrected`` (trained answers whose reward is another one by now), and of the matured ones
    ``others`` (those that another learner owns), ``stale`` (drawn by a version that is too old),
    ``faded`` (older than `FADED` half-lives), ``neutral`` (of reward 0, with the baseline
    ``sign``), ``unpaired`` (without an edit, where only pairs are trained on) and ``over_share``
    (of users who had their share for now). ``lacks`` says why
    the last `prepare` made no group.
    """

    config: RunConfig
    records: LiveRecords
    claimed: set[str] = field(default_factory=set)
    owns: Callable[[str], bool] = lambda _answer: True
    edits: EditEncoder | None = None
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
        self._better: dict[str, tuple[str, NDArray[np.int32]]] = {}
        """By answer, the name of an edit and its tokens, until the answer is in a group."""
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
            self._better.pop(one.answer, None)
            capture = self.records.answers.get(one.answer)
            judged = not one.edit or one.reward != 0 or one.advantage != 0
            if capture is not None and self._baseline is not None and judged:
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
            last = max((r.received for r in self._awaited(counted)), default=None)
            state = self._window.state(
                age_s, None if last is None else last - capture.at, self.delays
            )
            self.states[state] += 1
            if state in ("matured", "silent"):
                reward = self.rules.reward(values_of(counted), capture, self._own)
                edit = self._usable_edit(capture)
                if reward is None and edit is None:
                    continue
                since = self._matured_at.setdefault(answer, now)
                if self.owns(answer):
                    silent, judged = state == "silent", reward is not None
                    found.append(
                        MaturedAnswer(capture, reward or 0.0, age_s, since, silent, judged, edit)
                    )
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
        ages_E = age_weights(np.array([one.age_s for one in chosen]), live.half_life_s)
        advantages_E = self._advantages(chosen, ages_E)
        sizes_E = self._influence_sizes(chosen, advantages_E)
        weights_E = cap_influence(ages_E, sizes_E, users, cap)
        moved_E = np.abs(advantages_E) * (not self.config.train.loss.only_pairs)
        moved_E = np.maximum(moved_E, [float(one.edit is not None) for one in chosen])
        if float((weights_E * moved_E).mean()) < LEAST_MOVED:
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
                "" if one.edit is None else edit_name(one.edit),
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
        if self.config.train.loss.only_pairs and one.edit is None:
            self.states["unpaired"] += 1
        elif live.baseline == "sign" and not one.reward and one.edit is None:
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
            self._better.pop(one.capture.answer, None)
            if self._baseline is not None and one.judged:
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
        """Returns the reports about an answer that its reward or its pair depends on."""
        reports = self.records.reports.get(answer, {}).values()
        paired = self.edits is not None
        return [
            one
            for one in reports
            if one.kind in self.rules.kinds or self._own or (paired and one.kind == EDIT)
        ]

    def _awaited(self, counted: list[Feedback]) -> list[Feedback]:
        """Returns the reports that an answer waits for: where users' feedback is weighed, scores of
        judges come too early to end the wait for it, or to break silence."""
        if not self._own and all(kind.startswith(JUDGED) for kind in self.rules.kinds):
            return counted
        return [one for one in counted if not one.kind.startswith(JUDGED)]

    def better_answer(self, answer: str, name: str) -> NDArray[np.int32] | None:
        """Returns the tokens of the edit that a lineage names, None if it is not known, or if this
        learner does not train on pairs."""
        capture = self.records.answers.get(answer)
        if self.edits is None or capture is None:
            return None
        reports = self.records.reports.get(answer, {}).values()
        found = next((one for one in reports if one.text and edit_name(one) == name), None)
        return None if found is None else self.edits.tokens(capture, found)

    def _usable_edit(self, capture: Capture) -> Feedback | None:
        """Returns the newest edit of an answer, if it makes a pair."""
        if self.edits is None:
            return None
        edit = newest_edit(self.records.reports.get(capture.answer, {}).values())
        if edit is None:
            return None
        name, (known, tokens) = edit_name(edit), self._better.get(capture.answer, ("", None))
        if known != name or tokens is None:
            tokens = self.edits.tokens(capture, edit)
            self._better[capture.answer] = name, tokens
        return edit if len(tokens) else None

    def _advantages(
        self, chosen: Sequence[MaturedAnswer], ages_E: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns the advantages of the answers; 0 for those of which only an edit is known."""
        judged_E = np.array([one.judged for one in chosen])
        advantages_E = np.zeros(len(chosen))
        if not judged_E.any():
            return advantages_E
        judged = [one for one in chosen if one.judged]
        rewards_J = np.array([one.reward for one in judged])
        if self.config.live.baseline == "sign":
            advantages_E[judged_E] = signs(rewards_J)
        else:
            advantages_E[judged_E] = advantages(self._baseline, judged, rewards_J, ages_E[judged_E])
        return advantages_E

    def _influence_sizes(
        self, chosen: Sequence[MaturedAnswer], advantages_E: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns the influence of each answer at weight 1, that of its pair included: float64[E].

        Both are in the units of the whole loss, where its sums are divided by the answers.
        """
        loss = self.config.train.loss
        tokens_E = np.array([float(len(one.capture.tokens) // 4) for one in chosen])
        # A loss of whole answers has its slope at each of their tokens, not at their mean.
        whole = loss.traits.good_or_bad
        aggregation = "token_mean" if whole else loss.aggregation
        sizes_E = influence_sizes(advantages_E, tokens_E, aggregation)
        if self.edits is None:
            return sizes_E
        horizon = loss.horizon or self.config.rollout.max_tokens
        scale = {"token_mean": 1 / tokens_E.mean(), "dr_grpo": 1 / horizon}
        pairs_E = np.array(
            [
                loss.preference.influence(
                    len(self._better[one.capture.answer][1]), len(one.capture.tokens) // 4
                )
                if one.edit is not None
                else 0.0
                for one in chosen
            ]
        )
        factor = scale.get(loss.aggregation, 1.0)
        if whole:  # The steepest slope of the logistic function is a quarter.
            factor = loss.kto.beta / 4
            factor *= max(loss.kto.desirable_weight, loss.kto.undesirable_weight)
        policy_E = loss.policy_coefficient * factor * sizes_E
        return np.asarray(policy_E + pairs_E, np.float64)

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
    better: Mapping[str, NDArray[np.int32]] = MappingProxyType({}),
) -> Group:
    """Returns the group of these answers: one episode each, with its own prompt, whose reward is
    its advantage times its weight. An answer without a capture was its user's who was forgotten.
    ``better`` has the tokens of better answers, whose pairs have the weight of their answer."""
    trajectories = []
    for episode, (one, capture) in enumerate(zip(answers, captures, strict=True)):
        if capture is None:
            trajectories.append(_forgotten_trajectory(episode))
            continue
        made = trajectory_of(capture, one.advantage * one.weight, episode)
        if one.answer in better:
            made = replace(made, better=BetterAnswer(better[one.answer], one.weight))
        trajectories.append(made)
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
