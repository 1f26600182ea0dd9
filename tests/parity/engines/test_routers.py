"""Routers of every family: choices are recorded, and replaced with gates recomputed."""

import families
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltawire.engines.routers import Routers
from deltawire.errors import InputError
from deltawire.parity.router_replay import RouteReplay

ROWS = (2, 5)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("drills") > 1
        names = families.FAMILIES if every else families.QUICK
        metafunc.parametrize("family", [name for name in names if name in CONFIG_MAPPING])


def forward(model):
    ids = torch.arange(ROWS[0] * ROWS[1]).reshape(ROWS) % 60
    return model(input_ids=ids, use_cache=False).logits


def other_choice(routers, seed=0):
    """Two experts for every token and layer, at random: int64[B, S, L, K]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*ROWS, routers.layers, routers.experts, generator=generator)
    return scores.topk(routers.chosen).indices


def told(routers, choices):
    """The recorded choices as int64[B, S, L, K]."""
    return torch.stack([c.reshape(*ROWS, routers.chosen) for c in choices], 2)


def test_every_family_records_its_choices_and_uses_others(family):
    model = families.build(family)
    routers = Routers(model)
    assert (routers.experts, routers.chosen) == (8, 2)
    assert routers.layers >= 1
    with torch.no_grad(), routers.recorded() as choices:
        plain = forward(model)
    own = told(routers, choices)

    again = RouteReplay(routers)
    with torch.no_grad(), again.over(own):
        assert torch.equal(forward(model), plain), "its own choice changes nothing"
    assert not again.flipped_L.any()
    assert again.compared_L.tolist() == [2 * 5 * 2] * routers.layers

    other = other_choice(routers)
    other[1, 3:] = -1
    replay = RouteReplay(routers)
    with replay.over(other), routers.recorded() as choices:
        changed = forward(model)
    taken = told(routers, choices)
    recorded = (other >= 0).all(-1)
    assert torch.equal(taken[recorded], other[recorded])
    assert not torch.equal(changed, plain)
    # The first layer sees what it saw before, so that what is not recorded is its own choice,
    # and the flips are those counted one by one.
    assert torch.equal(taken[..., 0, :][~recorded[..., 0]], own[..., 0, :][~recorded[..., 0]])
    pairs = zip(other[:, :, 0][recorded[..., 0]], own[:, :, 0][recorded[..., 0]], strict=True)
    flips = sum(int(e) not in mine.tolist() for theirs, mine in pairs for e in theirs)
    assert int(replay.flipped_L[0]) == flips > 0

    changed.square().sum().backward()
    for router in routers.by_layer:
        gradients = [p.grad for p in router.module.parameters() if p.grad is not None]
        assert any(bool(g.any()) for g in gradients), "the gates carry gradients"
    with torch.no_grad():
        assert torch.equal(forward(model), plain), "outside the context the router is unchanged"


def naive_gates(family, router, scores, indices):
    """The weights of the taken experts by the family's own formula, from the router's logits."""
    picked = scores.double().gather(1, indices)
    if family == "gpt_oss":
        return picked.softmax(1)
    if family == "deepseek_v3":
        shares = picked.sigmoid()
        return shares / shares.sum(1, keepdim=True) * router.routed_scaling_factor
    shares = scores.double().softmax(1).gather(1, indices)
    return shares if family == "olmoe" else shares / shares.sum(1, keepdim=True)


@pytest.mark.parametrize("formula", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"])
def test_gates_of_replayed_experts_follow_the_familys_formula(formula):
    model = families.build(formula)
    routers = Routers(model)
    router = routers.by_layer[-1].module
    seen = []
    handle = router.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), RouteReplay(routers).over(other_choice(routers)):
        forward(model)
    handle.remove()
    logits, weights, indices = seen[0]
    expected = naive_gates(formula, router, logits, indices)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("other", families.OTHERS)
def test_a_family_that_chooses_in_another_way_is_refused(other):
    with pytest.raises(InputError, match=r"cannot be recorded.*parity\.routes"):
        Routers(families.build(other))


def test_a_model_without_experts_is_refused(tiny):
    with pytest.raises(InputError, match="cannot be recorded"):
        Routers(tiny)


def test_finding_routers_leaves_the_model_unchanged():
    model = families.build("mixtral")
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    Routers(model)
    assert [module.training for module in model.modules()] == before
    assert all("forward" not in vars(module) for module in model.modules())
