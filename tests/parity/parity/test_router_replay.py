"""Expert choices from sampler to trainer: recorded by the engine, packed, replayed."""

import copy

import families
import msgspec
import numpy as np
import pytest
import torch

from deltawire.config import ParityConfig, RunConfig, TrainConfig
from deltawire.engines.base import Sampling
from deltawire.engines.routers import Routers
from deltawire.engines.transformers import TransformersEngine
from deltawire.export.models import serve_as
from deltawire.parity import divergence
from deltawire.parity.router_replay import (
    RouteReplay,
    plausible,
    refilled,
    replay_of,
    route_shape,
    routers_of,
)
from deltawire.parity.routes import pack_routes, unpack_routes
from deltawire.train.batch import collate
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import token_logprobs
from deltawire.train.step import train_step
from deltawire.wire.rollouts import Group, Trajectory

LENGTHS = (3, 9, 5, 1, 7, 4)


def sampled(model, *, slots=3, record=True, lengths=LENGTHS, prompts=(4, 9, 6)):
    """Two completions of every prompt, of all lengths, so that rows move between the slots."""
    engine = TransformersEngine(
        model, stop_tokens=[], slots=slots, capacity=64, seed=1, version=0, record_routes=record
    )
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 60, n).astype(np.int32) for n in prompts]
    done = {}
    for number, length in enumerate(lengths):
        prompt = asked[number % len(asked)]
        engine.submit(
            prompt.tolist(), Sampling(length, 1.0), lambda c, n=number: done.__setitem__(n, c)
        )
    while engine.active:
        engine.step()
    return asked, [done[number] for number in range(len(lengths))]


def grouped(model, **options):
    """The same as groups, their choices packed."""
    asked, completions = sampled(model, **options)
    shape = route_shape(Routers(model))
    groups = []
    for number, prompt in enumerate(asked):
        members = []
        for place, c in enumerate(completions[number :: len(asked)]):
            routes = np.concatenate(c.routes) if c.routes else None
            members.append(
                Trajectory(
                    np.array(c.tokens, np.int32),
                    np.minimum(np.array(c.logprobs, np.float32), 0),
                    np.array(c.versions, np.int32),
                    np.ones(len(c.tokens), np.uint8),
                    float(place),
                    c.finish,
                    routes=b"" if routes is None else pack_routes(routes, experts=shape.experts),
                )
            )
        groups.append(Group("w", "n", "t", 1.0, prompt, members))
    return groups


@pytest.mark.parametrize("family", families.CACHED)
def test_the_engine_records_the_choices_of_every_position(family):
    """Over its cache, in slots that others leave: the choices of one plain forward pass."""
    model = families.build(family)
    routers = Routers(model)
    asked, completions = sampled(model)
    for number, completion in enumerate(completions):
        ids = np.concatenate([asked[number % len(asked)], completion.tokens])[:-1]
        with torch.no_grad(), routers.recorded() as choices:
            model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False)
        found = np.concatenate(completion.routes)
        assert found.shape == (len(ids), routers.layers, routers.chosen)
        for layer in range(routers.layers):
            assert np.array_equal(np.sort(found[:, layer]), np.sort(choices[layer].numpy()))


def test_recording_changes_no_token():
    model = families.build("qwen3_moe")
    (_, told), (_, silent) = sampled(model), sampled(model, record=False)
    assert [c.tokens for c in told] == [c.tokens for c in silent]
    assert [c.logprobs for c in told] == [c.logprobs for c in silent]
    assert all(not c.routes for c in silent)


def test_shared_prompts_use_each_sequences_own_choices():
    """Against one plain forward a trajectory, with choices that no router would have made."""
    model = families.build("qwen3_moe")
    routers, groups = Routers(model), grouped(model)
    shape = route_shape(routers)
    rng = np.random.default_rng(5)
    for group in groups:
        before = rng.permuted(np.tile(np.arange(8), (len(group.prompt), 3, 1)), axis=2)[..., :2]
        for t in group.trajectories:
            after = rng.permuted(np.tile(np.arange(8), (len(t.tokens_T) - 1, 3, 1)), axis=2)
            routes = np.concatenate([before, after[..., :2]]).astype(np.int32)
            object.__setattr__(t, "routes", pack_routes(routes, experts=8))
    batch = collate(groups)
    with torch.no_grad():
        found = token_logprobs(model, batch, RouteReplay(routers))
        silent = token_logprobs(model, batch)
    row = 0
    for group in groups:
        for t in group.trajectories:
            ids = np.concatenate([group.prompt, t.tokens_T])
            routes = unpack_routes(t.routes, shape, positions=len(ids) - 1)
            replay = RouteReplay(routers)
            with torch.no_grad(), replay.over(torch.from_numpy(routes)[None]):
                logits = model(input_ids=torch.from_numpy(ids[:-1]).long()[None]).logits[0]
            places = torch.arange(len(group.prompt) - 1, len(ids) - 1)
            expected = logits.log_softmax(1)[places, torch.from_numpy(t.tokens_T).long()]
            torch.testing.assert_close(found[row, : len(expected)], expected, rtol=0, atol=2e-4)
            row += 1
    assert (found - silent).abs().max() > 0.01


