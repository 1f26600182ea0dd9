"""Masters and rounded weights, and the step that moves them: to the bit."""

import copy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from deltawire.config import (
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from deltawire.errors import CorruptError, InputError
from deltawire.export.source import bits_of, digest_of
from deltawire.sync.follow.mirror import Mirror
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import SleepingCopy
from deltawire.train.step import train_step
from deltawire.train.stopping import StepAbandonedError
from deltawire.wire.rollouts import Group, Trajectory

CONFIG = TrainConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5),
    schedule=ScheduleConfig(warmup_steps=3),
)


def gradients(model, seed, scale=1.0):
    """Give every parameter a gradient that follows from the seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def representable(model):
    return all(torch.equal(p, p.to(torch.bfloat16).float()) for p in model.parameters())


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_parameters_are_always_what_is_published(tiny):
    origin = bits(tiny)
    masters = MasterWeights(tiny, CONFIG)
    assert not equal(bits(tiny), origin)
    for seed in range(5):
        assert representable(tiny)
        published = masters.source.tensors()
        assert all(tensor.dtype == torch.bfloat16 for tensor in published.values())
        assert equal({name: t.float() for name, t in published.items()}, bits(tiny))
        gradients(tiny, seed)
        masters.step()


def test_a_step_is_adamw_on_the_masters(tiny):
    """The twin keeps its own float32 copies and asks torch's functions by hand."""
    masters = MasterWeights(tiny, CONFIG)
    twin = copy.deepcopy(tiny)
    weights = [p.detach().clone().requires_grad_() for p in masters._masters.values()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.01},
            {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(CONFIG.optimizer.beta1, CONFIG.optimizer.beta2),
    )
    for step in range(6):
        gradients(tiny, step, scale=10.0 if step == 2 else 0.001)
        norm = float(torch.cat([p.grad.flatten() for p in tiny.parameters()]).double().norm())
        factor = min(1.0, 0.5 / norm)
        for weight, parameter in zip(weights, tiny.parameters(), strict=True):
            weight.grad = parameter.grad * factor
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 3)
        optimizer.step()
        assert masters.step() == pytest.approx(norm, rel=1e-4)
        assert all(p.grad is None for p in tiny.parameters())
    for weight, master, parameter in zip(
        weights, masters._masters.values(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(master, weight.detach(), rtol=1e-5, atol=1e-7)
        assert not torch.equal(master, parameter)


def test_small_steps_add_up_until_they_move_a_bit():
    """One step is far below half a unit in the last place of bf16; a hundred are not."""
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    config = TrainConfig(
        optimizer=OptimizerConfig(learning_rate=1e-4), schedule=ScheduleConfig(warmup_steps=0)
    )
    masters = MasterWeights(model, config)
    moved = []
    for _ in range(100):
        model.weight.grad = torch.ones(4, 4)
        masters.step()
        moved.append(bool((model.weight != 1).any()))
    assert not any(moved[:15])
    assert all(moved[45:])
    assert float(model.weight.detach()[0, 0]) == pytest.approx(1 - 100e-4, abs=2**-8)


def test_tied_weights_have_one_master(tiny):
    masters = MasterWeights(tiny, CONFIG)
    gradients(tiny, 0)
    masters.step()
    assert tiny.lm_head.weight is tiny.model.embed_tokens.weight
    assert "lm_head.weight" not in masters.source.tensors()


def test_masters_may_be_published_whole(tiny):
    origin = bits(tiny)
    masters = MasterWeights(tiny, msgspec.structs.replace(CONFIG, exporter="f32"))
    assert equal(bits(tiny), origin)
    assert equal(masters.source.tensors(), origin)


def test_masters_may_be_published_in_float16(tiny):
    """Masters begin where float16 rounds to the published bits, and follow an update at once."""
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.copy_(parameter.half())
    origin = bits(tiny)
    masters = MasterWeights(tiny, msgspec.structs.replace(CONFIG, exporter="f16"))
    masters.dither()
    masters.remember(since=0)
    published = masters.source.tensors()
    for name, values in origin.items():
        assert published[name].dtype == torch.float16
        assert torch.equal(published[name], values.half())
        assert torch.equal(bits(tiny)[name], values), "computed with what is sent"
    kept = masters.state()
    assert any(not torch.equal(kept[f"master/{name}"], origin[name]) for name in origin)
    gradients(tiny, 0)
    masters.step()
    assert masters.served_share().share == pytest.approx(1, abs=0.1)


def test_values_that_float16_cannot_hold_are_refused_by_name(tiny):
    masters = MasterWeights(tiny, msgspec.structs.replace(CONFIG, exporter="f16"))
    with torch.no_grad():
        masters.state()["master/model.norm.weight"][3] = 65_519.0
        masters._round()
    masters.source.tensors()
    with torch.no_grad():
        masters.state()["master/model.norm.weight"][3] = 65_520.0
        masters._round()
    for published in (masters.source.tensors, masters.source.trained):
        with pytest.raises(
            InputError,
            match=r"model\.norm\.weight has a value that is beyond 65,504",
        ):
            published()
    with pytest.raises(
        InputError,
        match=r"model\.norm\.weight has a value that is beyond 65,504",
    ):
        masters.source.shards(0)


def saved(masters):
    return {name: tensor.clone() for name, tensor in masters.state().items()}


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_restored_copy_continues_to_the_same_bits(tiny, steps):
    masters = MasterWeights(tiny, CONFIG)
    for step in range(steps):
        gradients(tiny, step)
        masters.step()
    state = saved(masters)
    other = copy.deepcopy(tiny)
    twin = MasterWeights(other, CONFIG)
    twin.restore(state)
    assert equal(saved(twin), state)
    for step in range(steps, steps + 4):
        for model, of in ((tiny, masters), (other, twin)):
            gradients(model, step)
            of.step()
        assert equal(bits(tiny), bits(other))
    assert equal(saved(twin), saved(masters))


def test_a_restored_state_is_its_own(tiny):
    """Steps after `restore` do not write into the tensors it was given."""
    masters = MasterWeights(tiny, CONFIG)
    gradients(tiny, 0)
    masters.step()
    state = saved(masters)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    twin = MasterWeights(copy.deepcopy(tiny), CONFIG)
    twin.restore(state)
    gradients(twin.model, 1)
    twin.step()
    assert equal(state, kept)


@pytest.mark.parametrize("fault", ["missing", "shape", "steps"])
def test_another_models_state_is_refused(tiny, fault):
    masters = MasterWeights(tiny, CONFIG)
    state = saved(masters)
    if fault == "missing":
        del state["master/model.norm.weight"]
    elif fault == "shape":
        state["master/model.norm.weight"] = torch.zeros(7)
    else:
        del state["steps"]
    with pytest.raises(CorruptError):
        masters.restore(state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gradients_that_are_not_finite_change_nothing(tiny, value):
    masters = MasterWeights(tiny, CONFIG)
    gradients(tiny, 0)
    masters.step()
    before, weights = saved(masters), bits(tiny)
    gradients(tiny, 1)
    next(iter(tiny.parameters())).grad[0, 0] = value
    assert not np.isfinite(masters.step())
    after = saved(masters)
    assert (int(before.pop("steps")), int(after.pop("steps"))) == (1, 2)
    assert equal(before, after)
    assert equal(bits(tiny), weights)
    assert all(p.grad is None for p in tiny.parameters())


def sampled(seed, prompts=(3, 9, 5, 6)):
    rng = np.random.default_rng(seed)

    def trajectory():
        length = int(rng.integers(1, 9))
        return Trajectory(
            rng.integers(0, 256, length).astype(np.int32),
            (-5 - rng.random(length)).astype(np.float32),
            np.zeros(length, np.int32),
            np.ones(length, np.uint8),
            float(rng.integers(0, 2)),
            "stop",
        )

    return [
        Group("w", "n", "t", 1.0, rng.integers(0, 256, n).astype(np.int32), members)
        for n in prompts
        for members in [[trajectory() for _ in range(4)]]
    ]


def stepped(model, micro, steps=3):
    config = RunConfig(
        name="test",
        rollout=RolloutConfig(group_size=4),
        train=TrainConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3),
            schedule=ScheduleConfig(warmup_steps=0),
            max_tokens_per_batch=micro,
        ),
    )
    model = copy.deepcopy(model).train()
    masters = MasterWeights(model, config.train)
    results = [train_step(masters, sampled(seed), config) for seed in range(steps)]
    return masters, results


def test_the_same_groups_give_the_same_bits(tiny):
    (first, ours), (second, theirs) = stepped(tiny, 4096), stepped(tiny, 4096)
    assert ours == theirs
    assert equal(saved(first), saved(second))
    assert equal(bits(first.model), bits(second.model))
    assert len({result.loss for result in ours}) == 3


@pytest.mark.parametrize("micro", [1, 40])
def test_micro_batches_are_one_batch(tiny, micro):
    """Their losses and gradients add up to the whole batch's; the odd last one included."""
    (whole, ours), (parts, theirs) = stepped(tiny, 4096, steps=1), stepped(tiny, micro, steps=1)
    (one,), (many,) = ours, theirs
    assert many.tokens == one.tokens
    assert many.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert many.reward_mean == one.reward_mean
    assert many.clipped == pytest.approx(one.clipped, abs=1e-6)
    assert many.parity.drift.k3 == pytest.approx(one.parity.drift.k3, rel=1e-4)
    for name, moment in saved(whole).items():
        if name.startswith("adam/exp_avg/"):
            scale = float(moment.abs().max())
            torch.testing.assert_close(saved(parts)[name], moment, atol=1e-4 * scale, rtol=1e-3)


def test_a_step_raises_what_was_rewarded(tiny):
    groups = sampled(7)
    config = RunConfig(
        name="test",
        train=TrainConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2), schedule=ScheduleConfig(warmup_steps=0)
        ),
    )
    masters = MasterWeights(tiny, config.train)
    results = [train_step(masters, groups, config) for _ in range(4)]
    assert results[-1].loss < results[0].loss
    assert results[0].reward_mean == pytest.approx(
        np.mean([t.reward for group in groups for t in group.trajectories])
    )
    assert results[0].tokens == sum(group.tokens for group in groups)


