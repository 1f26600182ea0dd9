"""Before it is caught, one worker can do to a step at most what docs/THREATS.md states."""

from __future__ import annotations

import math

import pytest
import torch

from deltawire.config import LossConfig, ParityConfig, RunConfig, WorkersConfig
from deltawire.parity import ParityMeter
from deltawire.rl.control.quota import Quota
from deltawire.train.loss import ADVANTAGES, LossInputs, Totals, policy_loss

EPISODES, TOKENS, GROUPS = 8, 16, 16
SHARE = WorkersConfig(allow=["w*"]).share


def advantage_bound(episodes):
    """The largest |r - mean| / std of a group: one episode differs from all others."""
    return (episodes - 1) / math.sqrt(episodes)


def coefficient_bound(loss):
    """The largest factor of a token's gradient other than its advantage and its weight."""
    return max(1 + loss.clip_bounds[1], loss.dual_clip_bound)


@pytest.mark.parametrize("episodes", [2, 3, 8, 64])
def test_no_reward_gives_an_advantage_beyond_the_bound(episodes):
    groups = torch.zeros(episodes, dtype=torch.long)
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    tried = [torch.randn(episodes, generator=generator) for _ in range(200)]
    tried += [torch.eye(episodes)[0] * scale for scale in (1e-3, 1.0, -1e4)]
    for rewards in tried:
        largest = max(largest, ADVANTAGES["group_std"](rewards, groups).abs().max().item())
    assert largest <= advantage_bound(episodes) * (1 + 1e-6)
    assert largest > 0.99 * advantage_bound(episodes)


def step_gradient(loss, groups_of, forge, *, lengths=None):
    """|gradient| of each token's log-probability in a step, float[N, C]; the malicious rows; masks.

    The first ``groups_of`` groups are the malicious worker's; ``forge`` makes their figures.
    """
    generator = torch.Generator().manual_seed(1)
    rows = GROUPS * EPISODES
    groups_N = torch.arange(rows) // EPISODES
    evil_N = groups_N < groups_of
    trainer = -3 * torch.rand(rows, TOKENS, generator=generator)
    sampler = (trainer + 0.1 * torch.randn(rows, TOKENS, generator=generator)).clamp(max=0)
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    forged_sampler, forged_rewards = forge(sampler[evil_N], trainer[evil_N])
    sampler[evil_N], rewards[evil_N] = forged_sampler, forged_rewards
    lengths_N = torch.full((rows,), TOKENS)
    if lengths is not None:
        lengths_N[~evil_N] = lengths
    mask = (torch.arange(TOKENS)[None] < lengths_N[:, None]).float()
    logprobs = trainer.clone().requires_grad_()
    meter = ParityMeter(ParityConfig(), 3)
    keep_N = meter.measure(trainer, sampler, mask, torch.full((rows, TOKENS), 3))
    inputs = LossInputs(
        logprobs, sampler, ADVANTAGES[loss.advantage](rewards, groups_N), mask,
        torch.arange(rows), keep_N=keep_N,
    )  # fmt: skip
    totals = Totals(float(mask.sum()), rows, TOKENS)
    policy_loss(loss, inputs, totals).loss.backward()
    return logprobs.grad.abs(), evil_N, mask


def one_good(rows):
    """One episode of each group is rewarded enormously."""
    rewards = torch.zeros(rows)
    rewards[::EPISODES] = 1e4
    return rewards


FORGERIES = {
    "impossible tokens": lambda s, t: (torch.full_like(s, -100.0), one_good(len(s))),
    "just below the mask": lambda s, t: (t - 4.6, -one_good(len(s))),
    "certain tokens": lambda s, t: (torch.zeros_like(s), one_good(len(s))),
    "at the clip": lambda s, t: (t - math.log(2.99), -one_good(len(s))),
    "only rewards": lambda s, t: (s, -one_good(len(s))),
}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "dr_grpo"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_the_gradient_of_a_malicious_worker_stays_within_the_bound(forgery, aggregation):
    """Σ |coefficient| over its tokens ≤ share · ratio · advantage, whatever it reports."""
    loss = LossConfig(aggregation=aggregation)
    largest = Quota(SHARE, lambda: 0.0).largest(groups_per_step=GROUPS, waiting=["a", "b", "c"])
    assert largest == 8
    gradient, evil_N, _ = step_gradient(loss, largest, FORGERIES[forgery])
    bound = largest / GROUPS * coefficient_bound(loss) * advantage_bound(EPISODES)
    assert gradient[evil_N].sum() <= bound * (1 + 1e-5)
    assert torch.isfinite(gradient).all()


def test_long_answers_gain_weight_only_with_token_mean():
    """The share of tokens counts there: 8 groups of 16 tokens against 8 of 4."""
    shares = {}
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        loss = LossConfig(aggregation=aggregation)
        gradient, evil_N, mask = step_gradient(loss, 8, FORGERIES["at the clip"], lengths=4)
        mass = gradient[evil_N].sum() / (coefficient_bound(loss) * advantage_bound(EPISODES))
        by_tokens = mask[evil_N].sum() / mask.sum()
        shares[aggregation] = (mass.item(), by_tokens.item())
    assert shares["token_mean"][1] == pytest.approx(0.8)
    assert shares["token_mean"][0] <= 0.8
    assert shares["seq_mean_token_mean"][0] <= 0.5


def test_the_defaults_bound_the_ratio_and_mask_extremes():
    """Without the dual clip, one forged log-probability of a bad answer had a weight of 99."""
    config = RunConfig(name="t")
    assert config.train.loss.dual_clip_bound == 3.0
    assert coefficient_bound(config.train.loss) == 3.0
    assert LossConfig(surrogate="cispo").dual_clip_bound == 0.0
    off = LossConfig(dual_clip=0.0)
    forge = FORGERIES["just below the mask"]
    without, evil_N, _ = step_gradient(off, 8, forge)
    within, _, _ = step_gradient(LossConfig(), 8, forge)
    assert without[evil_N].max() > 30 * within[evil_N].max()
    masked, _, _ = step_gradient(LossConfig(), 8, FORGERIES["impossible tokens"])
    assert masked[evil_N].sum() == 0
