"""Steps with KTO: the reference point is that of the whole step, and good answers gain."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampled import sampled_groups

from deltawire.config import LossConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from deltawire.errors import InputError
from deltawire.train.batch import collate
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import FrozenCopy, RecordedReference, SleepingCopy
from deltawire.train.step import _TrainingStep, train_step
from deltawire.train.stopping import never

CPU = torch.device("cpu")
KTO = LossConfig(surrogate="kto", advantage="given", aggregation="seq_mean_token_mean")


def judged(model):
    """Groups whose answers are good and bad in turn, and one without a judgment."""
    groups = sampled_groups(model, 1.0)
    return [
        replace(
            group,
            trajectories=[
                replace(t, reward=[1.0, -0.5, 0.0][place % 3])
                for place, t in enumerate(group.trajectories)
            ],
        )
        for group in groups
    ]


def train_config(**changes):
    return TrainConfig(
        schedule=ScheduleConfig(warmup_steps=0), loss=KTO,
        optimizer=OptimizerConfig(learning_rate=2e-3), **changes,
    )  # fmt: skip


def rewards_of(groups):
    return torch.tensor([t.reward for group in groups for t in group.trajectories])


def test_a_step_is_the_same_over_micro_batches_and_optimizer_steps_share_its_point(tiny, sharp):
    groups = judged(tiny)
    found = []
    for micro in (1, 4096):
        train = train_config(max_tokens_per_batch=micro)
        frozen = SleepingCopy(sharp(copy.deepcopy(tiny), seed=5), train, device=CPU)
        masters = MasterWeights(copy.deepcopy(tiny), train)
        found.append(
            train_step(masters, groups, RunConfig(name="t", train=train), reference=frozen)
        )
    many, one = found
    assert many.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
    assert one.grad_norm > 0
    train = train_config(minibatches=2)
    step = _TrainingStep.of(
        MasterWeights(copy.deepcopy(tiny), train), groups, RunConfig(name="t", train=train),
        SleepingCopy(sharp(copy.deepcopy(tiny), seed=5), train, device=CPU), None, (), never,
    )  # fmt: skip
    step.compute_old()
    step.compute_reference_point()
    policy, frozen = FrozenCopy(step.masters.model.eval(), train), step.reference
    batch = collate(groups)
    moved_NC = (policy.logprobs(batch) - frozen.logprobs(batch)) * batch.loss_mask_NC
    wanted = max(0.0, float(moved_NC.double().sum()) / len(batch.members_N))
    assert step.reference_point == pytest.approx(wanted, rel=1e-4)
    assert wanted > 0


def test_the_point_is_never_below_zero(tiny):
    groups = judged(tiny)
    batch = collate(groups)
    own = FrozenCopy(copy.deepcopy(tiny), TrainConfig()).logprobs(batch).numpy()
    above = RecordedReference(
        {
            (number, place): own[row, : len(groups[number].trajectories[place].tokens_T)] + 0.5
            for row, (number, place) in enumerate(batch.members_N)
        }
    )
    config = RunConfig(name="t", train=train_config())
    step = _TrainingStep.of(
        MasterWeights(tiny, config.train), groups, config, above, None, (), never
    )
    step.compute_old()
    step.compute_reference_point()
    assert step.reference_point == 0.0


def test_good_answers_gain_and_bad_ones_lose(tiny):
    groups = judged(tiny)
    train = train_config()
    frozen = SleepingCopy(copy.deepcopy(tiny), train, device=CPU)
    masters = MasterWeights(tiny, train)
    config = RunConfig(name="t", train=train)
    results = [train_step(masters, groups, config, reference=frozen) for _ in range(8)]
    assert results[-1].loss < results[0].loss
    assert results[0].reward_mean == pytest.approx(float(rewards_of(groups).mean()))
    batch = collate(groups)
    policy = FrozenCopy(masters.model.eval(), train)
    moved_N = ((policy.logprobs(batch) - frozen.logprobs(batch)) * batch.loss_mask_NC).sum(1)
    values = np.array([groups[g].trajectories[t].reward for g, t in batch.members_N])
    assert float(moved_N[values > 0].mean()) > 0.1
    assert float(moved_N[values < 0].mean()) < -0.1


def test_a_step_without_a_reference_is_refused(tiny):
    config = RunConfig(name="t", train=train_config())
    masters = MasterWeights(tiny, config.train)
    with pytest.raises(InputError, match="needs the log-probabilities of a reference"):
        train_step(masters, judged(tiny), config)
