"""A state accumulates events in any order and gives correct figures."""

import random

import pytest

from deltawire.dashboard.state import RunState
from deltawire.dashboard.wording import byte_size, duration, smaller, sparkline
from deltawire.display import legible
from deltawire.events import (
    Evaluated,
    Event,
    Generated,
    Life,
    Published,
    Span,
    Step,
    Swapped,
    WarmStep,
)


def step(version: int, at: float, staleness: list[int] | None = None, process="trainer") -> Step:
    return Step(
        process=process, at=at, version=version, groups=2, dropped=0, reward_mean=0.5, loss=0.1,
        grad_norm=1.0, k3=1e-4, ratio_max=1.1, clipped=0.0, staleness=staleness or [0, 1],
        tokens=100, seconds=1.0,
    )  # fmt: skip


def published(version: int, at: float, delta: int = 1000) -> Published:
    return Published(
        process="trainer", at=at, version=version, bytes_delta=delta if version else 0,
        bytes_full=50_000, bytes_anchor=0 if version else 33_000, changed=10, elements=1000,
        blocked_ms=2.0, encode_ms=5.0, upload_ms=9.0,
    )  # fmt: skip


def span(process: str, activity: str, start: float, end: float) -> Span:
    return Span(process=process, activity=activity, start=start, end=end)


def small_run() -> list[Event]:
    """Two steps at 10 s and 20 s; one trainer, one worker, a warm start, an evaluator."""
    return [
        Life(process="trainer", at=0.0, role="trainer", what="started"),
        Life(process="w", at=1.0, role="worker", what="started", supervised=False),
        Life(process="w", at=12.0, role="worker", what="restarted", supervised=False),
        WarmStep(process="trainer", at=2.0, step=1, loss=3.0, accuracy=0.1),
        WarmStep(process="trainer", at=3.0, step=2, loss=2.0),
        published(0, 4.0),
        step(1, 10.0, [0]),
        published(1, 10.5, 1000),
        step(2, 20.0, [1, 3]),
        published(2, 20.5, 3000),
        span("trainer", "start", 0.0, 11.0),
        span("trainer", "wait", 5.0, 12.0),
        span("trainer", "train", 12.0, 18.0),
        span("trainer", "publish", 18.0, 25.0),
        span("w", "wait", 9.0, 10.0),
        span("w", "sample", 10.0, 16.0),
        span("w", "wait", 16.0, 19.0),
        span("w", "swap", 19.0, 20.0),
        Swapped(process="w", at=11.0, version=1, running=3, swap_ms=1.0, prepare_ms=4.0),
        Generated(process="w", at=9.0, sequence=0, versions=[0, 0], reward_mean=0.2, tokens=50),
        Generated(process="w", at=15.0, sequence=1, versions=[0, 1], reward_mean=0.4, tokens=50),
        Evaluated(process="evaluator", at=6.0, version=0, accuracy=0.25, problems=64, seconds=1.0),
        Evaluated(process="evaluator", at=22.0, version=2, accuracy=0.5, problems=64, seconds=1.0),
    ]


def state_of(events: list[Event]) -> RunState:
    state = RunState()
    state.add(events)
    return state


def test_idle_counts_only_time_between_the_first_and_the_last_step():
    state = state_of(small_run())
    assert state.window == (10.0, 20.0)
    # The trainer: wait 10..12, train 12..18, publish 18..20; its start does not count.
    assert state.idle(state.with_role("trainer")) == pytest.approx(2 / 10)
    # The worker: sample 10..16, wait 16..19, swap 19..20.
    assert state.idle(state.with_role("worker")) == pytest.approx(3 / 10)
    idle_share = state.idle([*state.with_role("trainer"), *state.with_role("worker")])
    assert idle_share == pytest.approx(5 / 20)
    assert state.processes["trainer"].seconds((10.0, 20.0)) == {
        "start": 1.0, "wait": 2.0, "train": 6.0, "publish": 2.0,
    }  # fmt: skip


def test_idle_is_unknown_before_the_second_step():
    state = state_of([step(1, 10.0), span("trainer", "wait", 5.0, 15.0)])
    assert state.window is None
    assert state.idle(state.processes.values()) is None


def test_the_state_does_not_depend_on_event_order():
    def seen(events: list[Event]) -> object:
        state = state_of(events)
        worker = state.processes["w"]
        return (
            state.version, state.versions, state.accuracy_curve, state.reward_curve,
            state.staleness, state.deltas, state.bytes_full, state.last_warm, state.window,
            state.extent, state.steps_per_minute,
            state.idle(state.with_role("trainer")), state.idle(state.with_role("worker")),
            worker.version, worker.groups, worker.doing, worker.restarts, worker.supervised,
            worker.role, state.lag(worker), state.processes["evaluator"].role,
        )  # fmt: skip

    events = [*small_run(), step(2, 19.0, [9, 9])]  # repeated after a crash: the later one counts
    expected = seen(events)
    for seed in range(20):
        shuffled = events[:]
        random.Random(seed).shuffle(shuffled)
        assert seen(shuffled) == expected


def test_incremental_updates_equal_one_update():
    events, bit_by_bit = small_run(), RunState()
    for event in events:
        bit_by_bit.add([event])
    assert bit_by_bit.__dict__ == state_of(events).__dict__


def test_processes_are_known_by_their_events():
    state = state_of(small_run())
    worker = state.processes["w"]
    assert (worker.role, worker.supervised, worker.restarts) == ("worker", False, 1)
    assert (worker.version, state.lag(worker), worker.groups) == (1, 1, 2)
    assert worker.doing == "wait"  # 17..19, against a swap in 19..20
    assert state.processes["evaluator"].role == "evaluator"
    state.add([Life(process="w", at=30.0, role="worker", what="died", supervised=False)])
    assert worker.gone
    assert worker.doing == "died"


def test_the_clock_of_a_worker_that_joined_by_hand_does_not_stretch_the_run():
    state = state_of(small_run())
    assert state.extent == (0.0, 25.0)
    state.add([span("w", "sample", 1e6, 2e6)])
    assert state.extent == (0.0, 25.0)
    assert RunState().extent is None


def test_names_from_the_bucket_are_made_legible():
    assert legible("worker-1") == "worker-1"
    assert legible("a\x1b[2Jb\nc\u202ed") == "a·[2Jb·c·d"
    assert legible("x" * 10_000, 8) == "x" * 7 + "…"


def test_figures_are_worded():
    assert [byte_size(n) for n in (0, 999, 1420, 54_321_000)] == [
        "0 B", "999 B", "1.42 kB", "54.3 MB",
    ]  # fmt: skip
    assert smaller(54_000_000, 1_420_000) == "38x smaller"
    assert [duration(s) for s in (42, 754, 11_554)] == ["0:42", "12:34", "3:12:34"]
    assert sparkline([0, 1, 2, 7], 8) == "▁▂▃█"
    assert len(sparkline(range(1000), 20)) == 20
    assert sparkline([3, 3], 8) == "▁▁"
