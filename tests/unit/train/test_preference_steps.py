"""Steps with better answers: the pairs' loss is that of pairs computed one by one, and whatever
counts sampled tokens counts no other ones."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sampled import sampled_groups

from deltawire.config import (
    LossConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from deltawire.errors import InputError
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import SleepingCopy
from deltawire.train.step import train_step
from deltawire.wire.rollouts import BetterAnswer

CPU = torch.device("cpu")
BETAS = {"dpo": 0.1, "dpo_norm": 2.0, "ipo": 0.5, "simpo": 2.0, "supervised": 0.1}


@pytest.fixture
def groups(tiny):
    """Groups with advantages, in which two of three answers have a better one."""
    rng = np.random.default_rng(3)

    def edited(place, t):
        reward = [1.0, -0.5, 0.25][place % 3]
        better = None
        if place % 3:
            tokens = rng.integers(0, 256, int(rng.integers(2, 9))).astype(np.int32)
            better = BetterAnswer(tokens, 1.0 if place % 2 else 0.25)
        return replace(t, episode=place, reward=reward, better=better)

    return [
        replace(group, trajectories=[edited(n, t) for n, t in enumerate(group.trajectories)])
        for group in sampled_groups(tiny, 1.0)
    ]


def train_config(kind, *, policy=0.0, **changes):
    preference = PreferenceConfig(kind=kind, beta=BETAS[kind]) if kind != "none" else None
    loss = LossConfig(
        advantage="given", policy_coefficient=policy, preference=preference or PreferenceConfig()
    )
    return TrainConfig(
        schedule=ScheduleConfig(warmup_steps=0), loss=loss,
        optimizer=OptimizerConfig(learning_rate=2e-3), **changes,
    )  # fmt: skip


def step(model, frozen, groups, train):
    """The result of one step on a copy of the model, and the copy."""
    masters = MasterWeights(copy.deepcopy(model), train)
    reference = SleepingCopy(copy.deepcopy(frozen), train, device=CPU)
    config = RunConfig(name="t", train=train)
    return train_step(masters, groups, config, reference=reference), masters.model


def answer_logprobs(model, prompt, tokens):
    """Log-probabilities of one answer, by a forward pass of its own: float32[T]."""
    ids = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return F.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def pair_loss(kind, beta, ours, frozen, prompt, t):
    """The loss of one pair, by its formula."""
    w, lost = (answer_logprobs(ours, prompt, one) for one in (t.better.tokens_T, t.tokens_T))
    with torch.no_grad():
        w_ref, l_ref = (
            answer_logprobs(frozen, prompt, one) for one in (t.better.tokens_T, t.tokens_T)
        )
    match kind:
        case "dpo":
            return -F.logsigmoid(beta * ((w - w_ref).sum() - (lost - l_ref).sum()))
        case "dpo_norm":
            return -F.logsigmoid(beta * ((w - w_ref).mean() - (lost - l_ref).mean()))
        case "ipo":
            return ((w - w_ref).mean() - (lost - l_ref).mean() - 1 / (2 * beta)).square()
        case "simpo":
            return -F.logsigmoid(beta * (w.mean() - lost.mean()) - 0.5)
        case _:
            return -w.mean()


@pytest.mark.parametrize("kind", BETAS)
def test_a_step_is_that_of_pairs_computed_one_by_one(tiny, sharp, groups, kind):
    frozen = sharp(copy.deepcopy(tiny), seed=5)
    # A step computes with weights in the precision that is published.
    model = MasterWeights(copy.deepcopy(tiny), train_config(kind)).model.eval()
    answers = [(group, t) for group in groups for t in group.trajectories]
    parts = [
        t.better.weight * pair_loss(kind, BETAS[kind], model, frozen, group.prompt, t)
        for group, t in answers
        if t.better is not None
    ]
    loss = sum(parts) / len(answers)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in grads]).norm().item()
    for packing, micro in (("auto", 4096), ("auto", 1), ("off", 64)):
        train = train_config(kind, packing=packing, max_tokens_per_batch=micro)
        found, _ = step(tiny, frozen, groups, train)
        assert found.loss == pytest.approx(loss.item(), rel=2e-4)
        assert found.grad_norm == pytest.approx(norm, rel=2e-3)


def test_next_to_the_policy_the_losses_add_up_and_only_sampled_tokens_are_counted(
    tiny, sharp, groups
):
    frozen = sharp(copy.deepcopy(tiny), seed=5)
    plain, _ = step(tiny, frozen, groups, train_config("none", policy=1.0))
    pairs, _ = step(tiny, frozen, groups, train_config("dpo"))
    both, _ = step(tiny, frozen, groups, train_config("dpo", policy=1.0))
    assert both.loss == pytest.approx(plain.loss + pairs.loss, rel=1e-4)
    sampled = sum(len(t.tokens_T) for group in groups for t in group.trajectories)
    for found in (pairs, both):
        assert found.tokens == plain.tokens == sampled
        assert found.members == plain.members
        assert found.entropy == pytest.approx(plain.entropy, rel=1e-4)
        assert found.reward_mean == plain.reward_mean
        assert found.parity.drift.tokens == plain.parity.drift.tokens == sampled
        assert found.parity.drift.k3 == pytest.approx(plain.parity.drift.k3, rel=1e-3)


def test_without_the_setting_better_answers_change_no_bit(tiny, sharp, groups):
    bare = [
        replace(group, trajectories=[replace(t, better=None) for t in group.trajectories])
        for group in groups
    ]
    frozen = sharp(copy.deepcopy(tiny), seed=5)
    one, first = step(tiny, frozen, groups, train_config("none", policy=1.0))
    other, second = step(tiny, frozen, bare, train_config("none", policy=1.0))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", BETAS)
def test_better_answers_gain_on_the_served_ones(tiny, groups, kind):
    train = train_config(kind)
    masters = MasterWeights(copy.deepcopy(tiny), train)
    reference = SleepingCopy(copy.deepcopy(tiny), train, device=CPU)
    config = RunConfig(name="t", train=train)
    results = [train_step(masters, groups, config, reference=reference) for _ in range(6)]
    assert results[-1].loss < results[0].loss
    assert results[0].grad_norm > 0


def test_parity_takes_a_pair_out_together_with_its_answer(tiny, sharp, groups):
    """The log-probabilities of one answer are forged."""
    frozen = sharp(copy.deepcopy(tiny), seed=5)
    trajectories = list(groups[0].trajectories)
    t = trajectories[1]
    assert t.better is not None
    trajectories[1] = replace(t, logprobs_T=np.full_like(t.logprobs_T, -30.0))
    forged = [replace(groups[0], trajectories=trajectories), *groups[1:]]
    trajectories = list(trajectories)
    trajectories[1] = replace(t, better=replace(t.better, weight=0.0))
    without = [replace(groups[0], trajectories=trajectories), *groups[1:]]
    found, wanted = (step(tiny, frozen, one, train_config("dpo"))[0] for one in (forged, without))
    assert len(found.parity.masked) == 1
    assert found.members[found.parity.masked[0]] == (0, 1)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)


def test_a_step_without_a_reference_is_refused(tiny, groups):
    config = RunConfig(name="t", train=train_config("dpo"))
    masters = MasterWeights(tiny, config.train)
    with pytest.raises(InputError, match=r"preference\.kind = dpo needs the log-probabilities"):
        train_step(masters, groups, config)
