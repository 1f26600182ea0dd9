"""Activation checkpointing and minibatches: other memory, or other steps, with exact meanings."""

import copy

import families
import msgspec
import numpy as np
import pytest
import torch
from sampled import sampled_groups

from deltawire.config import (
    LossConfig,
    ParityConfig,
    ParityLimits,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    parse_config,
)
from deltawire.engines.routers import Routers
from deltawire.errors import InputError
from deltawire.parity.router_replay import RouteReplay, route_shape
from deltawire.parity.routes import pack_routes
from deltawire.train import activation_checkpointing
from deltawire.train.batch import collate
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import TrainedPolicy
from deltawire.train.step import train_step
from deltawire.wire.rollouts import Group, Trajectory

POLICIES = ["selective", "full", "offloaded"]


def group(seed, lengths, *, shape=None):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 60, 6).astype(np.int32)
    before = _routes(np.random.default_rng(0), shape, 6) if shape else None
    trajectories = []
    for place, count in enumerate(lengths):
        packed = b""
        if shape:
            routes = np.concatenate([before, _routes(rng, shape, count - 1)])
            packed = pack_routes(routes, experts=shape.experts)
        trajectories.append(
            Trajectory(
                rng.integers(0, 60, count).astype(np.int32),
                -3 * rng.random(count).astype(np.float32),
                np.zeros(count, np.int32),
                np.ones(count, np.uint8),
                float(place % 2),
                "stop",
                routes=packed,
            )
        )
    return Group("w", "n", f"t{seed}", 1.0, prompt, trajectories)


def _routes(rng, shape, positions):
    every = np.tile(np.arange(shape.experts), (positions, shape.layers, 1))
    return rng.permuted(every, axis=2)[..., : shape.chosen].astype(np.int32)


def gradients(model, batch, policy, *, packing, replayed):
    replay = RouteReplay(Routers(model)) if replayed else None
    trained = TrainedPolicy(model, packing=packing, checkpointing=policy, entropy_gradient=True)
    with trained.terms(batch, replay) as terms:
        (terms.logprobs.sum() + terms.entropies.sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    counts = (replay.flipped_L.tolist(), replay.compared_L.tolist()) if replay else None
    return found, counts, terms.logprobs.detach()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "gpt_oss"])
def test_gradients_are_those_without_to_the_bit(family, policy):
    """Recorded experts hold in the layers that are computed again, and are counted once."""
    model = families.build(family)
    routed = family not in {"qwen3", "gemma2"}
    shape = route_shape(Routers(model)) if routed else None
    batch = collate([group(1, [5, 9, 2], shape=shape), group(2, [4, 4], shape=shape)])
    for packing in (True, False):
        options = {"packing": packing, "replayed": routed}
        expected = gradients(model, batch, "none", **options)
        found = gradients(model, batch, policy, **options)
        assert found[1] == expected[1]
        assert torch.equal(found[2], expected[2])
        assert found[0].keys() == expected[0].keys()
        for name, gradient in expected[0].items():
            assert torch.equal(found[0][name], gradient), name


