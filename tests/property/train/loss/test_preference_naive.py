"""The losses of pairs against loops over Python's own floats, and their gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config import PreferenceConfig
from deltawire.errors import InputError
from deltawire.train.loss.aggregation import Totals
from deltawire.train.loss.preference import PairInputs, preference_loss

KINDS = ["dpo", "dpo_norm", "ipo", "simpo", "supervised"]
TOTALS = Totals(tokens=1.0, sequences=7, horizon=1)


@st.composite
def pairs(draw):
    """Some answers, served and better ones of any length in any order, and some without a pair."""
    count, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = [(n, "served") for n in range(count)]
    rows += [(n, "better") for n in range(count) if n == 0 or draw(st.booleans())]
    rows = draw(st.permutations(rows))
    lengths = [draw(st.integers(1, columns)) for _ in rows]
    values = st.floats(-6, 0, width=32)

    def table():
        cells = st.lists(values, min_size=columns, max_size=columns)
        found = draw(st.lists(cells, min_size=len(rows), max_size=len(rows)))
        return torch.tensor(found, dtype=torch.float64)

    mask = torch.tensor([[float(c < length) for c in range(columns)] for length in lengths])
    better = torch.tensor([float(side == "better") for _, side in rows])
    weights = torch.tensor([draw(st.floats(0, 1, width=32)) for _ in rows]) * better
    return PairInputs(
        table(), mask.double() * (1 - better[:, None]), mask.double() * better[:, None],
        weights.double(), torch.tensor([n for n, _ in rows]), table(),
    )  # fmt: skip


def naive(config, found, logprobs):
    """The loss, from lists of numbers."""
    total = 0.0
    for row, weight in enumerate(found.weights_N.tolist()):
        number = found.sequences_N.tolist()[row]
        if not found.better_NC[row].any():
            continue
        other = next(
            n
            for n, one in enumerate(found.sequences_N.tolist())
            if one == number and found.served_NC[n].any()
        )
        w, served = (
            [(logprobs[n][c], found.reference_NC.tolist()[n][c]) for c in range(len(logprobs[n]))
             if mask[n][c]]
            for n, mask in ((row, found.better_NC.tolist()), (other, found.served_NC.tolist()))
        )  # fmt: skip
        beta = config.beta
        if config.kind == "dpo":
            h = beta * (sum(a - r for a, r in w) - sum(a - r for a, r in served))
            value = math.log1p(math.exp(-h))
        elif config.kind == "supervised":
            value = -sum(a for a, _ in w) / len(w)
        elif config.kind == "simpo":
            h = sum(a for a, _ in w) / len(w) - sum(a for a, _ in served) / len(served)
            value = math.log1p(math.exp(-beta * h + config.margin))
        else:
            h = sum(a - r for a, r in w) / len(w) - sum(a - r for a, r in served) / len(served)
            squared = (h - 1 / (2 * beta)) ** 2
            value = squared if config.kind == "ipo" else math.log1p(math.exp(-beta * h))
        total += weight * value
    return config.coefficient * total / TOTALS.sequences


def config_of(kind, beta, margin):
    given_ = {"margin": margin} if kind == "simpo" else {}
    return PreferenceConfig(kind=kind, coefficient=1.5, beta=beta, **given_)


@settings(deadline=None, max_examples=40)
@given(
    found=pairs(),
    kind=st.sampled_from(KINDS),
    beta=st.floats(0.05, 2),
    margin=st.floats(0, 2),
)
def test_the_loss_is_the_naive_one_and_its_gradient_its_slope(found, kind, beta, margin):
    config = config_of(kind, beta, margin)
    leaf = found.logprobs_NC.clone().requires_grad_()
    loss = preference_loss(config, found.__class__(**{**vars(found), "logprobs_NC": leaf}), TOTALS)
    loss.backward()
    numbers = found.logprobs_NC.tolist()
    wanted = naive(config, found, numbers)
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    scale = 1 + abs(wanted)
    for n, row in enumerate(numbers):
        for c, value in enumerate(row):
            step = 1e-5
            row[c] = value + step
            above = naive(config, found, numbers)
            row[c] = value - step
            below = naive(config, found, numbers)
            row[c] = value
            slope = (above - below) / (2 * step)
            assert leaf.grad[n, c].item() == pytest.approx(slope, rel=1e-4, abs=1e-7 * scale)


@settings(deadline=None, max_examples=40)
@given(found=pairs(), kind=st.sampled_from(KINDS), beta=st.floats(0.05, 2))
def test_the_influence_bounds_the_gradient_of_each_pair(found, kind, beta):
    """That of ipo is the one at a margin of 0."""
    config = config_of(kind, beta, 0.5)
    start = found.reference_NC if kind == "ipo" else found.logprobs_NC
    leaf = start.clone().requires_grad_()
    loss = preference_loss(config, found.__class__(**{**vars(found), "logprobs_NC": leaf}), TOTALS)
    loss.backward()
    sums = leaf.grad.abs().sum(1).tolist()
    numbers = found.sequences_N.tolist()
    for number in set(numbers):
        rows = [n for n, one in enumerate(numbers) if one == number]
        weight = sum(found.weights_N.tolist()[n] for n in rows)
        better = int(sum(found.better_NC[n].sum() for n in rows))
        served = int(sum(found.served_NC[n].sum() for n in rows))
        most = weight * config.influence(better, served) / TOTALS.sequences
        reached = sum(sums[n] for n in rows)
        assert reached <= most * (1 + 1e-6) + 1e-12
        if kind in ("ipo", "supervised"):
            assert reached == pytest.approx(most if better else 0.0, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["dpo", "dpo_norm", "ipo"])
def test_a_loss_without_its_reference_is_refused(kind):
    one = torch.ones(2, 1)
    sides = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    given_ = PairInputs(-one, *sides, torch.tensor([0.0, 1.0]), torch.zeros(2).long())
    with pytest.raises(InputError, match=f"kind = {kind} needs the log-probabilities of a ref"):
        preference_loss(PreferenceConfig(kind=kind), given_, TOTALS)
    for other in ("simpo", "supervised"):
        assert preference_loss(PreferenceConfig(kind=other), given_, TOTALS).item() > 0