@pytest.mark.parametrize(("minibatches", "after"), [(1, 0), (1, 4), (2, 4)])
def test_a_step_that_is_abandoned_changes_no_master(tiny, minibatches, after):
    """``after`` is the number of micro-batches before the process is asked to stop. Two minibatches
    compute the log-probabilities of all before the first optimizer step."""
    train = TrainConfig(
        schedule=ScheduleConfig(warmup_steps=0), max_tokens_per_batch=1, minibatches=minibatches
    )
    masters, groups = MasterWeights(tiny, train), sampled(3)
    before, asked = saved(masters), iter(range(100))
    with pytest.raises(StepAbandonedError):
        train_step(
            masters,
            groups,
            RunConfig(name="t", train=train),
            stopping=lambda: next(asked) >= after,
        )
    assert next(asked) == after + 1
    assert equal(saved(masters), before)


def test_a_step_is_completed_once_an_optimizer_step_was_taken(tiny):
    train = TrainConfig(schedule=ScheduleConfig(warmup_steps=0), minibatches=2)
    masters = MasterWeights(tiny, train)
    config = RunConfig(name="t", train=train)
    train_step(masters, sampled(3), config, stopping=lambda: masters.steps > 0)
    assert masters.steps == 2


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "dr_grpo"])
@pytest.mark.parametrize("surrogate", ["gspo", "cispo", "dppo"])
def test_any_loss_is_the_same_over_micro_batches(tiny, aggregation, surrogate):
    found = []
    for micro in (1, 4096):
        loss = LossConfig(aggregation=aggregation, surrogate=surrogate)
        train = TrainConfig(
            schedule=ScheduleConfig(warmup_steps=0), max_tokens_per_batch=micro, loss=loss
        )
        masters = MasterWeights(copy.deepcopy(tiny), train)
        found.append(train_step(masters, sampled(3), RunConfig(name="t", train=train)))
    many, one = found
    assert many.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
    assert many.members == one.members


