"""The losses and the divergence against loops over Python's own floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.parity import divergence
from deltawire.rl.losses import group_advantages, ppo_surrogate, token_mean

logprobs = st.floats(-12, 0, width=32)
rewards = st.floats(-3, 3, width=32)
bounds = st.floats(0.015625, 0.5, width=32)


@st.composite
def batches(draw):
    """Trainer and sampler log-probabilities, a mask (both float32[N, C]), advantages (N)."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def table(values):
        cells = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(draw(st.lists(cells, min_size=rows, max_size=rows)))

    advantages = draw(st.lists(rewards, min_size=rows, max_size=rows))
    ours, near = table(logprobs), table(st.floats(-1.5, 1.5, width=32))
    theirs = ours + near
    return ours, theirs, table(st.sampled_from([0.0, 1.0])), torch.tensor(advantages)


@settings(deadline=None)
@given(st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=4))
def test_advantages_are_centred_and_scaled_in_each_group(groups):
    flat = torch.tensor([reward for group in groups for reward in group])
    numbers = torch.tensor([n for n, group in enumerate(groups) for _ in group])
    found = group_advantages(flat, numbers)
    assert found.dtype == torch.float32
    expected = []
    for group in groups:
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group) if len(group) > 1 else 0.0
        expected += [(reward - mean) / (deviation + 1e-4) for reward in group]
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(deadline=None)
@given(rewards, st.integers(1, 64), st.integers(1, 3))
def test_equal_rewards_give_no_advantage(reward, count, groups):
    flat = torch.full((count * groups,), reward)
    numbers = torch.arange(groups).repeat_interleave(count)
    assert group_advantages(flat, numbers).tolist() == [0.0] * (count * groups)


def test_advantages_do_not_depend_on_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    flat, numbers = torch.rand(24, generator=generator), torch.arange(24) % 5
    found = group_advantages(flat, numbers)
    order = torch.randperm(24, generator=generator)
    torch.testing.assert_close(group_advantages(flat[order], numbers[order]), found[order])


@settings(deadline=None)
@given(batches(), bounds, bounds)
def test_the_surrogate_is_the_clipped_one(batch, low, high):
    ours, theirs, _, advantages = batch
    found = ppo_surrogate(ours, theirs, advantages, clip_low=low, clip_high=high)
    for n, advantage in enumerate(advantages.tolist()):
        for c in range(ours.shape[1]):
            ratio = math.exp(ours[n, c].item() - theirs[n, c].item())
            clipped = min(max(ratio, 1 - low), 1 + high)
            expected = -min(ratio * advantage, clipped * advantage)
            assert found.losses_NC[n, c].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
            beyond = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            edge = min(abs(ratio - 1 - high), abs(ratio - 1 + low)) < 1e-4
            if not edge and abs(advantage) > 1e-3:
                assert bool(found.clipped_NC[n, c]) == beyond


@settings(deadline=None)
@given(batches(), bounds, bounds)
def test_clipped_tokens_are_those_without_a_gradient(batch, low, high):
    ours, theirs, _, advantages = batch
    ours = ours.clone().requires_grad_()
    found = ppo_surrogate(ours, theirs, advantages, clip_low=low, clip_high=high)
    found.losses_NC.sum().backward()
    ratio = (ours.detach() - theirs).exp()
    free = -ratio * advantages[:, None]
    expected = torch.where(found.clipped_NC, 0.0, free)
    decided = ((ratio - 1 - high).abs() > 1e-4) & ((ratio - 1 + low).abs() > 1e-4)
    torch.testing.assert_close(ours.grad[decided], expected[decided], rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(batches())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(batch):
    """d loss / d log π = −A, the score-function estimator's, whatever the bounds."""
    ours, _, _, advantages = batch
    ours = ours.clone().requires_grad_()
    found = ppo_surrogate(ours, ours.detach(), advantages, clip_low=0.2, clip_high=0.28)
    found.losses_NC.sum().backward()
    assert torch.equal(found.losses_NC.detach(), -advantages[:, None].expand_as(ours))
    torch.testing.assert_close(ours.grad, -advantages[:, None].expand_as(ours))
    assert not found.clipped_NC.any()


@settings(deadline=None)
@given(batches(), st.integers(1, 4))
def test_every_token_of_a_step_weighs_the_same(batch, parts):
    """Micro-batches with the whole batch's denominator add up to the mean over its tokens."""
    losses, _, mask, _ = batch
    total = float(mask.sum()) or 1.0
    drawn = [
        float(losses[n, c])
        for n in range(losses.shape[0])
        for c in range(losses.shape[1])
        if mask[n, c]
    ]
    expected = math.fsum(drawn) / total
    pieces = zip(losses.chunk(parts), mask.chunk(parts), strict=True)
    found = sum(float(token_mean(piece, seen, total=total)) for piece, seen in pieces)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(deadline=None)
@given(batches())
def test_divergence_is_the_plain_estimators(batch):
    ours, theirs, mask, _ = batch
    gaps = [
        ours[n, c].item() - theirs[n, c].item()
        for n in range(ours.shape[0])
        for c in range(ours.shape[1])
        if mask[n, c]
    ]
    found = divergence(ours, theirs, mask)
    if not gaps:
        assert (found.k1, found.k3, found.largest_gap, found.ratio_max) == (0.0, 0.0, 0.0, 1.0)
        return
    k3 = [math.exp(gap) - 1 - gap for gap in gaps]
    assert found.k1 == pytest.approx(-math.fsum(gaps) / len(gaps), rel=1e-9, abs=1e-12)
    assert found.k3 == pytest.approx(math.fsum(k3) / len(gaps), rel=1e-9, abs=1e-12)
    assert found.largest_gap == pytest.approx(max(abs(gap) for gap in gaps), rel=1e-12)
    assert found.ratio_max == pytest.approx(max(math.exp(gap) for gap in gaps), rel=1e-12)
    assert found.k3 >= 0