def test_unrecorded_choices_are_the_trainers_own():
    model = families.build("qwen3_moe")
    groups = grouped(model, record=False)
    batch = collate(groups)
    replay = RouteReplay(Routers(model))
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, batch, replay), token_logprobs(model, batch))
    assert not replay.compared_L.any()


def test_damaged_choices_count_as_unrecorded_and_warn():
    model = families.build("qwen3_moe")
    groups, silent = grouped(model), grouped(model)
    last = [t for group in groups for t in group.trajectories][-1]
    object.__setattr__(last, "routes", last.routes[:-1])
    other = [t for group in silent for t in group.trajectories][-1]
    object.__setattr__(other, "routes", b"")
    damaged, missing = RouteReplay(Routers(model)), RouteReplay(Routers(model))
    with torch.no_grad():
        found = token_logprobs(model, collate(groups), damaged)
        assert torch.equal(found, token_logprobs(model, collate(silent), missing))
    assert (damaged.damaged, missing.damaged) == (1, 0)
    config = RunConfig(name="x", parity=ParityConfig(routes="replay"))
    masters = MasterWeights(model.train(), msgspec.structs.replace(config.train, exporter="f32"))
    (warning,) = train_step(masters, groups, config).parity.warnings
    assert str(warning) == "damaged_routes 1 against 0"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_replay_lowers_the_mismatch_of_a_bf16_sampler(family):
    """The same weights, sampled from in bf16 and trained in float32."""
    sizes = {"num_hidden_layers": 4, "num_experts": 16, "num_local_experts": 16}
    model = families.build(family, n_routed_experts=16, **sizes)
    served = serve_as(copy.deepcopy(model), "bfloat16")
    serve_as(serve_as(model, "bfloat16"), "float32")
    groups = grouped(served, slots=16, lengths=(40,) * 12)
    batch = collate(groups)
    found = {}
    for take in (False, True):
        replay = RouteReplay(Routers(model), take=take)
        with torch.no_grad():
            ours = token_logprobs(model, batch, replay)
        found[take] = divergence(ours, batch.sampler_logprobs_NC, batch.loss_mask_NC)
    assert replay.flipped_L.sum() > 0
    assert found[True].k3 < 0.7 * found[False].k3
    assert found[True].mean_gap < found[False].mean_gap
    assert found[True].tokens == 12 * 40


def test_a_training_step_counts_flips_and_uses_choices():
    model = families.build("qwen3_moe")
    groups = grouped(model)
    for mode in ("off", "record", "replay"):
        config = RunConfig(name="x", train=TrainConfig(), parity=ParityConfig(routes=mode))
        masters = MasterWeights(
            copy.deepcopy(model).train(), msgspec.structs.replace(config.train, exporter="f32")
        )
        parity = train_step(masters, groups, config).parity
        assert len(parity.flipped_L) == (0 if mode == "off" else 3)
        assert sum(parity.flipped_L) == 0, "in float32 both sides choose the same"
        assert parity.numeric.k3 < 1e-8
    assert replay_of(model, ParityConfig()) is None
    assert routers_of(model) is routers_of(model)


def naive_filter(scores, own, told, share, bounded):
    """Slot by slot: what is too unlikely goes to the best own choice that is left."""
    worth = {e: s if bounded else np.exp(s) for e, s in enumerate(scores)}
    weakest = min(worth[e] for e in own)
    kept = [e if worth[e] >= share * weakest or e in own else None for e in told]
    spare = sorted((e for e in own if e not in kept), key=lambda e: -worth[e])
    return [spare.pop(0) if e is None else e for e in kept]


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 1.0])
def test_the_plausibility_filter_is_the_naive_one(share, bounded):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(200, 8, generator=generator, dtype=torch.float64) * 2
    scores = scores.softmax(1) if bounded else scores
    own = scores.topk(3, dim=1, sorted=False).indices
    told = torch.rand(200, 8, generator=generator).topk(3, dim=1).indices
    likely = plausible(scores, own, told, share, bounded=bounded)
    found = refilled(scores, own, told, likely).tolist()
    cases = zip(scores.tolist(), own.tolist(), told.tolist(), strict=True)
    assert found == [naive_filter(*case, share, bounded) for case in cases]
    assert all(len(set(row)) == 3 for row in found)
    assert 0 < int((~likely).sum()) < likely.numel()


def test_implausible_experts_are_not_used_in_the_forward():
    model = families.build("qwen3_moe")
    groups = grouped(model)
    for t in (t for group in groups for t in group.trajectories):
        shape = route_shape(Routers(model))
        count = int.from_bytes(t.routes[12:16], "little")
        routes = unpack_routes(t.routes, shape, positions=count)
        object.__setattr__(t, "routes", pack_routes((routes + 3) % 8, experts=8))
    batch = collate(groups)
    strict = RouteReplay(Routers(model), plausible=1.0)
    every = RouteReplay(Routers(model))
    with torch.no_grad():
        own = token_logprobs(model, batch)
        # With the share 1 nothing but an own choice is plausible, and so all of them stand.
        torch.testing.assert_close(token_logprobs(model, batch, strict), own, rtol=0, atol=1e-5)
        assert (token_logprobs(model, batch, every) - own).abs().max() > 0.01
    assert strict.implausible_L.sum() > 0
    assert not every.implausible_L.any()
