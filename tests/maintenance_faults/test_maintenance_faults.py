"""One damaged answer in the middle of a command: nothing readable is lost, and a second run of the
command finishes the work."""

import pytest
from answer_damages import DAMAGES, cases_of, fault_of, trial_of
from line_command import LINE_COMMAND
from maintenance_commands import COMMANDS

MOST_SHOWN = 5

by_name = pytest.mark.parametrize(
    "command", [*COMMANDS, LINE_COMMAND], ids=lambda command: command.name
)


def faults_of(command, damages):
    """Runs each damage at each answer; returns how many cases there were, and what went wrong."""
    trial = trial_of(command)
    cases = cases_of(trial, damages)
    assert cases, "no answer of this command can have the damage"
    return len(cases), list(filter(None, (fault_of(trial, *case) for case in cases)))


def shown(faults):
    return "\n".join([*faults[:MOST_SHOWN], f"and {max(len(faults) - MOST_SHOWN, 0)} more"])


@by_name
def test_a_flipped_bit_in_each_answer(command):
    _, faults = faults_of(command, [DAMAGES["flipped bit"]])
    assert not faults, shown(faults)


@pytest.mark.drills
@pytest.mark.long
@by_name
def test_every_damage_of_each_answer(command, record_property):
    count, faults = faults_of(command, DAMAGES.values())
    record_property("damaged answers", count)  # `tests/conftest.py` prints the sum.
    assert not faults, shown(faults)