def test_segments_and_failures_in_a_step(tiny):
    """Tensors that are left out change nothing: neither the weights nor a figure."""
    groups = sampled(5)
    failed = replace(groups[0].trajectories[1], cause="timeout", reward=50.0)
    broken = replace(groups[0], trajectories=[*groups[0].trajectories, failed])
    config = RunConfig(name="test", train=TrainConfig(schedule=ScheduleConfig(warmup_steps=0)))
    results = []
    for batch in ([groups[0], *groups[1:]], [broken, *groups[1:]]):
        masters = MasterWeights(copy.deepcopy(tiny), config.train)
        results.append((train_step(masters, batch, config), bits(masters.model)))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_penalty_is_against_the_reference(tiny, kind):
    train = TrainConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=0),
        loss=LossConfig(kl=kind, kl_coefficient=0.1),
    )
    config = RunConfig(name="test", train=train)
    masters = MasterWeights(tiny, train)
    reference = SleepingCopy(copy.deepcopy(tiny), train, device=torch.device("cpu"))
    results = [train_step(masters, sampled(s), config, reference=reference) for s in range(3)]
    assert results[0].kl == pytest.approx(0, abs=1e-6)
    assert abs(results[2].kl) > 1e-4
    with pytest.raises(InputError, match="reference"):
        train_step(masters, sampled(0), config)


