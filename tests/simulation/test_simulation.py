"""Simulates runs with faults, and finds rules that were taken out (``make simulate``).

A simulation replaces Python's clock, locks and threads, so it has a process to itself.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate.py"


def simulated(*options):
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert result.returncode in (0, 1), result.stderr
    return result


def test_a_seed_is_one_history_in_which_everything_holds():
    result = simulated("--seed", "18", "--faults", "400")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'committed': " in result.stdout
    assert "'killed': " in result.stdout


def test_a_store_that_overwrites_is_found():
    result = simulated("--broken", "a create that overwrites", "--faults", "900")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.drills
@pytest.mark.timeout(1200)
def test_nothing_fails_in_three_simulated_hours(drill_seed):
    result = simulated("--hours", "3", "--first", str(10_000 * (drill_seed + 1)))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.drills
@pytest.mark.timeout(1200)
def test_every_process_writes_the_same_history():
    first, second = (simulated("--seed", "2").stdout for _ in range(2))
    assert first
    assert first == second


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_rule_that_is_taken_out_is_found():
    result = simulated("--broken", "")
    assert result.returncode == 0, result.stdout + result.stderr
