"""Probes on live data: rewards of served answers compared with facts that the reward does not see.

The monitor is that of training (`deltawire.reward_monitor`): each answer takes the place of a group
and its task that of the family. An alarm such as ``alarm.refusal`` diverges if users reward answers
that refuse; a second opinion such as ``kept_share`` diverges if rewards are higher than it.

Answers count in the order in which they were served, once each is ``outcome_after_s`` old, so later
looks add to what earlier ones saw. With ``unit = "user"`` each user's first answer of a version
counts: a user's answers resemble each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

import msgspec
import numpy as np

from deltawire.config import RunConfig
from deltawire.config.live import DEFAULT_REWARDS
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.reward_monitor.monitor import ALARM, Monitor, ProbeState
from deltawire.store import Bucket
from deltawire.wire.captures import ENDED_EARLY, Capture, Feedback, Mark
from deltawire.wire.rollouts import Group, Trajectory

FACTS = {"broken_call": "answer_broken_calls", "cut_off": "answer_cut_off"}
"""Alarms of an answer's own facts, and the term with which a reward sees each."""
SIGNALS = ("dissatisfaction", "retry", "rephrase")
"""Detectors whose signal is an alarm."""
OPINIONS = ("kept_share", "detected_edit")
"""Reports from 0 to 1 that are second opinions of the reward."""


class PlacedRecords(LiveRecords):
    """Answers without prompts and log-probabilities, and the gateway and segment of each.

    Example::

        records = PlacedRecords(bucket)
        records.poll()
        records.places["…"]  # ("g0", 3)
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.places: dict[str, tuple[str, int]] = {}
        self._place = ("", 0)

    def _at(self, gateway: str, number: int) -> None:
        self._place = (gateway, number)

    def _add(self, row: Capture | Feedback) -> bool:
        if not isinstance(row, Capture):
            return super()._add(row)
        added = super()._add(
            msgspec.structs.replace(row, prompt=b"", logprobs=b"", text=b"", receipt="")
        )
        if added:
            self.places[row.answer] = self._place
        return added


def probes_of(
    answer: Capture, values: Mapping[str, float], weighed: Collection[str]
) -> dict[str, float]:
    """Returns the probes of an answer by name; ``values`` are its reports by kind. Those that the
    reward weighs are left out: they are no second opinion."""
    marks = {f"{ALARM}{mark}": float(mark in answer.marks) for mark in get_args(Mark)}
    facts = {"broken_call": answer.broken_calls > 0, "cut_off": answer.finish == "length"}
    found = marks | {
        f"{ALARM}{name}": float(value)
        for name, value in facts.items()
        if FACTS[name] not in weighed
    }
    for name in SIGNALS:
        kind = f"detected_{name}"
        if kind in values and kind not in weighed:
            found[f"{ALARM}{name}"] = values[kind]
    return found | {
        name: values[name] for name in OPINIONS if name in values and name not in weighed
    }


def monitor_live(bucket: Bucket, config: RunConfig, *, now: float) -> ProbeState:
    """Compares the rewards of all answers that have an outcome with their probes.

    Raises `RetryError`, and `InputError` if the reward's function does or cannot be loaded.
    """
    live, records = config.live, PlacedRecords(bucket)
    weights = live.rewards or DEFAULT_REWARDS
    rules = RewardRules(weights, silent=live.silent, function=live.reward_function)
    own, weighed = rules.load(), weights.keys() if not live.reward_function else ()
    records.poll()
    monitor = Monitor(config.probes)
    monitor.state.since = 0
    seen: set[tuple[str, int]] = set()
    for answer in sorted(records.answers.values(), key=lambda one: (one.at, one.answer)):
        until = answer.at + live.release.outcome_after_s
        if until > now or answer.finish in ENDED_EARLY:
            continue
        about = records.reports.get(answer.answer, {}).values()
        values = values_of(report for report in about if report.received <= until)
        reward = rules.reward(values, answer, own)
        if reward is None:
            continue
        version = max((number for number, _ in answer.spans), default=0)
        unit = (answer.user or answer.conversation, version)
        if live.release.unit == "user" and unit in seen:
            continue
        seen.add(unit)
        _add(monitor, answer, records.places[answer.answer], reward, values, weighed, version)
    return monitor.state


def _add(
    monitor: Monitor,
    answer: Capture,
    place: tuple[str, int],
    reward: float,
    values: Mapping[str, float],
    weighed: Collection[str],
    version: int,
) -> None:
    gateway, number = place
    nothing = np.zeros(0, np.int32)
    trajectory = Trajectory(
        nothing,
        np.zeros(0, np.float32),
        nothing,
        np.zeros(0, np.uint8),
        reward,
        answer.finish or "stop",
        probes=probes_of(answer, values, weighed),
    )
    task = answer.task
    group = Group(gateway, "", task, answer.temperature, nothing, [trajectory], task)
    monitor.add(group, number, version=version, answer=answer.answer)
    monitor.state.version = max(monitor.state.version, version)
