"""Update latency and tasks a second, over clocks that differ."""

from __future__ import annotations

import time

import pytest
from heartbeats import put_heartbeat

from deltawire.dashboard.figures import text, value
from deltawire.dashboard.latency_figures import clock_problem, percentile
from deltawire.dashboard.state import RunState
from deltawire.events import Generated, Life, Published, Step, Swapped
from deltawire.runtime.fleet import Fleet
from deltawire.store import open_bucket

NAMES = ("update_latency_ms", "update_latency_p95_ms", "update_latency_last_ms")


def started(name):
    return Life(process=name, at=0.0, role="worker", what="started")


def step(version, at):
    return Step(
        process="trainer", at=at, version=version, groups=1, dropped=0, reward_mean=0.0, loss=0.0,
        grad_norm=0.0, k3=0.0, ratio_max=1.0, clipped=0.0, staleness=[0], tokens=1, seconds=1.0,
        workers={"w0": 1},
    )  # fmt: skip


def published(version, at, blocked_ms=0.0):
    return Published(
        process="trainer", at=at, version=version, bytes_delta=1, bytes_full=2, bytes_anchor=0,
        changed=1, elements=2, blocked_ms=blocked_ms, encode_ms=1.0, upload_ms=1.0,
    )  # fmt: skip


def swapped(name, version, at):
    return Swapped(process=name, at=at, version=version, running=0, swap_ms=1.0, prepare_ms=1.0)


def group(name, sequence, at):
    return Generated(
        process=name, at=at, sequence=sequence, versions=[0], reward_mean=0.0, tokens=10
    )


def state_of(*events):
    state = RunState()
    state.add(events)
    return state


def found(state):
    return [None if (one := value(name, state)) is None else round(one) for name in NAMES]


def test_it_counts_from_the_end_of_the_step_to_each_swap():
    """The step's event comes after the copy for publishing, which the trainer waited for."""
    state = state_of(
        started("w0"), started("w1"),
        step(1, 10.0), published(1, 10.6, blocked_ms=200.0),
        swapped("w0", 1, 11.0), swapped("w1", 1, 13.0),
        step(2, 20.0), published(2, 20.5),
        swapped("w0", 2, 20.7),
    )  # fmt: skip
    assert found(state) == [1200, 3200, 700]
    assert found(state.at(1)) == [2200, 3200, 3200]
    assert text(NAMES[0], state) == "1.20 s"


def test_a_version_without_a_step_counts_from_its_commit():
    state = state_of(started("w0"), published(3, 5.0, blocked_ms=900.0), swapped("w0", 3, 5.25))
    assert found(state) == [250, 250, 250]


def test_without_swaps_nothing_is_stated():
    assert found(state_of(started("w0"), step(1, 10.0), published(1, 10.6))) == [None] * 3
    unknown = state_of(started("w0"), swapped("w0", 7, 1.0))
    assert found(unknown) == [None] * 3, "nobody says when version 7 was made"


def test_only_workers_count():
    life = Life(process="evaluator", at=0.0, role="evaluator", what="started")
    assert found(state_of(life, published(1, 1.0), swapped("evaluator", 1, 90.0))) == [None] * 3


def test_a_slow_clock_is_moved_so_that_no_version_serves_before_its_step():
    """w1's clock is 30 s slow: its fastest swap then counts as immediate, the other as 2 s."""
    state = state_of(
        started("w0"), started("w1"),
        step(1, 10.0), step(2, 20.0),
        swapped("w0", 1, 11.0), swapped("w0", 2, 21.0),
        swapped("w1", 1, 10.0 - 27.0), swapped("w1", 2, 20.0 - 29.0),
    )  # fmt: skip
    assert found(state) == [1000, 2000, 1000]


def test_tasks_a_second_are_over_all_workers_and_the_recent_time():
    events = [started("w0"), started("w1")]
    events += [group(f"w{n % 2}", n // 2, 100.0 + 0.5 * n) for n in range(9)]
    state = state_of(*events)
    assert value("groups_per_s", state) == pytest.approx(2.0)
    assert value("tokens_generated_per_s", state) == pytest.approx(20.0)
    state.recent_s = 1.0
    assert value("groups_per_s", state) == pytest.approx(2.0)
    assert value("groups_per_s", state_of(started("w0"), group("w0", 0, 1.0))) is None


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(1, 0.95, 0), (20, 0.95, 18), (100, 0.95, 94), (4, 0.5, 1)]
)
def test_a_percentile_is_one_of_the_values(count, share, expected):
    assert percentile(list(range(count)), share) == expected


def test_the_stores_times_show_which_clock_is_wrong():
    bucket = open_bucket("memory://")
    put_heartbeat(bucket, "trainer", "trainer", at=time.time())
    put_heartbeat(bucket, "w0", at=time.time())
    put_heartbeat(bucket, "w1", at=time.time() + 600)
    put_heartbeat(bucket, "w2", at=time.time() - 40)
    fleet = Fleet(bucket, silence_s=3600.0)
    fleet.poll()
    problem = clock_problem(fleet.clock_offsets)
    assert "the clock of w1 is 600 s ahead of the trainer's, and 1 more differ" in problem
    agreeing = {name: fleet.clock_offsets[name] for name in ("trainer", "w0")}
    assert clock_problem(agreeing) == ""
    assert clock_problem({"w1": 600.0}) == "", "without a trainer there is nothing to compare with"


def test_a_machine_whose_clock_is_wrong_everywhere_is_no_problem():
    """The trainer and its worker share one machine, and the store has another clock."""
    assert clock_problem({"trainer": 3600.0, "w0": 3601.0}) == ""
