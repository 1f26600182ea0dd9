"""The references of a penalty agree with each other; distillation moves toward the teacher."""

import copy

import numpy as np
import pytest
import torch
from sampled import sampled_groups

from deltawire.config import (
    AdapterConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from deltawire.export.adapter import adapted
from deltawire.export.models import serve_as
from deltawire.train.batch import collate
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import AdapterOff, FrozenCopy, RecordedReference, SleepingCopy
from deltawire.train.step import train_step

CPU = torch.device("cpu")


def filled(model):
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return model


def test_a_streamed_copy_computes_the_same_bits_and_sleeps_again(tiny):
    batch = collate(sampled_groups(tiny, 1.0))
    resident = SleepingCopy(copy.deepcopy(tiny), TrainConfig(), device=CPU)
    model = copy.deepcopy(tiny)
    streamed = SleepingCopy(model, TrainConfig(), device=CPU, streamed=True)
    home = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    seen = []
    last = model.model.layers[-1]
    last.register_forward_pre_hook(
        lambda layer, _: seen.append(next(layer.parameters()).data_ptr())
    )
    for _ in range(2):
        assert torch.equal(streamed.logprobs(batch), resident.logprobs(batch))
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == home
    assert seen
    assert next(last.parameters()).data_ptr() not in seen, "it computed with a copy"


def test_a_bf16_copy_computes_as_a_policy_in_bf16_does(tiny):
    """A trainer that computes in bf16 shards its model; the copy that it is held against is a plain
    one, of half the bytes of an fp32 copy."""
    serve_as(serve_as(tiny, "bfloat16"), "float32")
    batch = collate(sampled_groups(tiny, 1.0))
    train = TrainConfig(compute="bfloat16")
    frozen = serve_as(copy.deepcopy(tiny), "bfloat16")
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}
    masters = MasterWeights(copy.deepcopy(tiny), train)
    for streamed in (False, True):
        copied = copy.deepcopy(frozen)
        reference = SleepingCopy(copied, train, device=CPU, streamed=streamed)
        policy = FrozenCopy(masters.model.eval(), train)
        assert torch.equal(reference.logprobs(batch), policy.logprobs(batch))


def test_the_adapter_switched_off_is_the_copy_without_one(tiny):
    """And the policy's own pass and gradients are what they are without the reference."""
    serve_as(serve_as(tiny, "bfloat16"), "float32")
    groups = sampled_groups(tiny, 1.0)
    base = SleepingCopy(copy.deepcopy(tiny), TrainConfig(), device=CPU)
    model = filled(adapted(tiny, AdapterConfig(kind="lora", rank=4), seed=0))
    off = AdapterOff(model, TrainConfig())
    assert torch.equal(off.logprobs(collate(groups)), base.logprobs(collate(groups)))
    train = TrainConfig(loss=LossConfig(kl="k2", kl_coefficient=0.5))
    found = []
    for reference in (off, base):
        twin = copy.deepcopy(model)
        if reference is off:
            reference = AdapterOff(twin, TrainConfig())  # noqa: PLW2901
        result = train_step(
            MasterWeights(twin.train(), train), groups, RunConfig(name="x", train=train),
            reference=reference,
        )  # fmt: skip
        found.append((result, {n: p.detach() for n, p in twin.named_parameters()}))
    figures = [(r.loss, r.kl, r.grad_norm, r.entropy) for r, _ in found]
    assert figures[0] == figures[1]
    assert found[0][0].kl > 1e-4
    assert all(torch.equal(found[0][1][name], p) for name, p in found[1][1].items())


def test_recorded_values_land_at_their_tokens(tiny):
    groups = sampled_groups(tiny, 1.0)
    whole = SleepingCopy(copy.deepcopy(tiny), TrainConfig(), device=CPU)
    batch = collate(groups)
    values = whole.logprobs(batch).numpy()
    table = {
        (number, place): values[row, : len(groups[number].trajectories[place].tokens_T)]
        for row, (number, place) in enumerate(batch.members_N)
    }
    part = [(1, 2), (2, 0)]
    found = RecordedReference(table).logprobs(collate(groups, part)).numpy()
    for row, member in enumerate(part):
        assert np.array_equal(found[row, : len(table[member])], table[member])
        assert not found[row, len(table[member]) :].any()


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_distillation_moves_toward_the_teacher(tiny, sharp, kl):
    """With the surrogate off, rewards do not matter, and the divergence falls."""
    teacher = SleepingCopy(sharp(copy.deepcopy(tiny), seed=5), TrainConfig(), device=CPU)
    train = TrainConfig(
        optimizer=OptimizerConfig(learning_rate=2e-3),
        schedule=ScheduleConfig(warmup_steps=0),
        loss=LossConfig(kl=kl, kl_coefficient=1.0, policy_coefficient=0.0),
    )
    config = RunConfig(name="x", train=train)
    masters = MasterWeights(tiny, train)
    groups = sampled_groups(tiny.eval(), 1.0)
    divergences = [train_step(masters, groups, config, reference=teacher).kl for _ in range(6)]
    assert divergences[-1] < 0.7 * divergences[0]