def kept_bytes(model, batch, policy):
    """The tensors that autograd keeps between the passes, other than parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        TrainedPolicy(model, checkpointing=policy).terms(batch),
    ):
        return sum(kept.values())


def test_each_policy_keeps_less_than_the_one_before(tiny):
    batch = collate([group(1, [40, 30, 20])])
    none, full = (kept_bytes(tiny, batch, policy) for policy in ("none", "full"))
    assert full < 0.3 * none


def test_offloaded_inputs_pass_the_hooks_for_host_memory(tiny, monkeypatch):
    seen = []

    class Counting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, *, pin_memory):
            assert not pin_memory, "nothing is pinned on a CPU"
            super().__init__(lambda tensor: seen.append(tensor.shape) or tensor, lambda x: x)

    monkeypatch.setattr(activation_checkpointing, "save_on_cpu", Counting)
    batch = collate([group(1, [4, 4])])
    with TrainedPolicy(tiny, checkpointing="offloaded").terms(batch):
        pass
    hidden = [shape for shape in seen if len(shape) == 3 and shape[2] == tiny.config.hidden_size]
    assert len(hidden) == tiny.config.num_hidden_layers


def test_a_model_without_layers_is_refused_by_name(tiny):
    class Bare(torch.nn.Module):
        def get_decoder(self):
            return self

    with (
        pytest.raises(InputError, match="Bare does not expose its decoder layers"),
        activation_checkpointing.checkpointed(Bare(), "full"),
    ):
        pass


def stepped(model, groups, *, steps=1, parity=None, **train):
    config = RunConfig(
        name="x",
        train=TrainConfig(schedule=ScheduleConfig(warmup_steps=0), **train),
        parity=parity or ParityConfig(),
    )
    settings = msgspec.structs.replace(config.train, exporter="f32")
    masters = MasterWeights(copy.deepcopy(model), settings)
    results = [train_step(masters, groups, config, version=n) for n in range(steps)]
    return masters, results


def bits(masters):
    state = masters.state()
    return b"".join(state[name].numpy().tobytes() for name in sorted(state))


def test_minibatches_are_steps_on_shares_of_the_groups(tiny):
    """With the sampler as the base nothing else depends on the first step: by hand, to the bit."""
    groups = [group(n, [5, 3, 7, 2]) for n in range(5)]
    masters, (result,) = stepped(tiny, groups, minibatches=2)
    by_hand = MasterWeights(
        copy.deepcopy(tiny), TrainConfig(exporter="f32", schedule=ScheduleConfig(warmup_steps=0))
    )
    config = RunConfig(name="x", train=TrainConfig(schedule=ScheduleConfig(warmup_steps=0)))
    parts = [train_step(by_hand, share, config, version=0) for share in (groups[:3], groups[3:])]
    assert bits(masters) == bits(by_hand)
    assert masters.steps == 2
    assert result.tokens == sum(part.tokens for part in parts)
    assert result.loss == pytest.approx(sum(part.loss for part in parts) / 2)
    assert result.members == [(n, place) for n in range(5) for place in range(4)]
    again, _ = stepped(tiny, groups, minibatches=2)
    assert bits(again) == bits(masters)


def test_old_is_the_policy_before_the_first_minibatch(tiny):
    """The second of two equal halves has moved: its ratio to the old policy is bounded."""
    one = group(3, [6, 6, 6, 6])
    loss = LossConfig(ratio_base="old", clip_low=1e-6, clip_high=1e-6)
    optimizer = {"learning_rate": 1e-2}
    config = parse_config({"name": "x", "train": {"optimizer": optimizer}}, source="s")
    halves = {"optimizer": config.train.optimizer, "loss": loss, "max_staleness": 1}
    _, (twice,) = stepped(tiny, [one, one], minibatches=2, **halves)
    _, (once,) = stepped(tiny, [one, one], minibatches=1, **halves)
    assert once.clipped == 0, "the only step of a batch has the ratio 1"
    assert twice.clipped > 0.1


def test_parity_is_judged_before_the_first_minibatch(tiny):
    groups = sampled_groups(tiny, 1.0)
    for t in (t for one in groups for t in one.trajectories):
        object.__setattr__(t, "reward", float(len(t.tokens_T) % 2))
        t.versions_T[:] = 7
    _, (fine,) = stepped(tiny, groups, minibatches=3)
    assert fine.parity.drift.k3 < 1e-8, "later steps do not count as a difference"
    groups[2].trajectories[0].logprobs_T[0] -= 3
    stop = ParityConfig(stop=ParityLimits(largest_gap=1.0, drift_largest_gap=1.0))
    masters, (stopped,) = stepped(tiny, groups, minibatches=3, parity=stop)
    assert stopped.parity.stopped
    assert masters.steps == 0
    for name, parameter in tiny.named_parameters():
        assert torch.equal(masters.source.tensors()[name], parameter)


def test_the_version_tells_which_tokens_are_numeric(tiny):
    """Steps count minibatches, versions do not."""
    groups = sampled_groups(tiny, 1.0)
    _, results = stepped(tiny, groups, steps=2, minibatches=2)
    assert [result.parity.numeric.tokens for result in results] == [0, 0]
    for t in (t for one in groups for t in one.trajectories):
        t.versions_T[:] = 1
    _, results = stepped(tiny, groups, steps=2, minibatches=2)
    assert [result.parity.numeric.tokens for result in results] == [0, results[1].tokens]


def test_more_minibatches_than_groups_are_refused():
    with pytest.raises(InputError, match="4 groups cannot fill 9 minibatches"):
        parse_config({"name": "x", "train": {"minibatches": 9, "groups_per_step": 4}}, source="s")


def test_entropy_is_that_of_the_sampled_distributions(tiny):
    groups = [group(4, [5, 2])]
    _, (result,) = stepped(tiny, groups)
    entropies = []
    for t in groups[0].trajectories:
        ids = torch.tensor(np.concatenate([groups[0].prompt, t.tokens_T]))[None].long()
        with torch.no_grad():
            logps = tiny(input_ids=ids).logits[0, 5:-1].log_softmax(-1)
        entropies.append(-(logps.exp() * logps).sum(-1))
    assert result.entropy == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
