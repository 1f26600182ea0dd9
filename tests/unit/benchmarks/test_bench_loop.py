"""The figures that bench loop measures without a run are what they claim to be."""

import pytest

from benchmarks.loop_cost import measure_loop_cost, measure_rollouts_at_once
from benchmarks.loop_idle import draw_group_s, simulate_idle
from benchmarks.reports import loop as report
from benchmarks.scripted import ScriptedEngine
from deltawire.config import (
    CorrectionConfig,
    LossConfig,
    RolloutConfig,
    RunConfig,
    StalenessConfig,
    TrainConfig,
)
from deltawire.errors import BugError

POLICIES = ["strict", "windowed_fifo", "requeue"]


def train(policy, staleness=4, groups=16):
    loss = LossConfig(ratio_base="old", corrections=[CorrectionConfig()])
    return TrainConfig(
        groups_per_step=groups,
        max_staleness=staleness,
        staleness=StalenessConfig(policy=policy),
        loss=loss,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trainer_with_enough_workers_hardly_waits(policy):
    found = simulate_idle(train(policy), steps=60)
    assert found.trainer_idle < 0.05
    assert found.oldest <= train(policy).largest_age


def test_alternating_makes_the_trainer_wait():
    """The simulation can tell: at staleness 0 a step waits for its slowest episode."""
    assert simulate_idle(train("strict", staleness=0), steps=30).trainer_idle > 0.3


def test_simulated_groups_are_heavy_tailed():
    import random

    rng = random.Random(0)
    times = sorted(draw_group_s(rng) for _ in range(2000))
    assert times[-1] > 5 * times[1000]


def test_every_rollout_is_open_at_once():
    found = measure_rollouts_at_once(episodes=30, turns=7)
    assert (found.most, found.turns) == (30, 7)


def test_episodes_that_end_early_do_not_count(monkeypatch):
    async def broken(self, prompt, sampling, *, on_token=None):
        raise BugError("the engine is gone")

    monkeypatch.setattr(ScriptedEngine, "generate", broken)
    with pytest.raises(BugError):
        measure_rollouts_at_once(episodes=2, turns=3)


def test_the_cost_is_of_groups_that_went_all_the_way():
    config = RunConfig(
        name="t", rollout=RolloutConfig(group_size=2), train=TrainConfig(groups_per_step=2)
    )
    found = measure_loop_cost(config, steps=2)
    assert found.worker_ms > 0
    assert found.trainer_ms > 0
    assert found.total_ms == found.worker_ms + found.trainer_ms
    assert found.clock_ms > 0


class _Run:
    """As much of a summary as the figures need."""

    def __init__(self, pace, accuracy):
        self.steps_per_minute = pace
        self.groups_per_s, self.update_latency_ms, self.update_latency_p95_ms = 2 * pace, 30.0, None
        self.heldout = self.idle = self.staleness = self
        self.last, self.trainer, self.workers, self.max = accuracy, 0.1, 0.2, 3


def test_the_standard_error_is_of_the_difference_of_the_means():
    results = {
        "alternating": [_Run(10, 0.5), _Run(10, 0.7)],
        "pipelined": [_Run(16, 0.6), _Run(18, 0.6)],
    }
    found = report._figures(results, 2)
    assert found.speedups == [1.6, 1.8]
    assert (found.groups_per_s.alternating, found.groups_per_s.pipelined) == (20, 34)
    assert found.update_latency_p95_ms.pipelined == 0.0
    assert found.pipelined_speedup == pytest.approx(1.7)
    assert found.heldout_async_minus_sync == pytest.approx(0.0)
    assert found.heldout_standard_error == pytest.approx(0.1)  # sqrt(0.02 / 2 + 0)
    one = {way: runs[:1] for way, runs in results.items()}
    assert report._figures(one, 1).heldout_standard_error is None