def of_version_0(masters):
    """A mirror of what the masters publish now."""
    return Mirror(bits_of(masters.source), 0, digest_of(masters.source))


@pytest.mark.parametrize("start", ["dithered", "published"])
def test_a_new_start_keeps_version_0(tiny, start):
    config = msgspec.structs.replace(CONFIG, masters=start)
    masters = MasterWeights(tiny, config, seed=5)
    mirror = of_version_0(masters)
    published = bits(tiny)
    masters.reset(mirror)
    assert equal(bits(tiny), published)
    assert masters.digest() == mirror.digest
    moved = [
        (master != parameter).float().mean().item()
        for master, parameter in zip(masters._masters.values(), tiny.parameters(), strict=True)
    ]
    assert min(moved) > 0.9 if start == "dithered" else max(moved) == 0
    before = {name: one.clone() for name, one in masters.state().items()}
    gradients(tiny, 1)
    masters.step()
    masters.reset(mirror)
    assert equal(masters.state(), before)


def test_small_updates_reach_the_published_weights(tiny):
    """The change of the published weights, projected on that of the masters."""
    share = {}
    for start in ("dithered", "published"):
        masters = MasterWeights(copy.deepcopy(tiny), msgspec.structs.replace(CONFIG, masters=start))
        masters.reset(of_version_0(masters))
        before = {name: one.clone() for name, one in masters._masters.items()}
        published = bits(masters.model)
        generator = torch.Generator().manual_seed(0)
        for master in masters._masters.values():
            master.add_(torch.randn(master.shape, generator=generator), alpha=1e-5)
        masters._round()
        both = [
            ((masters._masters[name] - before[name]).double(), (one - published[name]).double())
            for name, one in bits(masters.model).items()
        ]
        share[start] = float(
            sum((m * s).sum() for m, s in both) / sum((m * m).sum() for m, _ in both)
        )
    assert share["dithered"] == pytest.approx(1, abs=0.15)
    assert share["published"] < 0.5
