"""Every figure of a divergence equals a plain double-precision loop over its tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.parity import divergence, numeric_mask, sequence_sums
from deltawire.parity.divergence import joined

GAPS = st.floats(-30, 30) | st.floats(-1e-6, 1e-6) | st.just(0.0)


@st.composite
def batches(draw):
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cells = st.lists(GAPS, min_size=length, max_size=length)
    marks = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    gaps = draw(st.lists(cells, min_size=rows, max_size=rows))
    masks = draw(st.lists(marks, min_size=rows, max_size=rows))
    return gaps, masks


def naive(gaps):
    """Of the drawn tokens' gaps x = log π − log μ, one after the other."""
    count = len(gaps)
    if not count:
        return {"tokens": 0, "k1": 0, "k3": 0, "effective_share": 1, "ratio_max": 1}
    k1 = k3 = k1_reverse = k3_reverse = k3_swapped = mean = extreme = 0.0
    for x in gaps:
        r = math.exp(x)
        k1 += -x / count
        k3 += (math.expm1(x) - x) / count
        k1_reverse += r * x / count
        k3_reverse += (r * x - math.expm1(x)) / count
        k3_swapped += (math.expm1(-x) + x) / count
        mean += abs(x) / count
        extreme += (r > 2 or 1 / r > 2) / count
    weights = [math.exp(x) for x in gaps]
    return {
        "tokens": count,
        "k1": k1,
        "k3": k3,
        "k1_reverse": k1_reverse,
        "k3_reverse": k3_reverse,
        "k3_swapped": k3_swapped,
        "mean_gap": mean,
        "largest_gap": max(abs(x) for x in gaps),
        "ratio_max": max(weights),
        "extreme_share": extreme,
        "effective_share": sum(weights) ** 2 / sum(w * w for w in weights) / count,
    }


def drawn(gaps, masks):
    rows = [zip(*pair, strict=True) for pair in zip(gaps, masks, strict=True)]
    return [[x for x, kept in row if kept] for row in rows]


def assert_is(found, expected):
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-18), name


@settings(max_examples=150, deadline=None)
@given(batches())
def test_the_whole_and_each_sequence_are_the_naive_ones(batch):
    gaps, masks = batch
    trainer = torch.tensor(gaps, dtype=torch.float64)
    mask = torch.tensor(masks)
    # Values at positions where nothing was drawn must not matter.
    trainer[mask == 0] = math.nan
    sums = sequence_sums(trainer, torch.zeros_like(trainer), mask)
    rows = drawn(gaps, masks)
    assert_is(sums.total(), naive([x for row in rows for x in row]))
    for found, row in zip(sums.each(), rows, strict=True):
        assert_is(found, naive(row))
    halves = [sums.of(row) for row in range(len(rows))]
    assert_is(joined(halves).total(), naive([x for row in rows for x in row]))


@given(st.integers(0, 2**20))
@settings(max_examples=30, deadline=None)
def test_both_directions_estimate_the_divergence_itself(seed):
    """Over every token as often as the sampler draws it, the means are the sums that define
    KL(μ‖π) and KL(π‖μ): exactly, not only in the limit."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (6,), generator=generator)
    sampler = counts.double() / counts.sum()
    trainer = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    tokens = torch.arange(6).repeat_interleave(counts)
    found = divergence(trainer.log()[tokens], sampler.log()[tokens], torch.ones(len(tokens)))
    forward = float((sampler * (sampler / trainer).log()).sum())
    backward = float((trainer * (trainer / sampler).log()).sum())
    assert found.k1 == pytest.approx(forward, abs=1e-12)
    assert found.k3 == pytest.approx(forward, abs=1e-12)
    assert found.k1_reverse == pytest.approx(backward, abs=1e-12)
    assert found.k3_reverse == pytest.approx(backward, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12))
def test_a_token_is_numeric_only_after_a_prefix_of_its_version(cells):
    versions, masks = (torch.tensor([part]) for part in zip(*cells, strict=True))
    found = numeric_mask(versions, masks, version=2)[0].tolist()
    seen_other = False
    for (version, mask), numeric in zip(cells, found, strict=True):
        seen_other = seen_other or (mask == 1 and version != 2)
        assert numeric == (mask == 1 and not seen_other)


def test_one_impossible_token_is_reported():
    """Ratios that overflow stay what they are: no figure turns into NaN and passes."""
    for trainer, sampler in ((-1.0, -3e38), (-3e38, -1.0), (-math.inf, -1.0)):
        gap = trainer - sampler
        found = divergence(
            torch.tensor([trainer, -1.0], dtype=torch.float64),
            torch.tensor([sampler, -1.0], dtype=torch.float64),
            torch.ones(2),
        )
        assert found.largest_gap == abs(gap)
        assert max(found.k3, found.k3_swapped) == math.inf
        assert found.k3_reverse == (math.inf if gap > 0 else pytest.approx(0.5))
        assert found.effective_share == pytest.approx(0.5 if gap > 0 or gap < -700 else 1)
