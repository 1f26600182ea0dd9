"""A training step under the gate: what is masked has no gradient, and a stop changes nothing."""

import copy

import msgspec
import numpy as np
import pytest
import torch
from sampled import sampled_groups

from deltawire.config import (
    OptimizerConfig,
    ParityConfig,
    ParityLimits,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step


def groups_of(model, *, spoil=()):
    """Twelve trajectories with rewards that differ; the log-probabilities of some are not those
    that they were drawn with."""
    groups = sampled_groups(model, 1.0)
    rows = [t for group in groups for t in group.trajectories]
    rng = np.random.default_rng(1)
    for row, t in enumerate(rows):
        object.__setattr__(t, "reward", float(rng.integers(0, 3)))
        if row in spoil:
            t.logprobs_T[0] -= 3
    return groups


def step(model, groups, parity=None, *, micro=4096):
    """One step of a copy, at the version that drew the groups."""
    train = TrainConfig(
        optimizer=OptimizerConfig(learning_rate=1e-3),
        schedule=ScheduleConfig(warmup_steps=0),
        max_tokens_per_batch=micro,
    )
    config = RunConfig(name="x", train=train, parity=parity or ParityConfig())
    masters = MasterWeights(
        copy.deepcopy(model).train(), msgspec.structs.replace(train, exporter="f32")
    )
    masters.steps = 4
    return train_step(masters, groups, config), masters


@pytest.mark.parametrize("micro", [1, 4096])
def test_a_masked_sequence_has_no_gradient_however_wrong_it_is(tiny, micro):
    mask = ParityConfig(mask=ParityLimits(drift_largest_gap=1.0))
    slightly, badly = groups_of(tiny, spoil=(1, 6, 11)), groups_of(tiny, spoil=(1, 6, 11))
    badly[0].trajectories[1].logprobs_T[:] = -60
    one, first = step(tiny, slightly, mask, micro=micro)
    two, second = step(tiny, badly, mask, micro=micro)
    assert one.parity.masked == two.parity.masked == (1, 6, 11)
    assert one.tokens == sum(group.tokens for group in slightly), "they count below the line"
    for a, b in zip(first.source.tensors().values(), second.source.tensors().values(), strict=True):
        assert torch.equal(a, b)
    _, trained_on = step(tiny, badly, micro=micro)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(
            first.source.tensors().values(), trained_on.source.tensors().values(), strict=True
        )
    )


def test_a_stopped_step_leaves_the_weights_as_they_were(tiny):
    stop = ParityConfig(stop=ParityLimits(largest_gap=1.0))
    result, masters = step(tiny, groups_of(tiny, spoil=(0,)), stop)
    assert [one.name for one in result.parity.stopped] == ["largest_gap"]
    assert masters.steps == 4
    for name, parameter in tiny.named_parameters():
        assert torch.equal(masters.source.tensors()[name], parameter)


def test_the_engines_own_tokens_pass_the_strictest_gate(tiny):
    strict = ParityLimits(k3=1e-8, k3_swapped=1e-8, largest_gap=1e-3)
    result, _ = step(tiny, groups_of(tiny), ParityConfig(stop=strict, mask=strict))
    assert not result.parity.stopped
    assert not result.parity.masked
    assert result.parity.numeric == result.parity.drift
    assert result.parity.numeric.tokens == result.tokens


def test_all_segments_of_a_masked_episode_leave_the_loss(tiny):
    """Segments share one advantage: training on the rest of a rejected episode is biased."""
    groups = groups_of(tiny, spoil=(1,))
    for place, trajectory in enumerate(groups[0].trajectories):
        object.__setattr__(trajectory, "episode", place // 2)
        object.__setattr__(trajectory, "reward", float(place // 2))
    result, _ = step(tiny, groups, ParityConfig(mask=ParityLimits(drift_largest_gap=1.0)))
    assert result.parity.masked == (0, 1)
