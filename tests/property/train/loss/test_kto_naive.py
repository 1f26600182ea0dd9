"""KTO against a loop over Python's own floats, its gradient, and what its formula promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config import KtoConfig, LossConfig
from deltawire.errors import InputError
from deltawire.train.loss import LossInputs, Totals, policy_loss

LOSS = {"surrogate": "kto", "advantage": "given", "aggregation": "seq_mean_token_mean"}
kto_settings = st.builds(
    KtoConfig,
    beta=st.floats(0.01, 2.0),
    desirable_weight=st.floats(0, 3.0, width=32),
    undesirable_weight=st.floats(0, 3.0, width=32),
)


@st.composite
def answers(draw):
    """Policy and reference log-probabilities and a mask (float64[N, C]), the sequence of each row,
    and the given value of each sequence, which all its rows state (float64[N])."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))

    def table(values):
        cells = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(
            draw(st.lists(cells, min_size=rows, max_size=rows)), dtype=torch.float64
        )

    numbers = draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
    order = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    values = st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0])
    given_S = draw(st.lists(values, min_size=len(order), max_size=len(order)))
    sequences_N = torch.tensor([order[number] for number in numbers])
    ours = table(st.floats(-8, 0, width=32))
    reference = ours + table(st.floats(-2, 2, width=32))
    mask = table(st.sampled_from([0.0, 1.0]))
    return ours, reference, mask, sequences_N, torch.tensor(given_S).double()[sequences_N]


def loss_of(batch, kto, point, *, rows=slice(None), total=None):
    """The loss of some rows of a batch, with the denominators of all of them."""
    ours, reference, mask, numbers, values = (part[rows] for part in batch)
    order = {number: place for place, number in enumerate(dict.fromkeys(numbers.tolist()))}
    inputs = LossInputs(
        ours, ours.detach() - 0.3, values, mask,
        torch.tensor([order[number] for number in numbers.tolist()]),
        reference_NC=reference, reference_point=point,
    )  # fmt: skip
    count = total or len(order)
    totals = Totals(tokens=max(1.0, float(mask.sum())), sequences=count, horizon=9)
    return policy_loss(LossConfig(**LOSS, kto=kto), inputs, totals).loss


def naive(batch, kto, point):
    """The loss, and its derivative by the log-probability of any token of each sequence."""
    ours, reference, mask, numbers, values = (part.tolist() for part in batch)
    sequences = sorted(set(numbers))
    loss, slopes = 0.0, {}
    for number in sequences:
        rows = [n for n, one in enumerate(numbers) if one == number]
        places = [(n, c) for n in rows for c in range(len(mask[n])) if mask[n][c]]
        moved = kto.beta * (math.fsum(ours[n][c] - reference[n][c] for n, c in places) - point)
        value, weight, sign = values[rows[0]], 0.0, 1.0
        if value > 0:
            weight = kto.desirable_weight * value
        elif value < 0:
            weight, sign = -kto.undesirable_weight * value, -1.0
        sigma = 1 / (1 + math.exp(-sign * moved))
        share = (1.0 if places else 0.0) / len(sequences)
        loss += share * weight * (1 - sigma)
        slopes[number] = -share * weight * sign * kto.beta * sigma * (1 - sigma)
    return loss, slopes


@settings(deadline=None, max_examples=150)
@given(batch=answers(), kto=kto_settings, point=st.floats(0, 4, width=32))
def test_the_loss_and_its_gradient_are_the_naive_ones(batch, kto, point):
    ours, *rest = batch
    leaf = ours.clone().requires_grad_()
    found = loss_of((leaf, *rest), kto, point)
    found.backward()
    loss, slopes = naive(batch, kto, point)
    assert found.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    _, mask, numbers, _ = rest
    for n, number in enumerate(numbers.tolist()):
        for c in range(ours.shape[1]):
            wanted = slopes[number] if mask[n, c] else 0.0
            assert leaf.grad[n, c].item() == pytest.approx(wanted, rel=1e-8, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(batch=answers(), kto=kto_settings, point=st.floats(0, 4, width=32))
def test_parts_of_a_step_add_up(batch, kto, point):
    numbers = batch[3]
    count = len(set(numbers.tolist()))
    parts = [
        loss_of(batch, kto, point, rows=numbers == number, total=count).item()
        for number in range(count)
    ]
    assert math.fsum(parts) == pytest.approx(loss_of(batch, kto, point).item(), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(batch=answers(), kto=kto_settings, point=st.floats(0, 4, width=32))
def test_a_good_answer_is_raised_and_a_bad_one_is_lowered_by_its_own_tokens(batch, kto, point):
    ours, *rest = batch
    leaf = ours.clone().requires_grad_()
    loss_of((leaf, *rest), kto, point).backward()
    _, mask, _, values = rest
    drawn = leaf.grad[mask == 1]
    signs = values[:, None].expand_as(mask)[mask == 1].sign()
    assert ((drawn == 0) | (drawn.sign() == -signs)).all()
    assert not leaf.grad[mask == 0].any()


@settings(deadline=None, max_examples=60)
@given(
    moved=st.floats(-30, 30),
    point=st.floats(0, 5),
    beta=st.floats(0.01, 2),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_the_value_of_an_answer_is_bounded_and_saturates(moved, point, beta, sign):
    """Far from the reference, in the wanted direction, nothing is left to gain."""
    leaf = torch.tensor([[moved]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    batch = (leaf, zero, one, torch.zeros(1).long(), torch.tensor([sign]).double())
    loss = loss_of(batch, KtoConfig(beta=beta), point)
    loss.backward()
    assert 0 <= loss.item() <= 1
    assert abs(leaf.grad.item()) <= beta / 4 + 1e-12
    more = (leaf + sign, zero, one, *batch[3:])
    assert loss_of(more, KtoConfig(beta=beta), point).item() <= loss.item() + 1e-12


def test_long_answers_neither_overflow_nor_lose_their_gradient():
    ours = torch.full((2, 4000), -9.0, requires_grad=True)
    reference = torch.zeros(2, 4000)
    batch = (ours, reference, torch.ones(2, 4000), torch.arange(2), torch.tensor([1.0, -1.0]))
    loss = loss_of(batch, KtoConfig(), 0.0)
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(ours.grad).all()


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("reference_NC", "surrogate = kto needs the log-probabilities of a reference"),
        ("reference_point", "needs the mean distance to the reference"),
    ],
)
def test_a_loss_without_its_reference_is_refused(left_out, message):
    given_ = {"reference_NC": torch.zeros(1, 1), "reference_point": 0.0} | {left_out: None}
    one = torch.ones(1, 1)
    inputs = LossInputs(-one, -one, torch.ones(1), one, torch.zeros(1).long(), **given_)
    with pytest.raises(InputError, match=message):
        policy_loss(LossConfig(**LOSS), inputs, Totals(tokens=1.0, sequences=1, horizon=1))
