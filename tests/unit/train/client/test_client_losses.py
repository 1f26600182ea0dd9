"""Losses of the training client, against sums written out token by token."""

import math

import pytest
import torch

from deltawire.errors import InputError
from deltawire.train.client.losses import LOSSES, check_inputs, check_loss

LOW, HIGH = 0.8, 1.2


def clip(value, low, high):
    return min(max(value, low), high)


def by_hand(name, x, q, a, w, low, high, beta=0.05):
    """The formulas of the module, with Python's floats."""
    total = 0.0
    gap = sum(xi - qi for xi, qi, wi in zip(x, q, w, strict=True) if wi) / max(
        1, sum(bool(wi) for wi in w)
    )
    for xi, qi, ai, wi in zip(x, q, a, w, strict=True):
        r = math.exp(xi - qi)
        if name == "cross_entropy":
            gain = xi
        elif name == "importance_sampling":
            gain = r * ai
        elif name == "ppo":
            gain = min(r * ai, clip(r, low, high) * ai)
        elif name == "cispo":
            gain = clip(r, low, high) * ai * xi
        elif name == "dro":
            gain = xi * ai - beta / 2 * (xi - qi) ** 2
        else:
            s = math.exp(gap)
            gain = min(s * ai, clip(s, low, high) * ai)
        total -= wi * gain
    return total


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(3))
def test_each_loss_is_its_formula(name, seed):
    generator = torch.Generator().manual_seed(seed)
    x = -torch.rand(9, generator=generator) * 3
    q = x + torch.randn(9, generator=generator) * 0.4
    a = torch.randn(9, generator=generator)
    w = (torch.rand(9, generator=generator) > 0.3).float()
    inputs = {"logprobs": q, "advantages": a, "weights": w}
    if name == "cross_entropy":
        inputs = {"weights": w}
    found = float(LOSSES[name](x, inputs, {}))
    hand = by_hand(name, x.tolist(), q.tolist(), a.tolist(), w.tolist(), LOW, HIGH)
    assert found == pytest.approx(hand, rel=1e-5, abs=1e-5)


def test_the_slope_of_cispo_and_importance_sampling_differ_only_by_the_bound():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1.0, -3.0]), "advantages": torch.tensor([1.0, 1.0])}
    LOSSES["cispo"](x, inputs, {}).backward()
    assert x.grad.tolist() == pytest.approx([-1.0, -1.2])
    x.grad = None
    LOSSES["importance_sampling"](x, inputs, {}).backward()
    assert x.grad.tolist() == pytest.approx([-1.0, -math.e])


def test_bounds_come_from_the_settings_or_the_datum():
    x, q = torch.tensor([0.0]), torch.tensor([-1.0])
    inputs = {"logprobs": q, "advantages": torch.ones(1)}
    assert float(LOSSES["ppo"](x, inputs, {"clip_high_threshold": 2.0})) == -2.0
    inputs["clip_high_threshold"] = torch.tensor([1.5])
    assert float(LOSSES["ppo"](x, inputs, {"clip_high_threshold": 2.0})) == -1.5


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("stable_reinforce", {}, "unknown loss"),
        ("ppo", {"beta": 1.0}, "no setting 'beta'"),
        ("dro", {"beta": "x"}, "not a number"),
    ],
)
def test_a_loss_that_cannot_be_honored_is_refused(name, settings, text):
    with pytest.raises(InputError, match=text):
        check_loss(name, settings)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "no 'target_tokens'"),
        ({"target_tokens": torch.ones(2).long()}, "no 'logprobs'"),
        ({"logprobs": torch.ones(3)}, "shape"),
        ({"logprobs": torch.tensor([1.0, math.nan])}, "not finite"),
        ({"rewards": torch.ones(2)}, "does not use"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs, text):
    whole = {
        "target_tokens": torch.ones(2).long(),
        "logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
    }
    if "no '" in text:
        whole = inputs
    with pytest.raises(InputError, match=text):
        check_inputs("ppo", whole | inputs)
