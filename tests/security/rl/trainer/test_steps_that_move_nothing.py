"""An alarm follows steps that move nothing; junk in a version's place costs one restart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deltawire.dashboard.state import RunState
from deltawire.errors import InputError, ResyncError
from deltawire.events import NoProgress
from deltawire.rl.trainer.fencing import restartable
from deltawire.rl.trainer.progress_alarm import ProgressAlarm
from deltawire.wire import keys


def result(**changes):
    values = {
        "rejected": 0.0, "members": [(0, 0)], "grad_norm": 1.0,
        "parity": SimpleNamespace(masked=()), **changes,
    }  # fmt: skip
    return SimpleNamespace(**values)


IDLE = {
    "zero gradients": (result(grad_norm=0.0), 7, "gradient is zero"),
    "no number": (result(grad_norm=float("nan")), 7, "not finite"),
    "all rejected": (result(rejected=1.0), 7, "reject every token"),
    "all masked": (result(parity=SimpleNamespace(masked=(0,))), 7, "removes every sequence"),
    "too small an update": (result(), 0, "changes no published weight"),
}


@pytest.mark.parametrize("cause", IDLE)
def test_an_alarm_follows_steps_that_move_nothing(cause):
    events = []
    alarm = ProgressAlarm(events.append)
    idle, changed, words = IDLE[cause]
    for version in range(1, 14):
        alarm.step(version, idle)
        alarm.committed(version, changed)
    assert [event.version for event in events] == [3, 6, 12]
    assert all(words in event.reason for event in events)
    state = RunState()
    state.add(reversed(events))
    assert state.no_progress == events[-1]


def test_steps_that_move_something_raise_none():
    events = []
    alarm = ProgressAlarm(events.append)
    for version in range(1, 40):
        idle = version % 3
        alarm.step(version, result(grad_norm=0.0 if idle else 1.0))
        alarm.committed(version, 3)
    assert not [event for event in events if isinstance(event, NoProgress)]


def test_junk_under_a_versions_name_restarts_the_trainer():
    """It ended the whole run: the supervisor does not restart after an `InputError`."""
    taken = InputError("another object has this version's name", version=3, key=keys.manifest(3))
    assert isinstance(restartable(taken), ResyncError)
    other = InputError("the model needs 9 bytes")
    assert restartable(other) is other
