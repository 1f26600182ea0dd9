"""A view of a long run keeps a bounded number of events, and the figures stay."""

import pytest

from deltawire.dashboard import state as module
from deltawire.dashboard.state import RunState
from deltawire.events import Generated, Span, Step, Swapped

ROUNDS = 20_000


def step(version: int, staleness: list[int]) -> Step:
    return Step(
        process="trainer",
        at=float(version),
        version=version,
        groups=len(staleness),
        dropped=0,
        reward_mean=0.0,
        loss=0.0,
        grad_norm=1.0,
        k3=0.0,
        ratio_max=1.0,
        clipped=0.0,
        staleness=staleness,
        tokens=1,
        seconds=1.0,
        queued=[age // 2 for age in staleness],
    )


def test_events_of_processes_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 6_000)
    state = RunState()
    state.add([step(0, [0]), step(ROUNDS, [0])])
    for number in range(ROUNDS):
        at = float(number)
        state.add(
            [
                Span(process="w", activity="sample", start=at, end=at + 0.75),
                Span(process="w", activity="wait", start=at + 0.75, end=at + 1),
                Swapped(process="w", at=at, version=number, running=1, swap_ms=1, prepare_ms=1),
                Generated(
                    process="w", at=at, sequence=number, versions=[0], reward_mean=0, tokens=1
                ),
            ]
        )
    worker = state.processes["w"]
    share = 6_000 // 12
    assert max(map(len, (worker.spans, worker.swaps, worker.generated))) <= 2 * share + 2
    assert worker.groups == ROUNDS
    assert max(worker.swaps) == max(worker.generated) == ROUNDS - 1
    assert state.idle([worker]) == pytest.approx(0.25)
    assert min(span.start for span in worker.spans) == 0
    state.add([Generated(process="w", at=1, sequence=5, versions=[0], reward_mean=0, tokens=1)])
    assert worker.groups == ROUNDS, "a repeated event counts once"


def test_the_groups_of_old_steps_are_sampled(monkeypatch):
    monkeypatch.setattr(module, "MAX_STALENESS", 40_000)
    state = RunState()
    ages = [number % 50 for number in range(1_000)]
    for version in range(200):
        state.add([step(version, [*ages, 77] if version == 3 else ages)])
    kept = sum(len(one.staleness) for one in state.steps.values())
    assert kept <= 40_000 + 200 * module.SAMPLED
    assert len(state.steps[199].staleness) == 1_000
    old = state.steps[3]
    assert (max(old.staleness), len(old.queued)) == (77, len(old.staleness))
    mean = sum(state.steps[2].staleness) / len(state.steps[2].staleness)
    assert mean == pytest.approx(24.5, abs=1)
