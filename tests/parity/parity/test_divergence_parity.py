"""Sampler and trainer agree: the engine's log-probabilities against the trainer's forward."""

import pytest
import torch
from sampled import sampled_groups

from deltawire.parity import divergence
from deltawire.train.batch import collate
from deltawire.train.policy import token_logprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_one_policy_has_no_divergence_from_itself(tiny, temperature):
    batch = collate(sampled_groups(tiny, temperature))
    with torch.no_grad():
        ours = token_logprobs(tiny, batch)
    found = divergence(ours, batch.sampler_logprobs_NC, batch.loss_mask_NC)
    assert found.largest_gap < 1e-4
    assert 0 <= found.k3 < 1e-9
    assert abs(found.k1) < 1e-4
    assert found.ratio_max == pytest.approx(1, abs=1e-4)


def test_another_policy_diverges(tiny):
    batch = collate(sampled_groups(tiny, 1.0))
    with torch.no_grad():
        tiny.model.layers[0].mlp.up_proj.weight.mul_(1.05)
        ours = token_logprobs(tiny, batch)
    found = divergence(ours, batch.sampler_logprobs_NC, batch.loss_mask_NC)
    assert found.k3 > 1e-6
    assert found.largest_gap > 1e-3


def test_k3_survives_cancellation():
    """At a gap of 1e-5, r − 1 − log r in float32 would be noise; it is half the gap's square."""
    gap = torch.full((2, 50), 1e-5, dtype=torch.float64)
    found = divergence(gap, torch.zeros_like(gap), torch.ones(2, 50))
    assert found.k3 == pytest.approx(0.5e-10, rel=1e-4)
    assert found.k1 == pytest.approx(-1e-5)


def test_k1_and_k3_estimate_the_divergence():
    """Over draws from the sampler, both means come near KL(sampler ‖ trainer) by its definition."""
    generator = torch.Generator().manual_seed(0)
    sampler, trainer = torch.log_softmax(torch.randn(2, 6, generator=generator) * 0.5, dim=-1)
    exact = float((sampler.exp() * (sampler - trainer)).sum())
    drawn = torch.multinomial(sampler.exp(), 200_000, replacement=True, generator=generator)
    found = divergence(trainer[drawn], sampler[drawn], torch.ones(200_000))
    assert found.k1 == pytest.approx(exact, rel=0.02)
    assert found.k3 == pytest.approx(exact, rel=0.02)


def test_what_the_environment_wrote_does_not_count():
    ours, theirs = torch.tensor([[-1.0, -50.0]]), torch.tensor([[-1.0, 0.0]])
    assert divergence(ours, theirs, torch.tensor([[1.0, 0.0]])).largest_gap == 0
    assert divergence(ours, theirs, torch.tensor([[1.0, 1.0]])).largest_gap == 50
