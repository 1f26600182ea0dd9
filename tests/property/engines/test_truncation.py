"""Truncated sampling against a loop over Python's own floats."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.engines.transformers.truncation import kept_tokens

CLOSE = 1e-5


@st.composite
def rows(draw):
    """A row's logits, and its top-p, top-k and min-p."""
    logits = draw(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12))
    top_p = draw(st.one_of(st.just(1.0), st.floats(0.015625, 1, width=32)))
    top_k = draw(st.integers(0, 14))
    min_p = draw(st.one_of(st.just(0.0), st.floats(0.015625, 1, width=32)))
    return logits, top_p, top_k, min_p


def naive(logprobs, top_p, top_k, min_p):
    """The kept ids, and those for which rounding may decide."""
    probabilities = [math.exp(value) for value in logprobs]
    order = sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))
    most = probabilities[order[0]]
    unsure = {i for i in order if abs(probabilities[i] - min_p * most) < CLOSE}
    left = [i for i in order if probabilities[i] >= min_p * most]
    if top_k:
        left = left[:top_k]
    total, before, kept = sum(probabilities[i] for i in left), 0.0, []
    for i in left:
        if kept and top_p < 1 and before >= top_p * total:
            break
        if top_p < 1 and abs(before - top_p * total) < CLOSE:
            unsure.add(i)
        kept.append(i)
        before += probabilities[i]
    if top_p < 1 and abs(before - top_p * total) < CLOSE:
        unsure |= {*left}
    return {*kept} | {order[0]}, unsure


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_the_kept_tokens_are_those_of_the_definition(batch):
    width = max(len(logits) for logits, *_ in batch)
    padded = [logits + [-math.inf] * (width - len(logits)) for logits, *_ in batch]
    logprobs = torch.log_softmax(torch.tensor(padded), dim=-1)
    top_p, top_k, min_p = (
        torch.tensor(values) for values in zip(*(row[1:] for row in batch), strict=True)
    )
    kept = kept_tokens(logprobs, top_p, top_k, min_p)
    for row, (_, p, k, m) in enumerate(batch):
        expected, unsure = naive(logprobs[row].tolist(), p, k, m)
        found = {i for i in range(width) if kept[row, i]}
        if not unsure:
            assert found == expected
        assert found - unsure <= expected | unsure
        assert found


def test_no_restriction_keeps_everything():
    logprobs = torch.log_softmax(torch.randn(3, 50), dim=-1)
    kept = kept_tokens(logprobs, torch.ones(3), torch.zeros(3, dtype=torch.long), torch.zeros(3))
    assert bool(kept.all())


def test_of_equal_tokens_the_first_are_kept():
    logprobs = torch.full((1, 8), math.log(1 / 8))
    kept = kept_tokens(logprobs, torch.ones(1), torch.tensor([3]), torch.zeros(1))
    assert kept[0].tolist() == [True] * 3 + [False] * 5
    kept = kept_tokens(logprobs, torch.tensor([0.3]), torch.tensor([0]), torch.zeros(1))
    assert kept[0].tolist() == [True] * 3 + [False] * 5
