"""Tokens that episodes share are trained on once, as if drawn separately, unless told otherwise;
a thought that is cut has the advantages of its parts, and each answer has its own."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from deltawire.config import SURROGATES, BuildConfig, LossConfig, parse_config
from deltawire.train.batch import collate
from deltawire.train.build import build_model
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.train.loss.anytime import thought_advantages
from deltawire.train.loss.shared_tokens import TokenSpan, with_reused_tokens
from deltawire.train.masters import MasterWeights
from deltawire.train.step import batch_loss, token_advantages, totals_of, train_step
from deltawire.wire.rollouts import Group, Reuse, Thinking, Trajectory

PROMPT = np.array([65, 66], np.int32)


def trajectory(text, reward):
    """A trajectory of which every token was drawn."""
    count = len(text)
    return Trajectory(
        np.frombuffer(text, np.uint8).astype(np.int32), np.full(count, -1, np.float32),
        np.zeros(count, np.int32), np.ones(count, np.uint8), reward, "stop",
    )  # fmt: skip


def reusing(text, reward, source, count):
    t = trajectory(text, reward)
    mask_T = t.mask_T.copy()
    mask_T[:count] = 0
    return replace(t, mask_T=mask_T, reuse=Reuse(source, count))


def group_of(*trajectories):
    return Group("w0", "n", "t", 1.0, PROMPT, list(trajectories))


SHARED = group_of(
    trajectory(b"planA", 1.0), reusing(b"planB", 0.0, 0, 4), reusing(b"plXY", 0.0, 0, 2),
    trajectory(b"otherC", 1.0),
)  # fmt: skip


def config_of(train="once", *, loss=None, **rollout):
    raw = {
        "name": "run", "model": {"build": {}},
        "rollout": {
            "max_tokens": 16, "max_turns": 2, "group_size": 4,
            "reuse": {"episodes": 3, "train": train}, **rollout,
        },
        "train": {"loss": {"advantage": "group_mean", **(loss or {})}},
        "trust": {"rescore_share": 0.0},
    }  # fmt: skip
    return parse_config(raw, source="test")


def gradients(group, config):
    """The gradient of the loss by each token's log-probability, -ratio·advantage / tokens."""
    (trained,) = with_reused_tokens([group], config)
    batch = collate([trained])
    logprobs = batch.sampler_logprobs_NC.clone().requires_grad_()
    advantages, spans = token_advantages([trained], config)
    part = batch_loss(
        config, batch, logprobs, totals_of([trained], config), advantages, spans=spans
    )
    part.loss.backward()
    return -logprobs.grad.numpy() * totals_of([trained], config).tokens


def test_shared_tokens_are_trained_on_once_relative_to_who_does_not_share_them():
    found = gradients(SHARED, config_of())
    assert found[0].tolist() == pytest.approx([-1.5, -1.5, 0, 0, 0.5, 0], abs=1e-6)
    assert found[1].tolist() == pytest.approx([0, 0, 0, 0, -0.5, 0])
    assert found[2].tolist() == pytest.approx([0, 0, -0.5, -0.5, 0, 0])
    assert found[3].tolist() == pytest.approx([0.5] * 6)
    assert totals_of([SHARED], config_of()).tokens == 5 + 1 + 2 + 6


PLANS = (0.3, 0.7)
"""The probability of each plan, and by plan that of each answer and its reward."""
ANSWERS = ((0.6, 0.4), (0.2, 0.8))
REWARDS = ((0.0, 1.0), (0.25, 0.9))


def expected_gradient(advantage, sharing, mode="once"):
    """The expected gradient of the loss by the plan's logit, over all groups of four episodes of
    which ``sharing`` share each plan, by enumeration."""
    config = config_of(mode, loss={"advantage": advantage})
    total = 0.0
    for plans in itertools.product(range(2), repeat=4 // sharing):
        for answers in itertools.product(range(2), repeat=4):
            probability, rows = float(np.prod([PLANS[plan] for plan in plans])), []
            for number, answer in enumerate(answers):
                plan = plans[number // sharing]
                probability *= ANSWERS[plan][answer]
                text, reward = bytes([65 + plan, 67 + answer]), REWARDS[plan][answer]
                first = number - number % sharing
                shares = number != first
                rows.append(reusing(text, reward, first, 1) if shares else trajectory(text, reward))
            (group,) = with_reused_tokens([group_of(*rows)], config)
            advantages, spans = token_advantages([group], config)
            for number, t in enumerate(group.trajectories):
                found = spans.get((0, number), [TokenSpan(0, 1, advantages[0, number])])
                plan = int(t.tokens_T[0]) - 65
                score = (plan == 1) - PLANS[1]
                total += probability * score * found[0].advantage * float(t.mask_T[0])
    return total


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean"])
def test_shared_tokens_have_the_expectation_of_separate_samples(advantage):
    separate = expected_gradient(advantage, 1)
    assert expected_gradient(advantage, 2) == pytest.approx(separate, rel=1e-5)
    every = expected_gradient(advantage, 2, "every")
    assert every == pytest.approx((1 - 1 / 3) * separate, rel=1e-5), "what the document states"


def test_shared_tokens_of_divided_advantages_are_as_far_off_as_the_document_states():
    ratio = expected_gradient("group_std", 2) / expected_gradient("group_std", 1)
    assert ratio == pytest.approx(1.145, abs=0.005)


def test_told_to_they_are_trained_on_with_every_episode():
    found = gradients(SHARED, config_of("every"))
    assert found[0].tolist() == pytest.approx([0.5] * 5 + [0])
    assert found[1].tolist() == pytest.approx([-0.5] * 5 + [0])
    assert found[2].tolist() == pytest.approx([-0.5] * 4 + [0, 0])


def test_the_spans_state_who_shares():
    advantages, spans = token_advantages([SHARED], config_of())
    assert advantages == pytest.approx({(0, 0): 0.5, (0, 1): -0.5, (0, 2): -0.5, (0, 3): 0.5})
    assert list(spans) == [(0, 0)]
    assert spans[0, 0] == [
        TokenSpan(0, 2, pytest.approx(-1.5)),
        TokenSpan(2, 4, pytest.approx(0.0)),
    ]


def test_a_failed_sharer_does_not_count():
    failed = replace(SHARED.trajectories[2], cause="it failed")
    group = group_of(*SHARED.trajectories[:2], failed, SHARED.trajectories[3])
    _, spans = token_advantages([group], config_of())
    assert [(one.start, one.end) for one in spans[0, 0]] == [(0, 4)]


def test_the_step_trains_shared_tokens_once():
    """The whole step: equal to one whose loss mask is counted by hand."""

    def moved(config):
        model = build_model(BuildConfig(hidden_size=32, layers=1), seed=1)
        masters = MasterWeights(model, config.train)
        result = train_step(masters, [SHARED], config, version=0)
        return result.tokens, model.state_dict()["model.embed_tokens.weight"].float()

    once, one = moved(config_of())
    every, other = moved(config_of("every"))
    assert (once, every) == (14, 20)
    assert not torch.equal(one, other)


BUDGETS = {"end": ")", "budgets": [2, 4], "answer_tokens": 4, "per": "prefix"}


def cut(text, reward, source, count):
    """Reuses ``count`` tokens, then the mark is inserted."""
    t = reusing(text, reward, source, count)
    mask_T = t.mask_T.copy()
    mask_T[count] = 0
    thinking = Thinking(2, ((count, "forced"),), ((count, count + 1),))
    return replace(t, mask_T=mask_T, thinking=thinking)


def leading(text, reward, place, count):
    thinking = Thinking(4, ((count, "answered"),))
    return replace(trajectory(text, reward), thinking=thinking, reuse=Reuse(place, count))


def thoughts(**failed):
    rows = [
        leading(b"abc)Y", 1.0, 0, 4), cut(b"ab)N", 0.0, 0, 2),
        leading(b"defg)N", 0.0, 2, 4), cut(b"de)Y", 1.0, 2, 2),
    ]  # fmt: skip
    for place, cause in failed.items():
        number = int(place[1:])
        rows[number] = replace(rows[number], cause=cause)
    return group_of(*rows)


def budget_config():
    return config_of(
        loss={"advantage": "budget_relative"}, thinking=BUDGETS, max_turns=1,
        reuse={"episodes": 1},
    )  # fmt: skip


def test_parts_of_a_thought_have_their_advantages():
    """Thought 0 is right only when it is whole, thought 1 only when it is cut."""
    advantages, spans = token_advantages([thoughts()], budget_config())
    parts_HS = thought_advantages(np.array([[[0.0], [1.0]], [[1.0], [0.0]]]), np.ones(2), 0.5)
    assert advantages == pytest.approx({(0, 0): 0.5, (0, 1): -0.5, (0, 2): -0.5, (0, 3): 0.5})
    assert spans == {
        (0, 0): [TokenSpan(0, 2, parts_HS[0, 0]), TokenSpan(2, 4, parts_HS[0, 1])],
        (0, 2): [TokenSpan(0, 2, parts_HS[1, 0]), TokenSpan(2, 4, parts_HS[1, 1])],
    }
    found = gradients(thoughts(), budget_config())
    first, second = parts_HS[0]
    row = [first, first, second, second, 0.5, 0]
    assert found[0].tolist() == pytest.approx(row, abs=1e-6)
    assert found[1].tolist() == pytest.approx([0, 0, 0, -0.5, 0, 0])


def test_a_thought_without_an_answer_has_no_advantage():
    advantages, spans = token_advantages([thoughts(_1="it failed")], budget_config())
    assert [one.advantage for one in spans[0, 0]] == [0.0, 0.0]
    assert advantages == pytest.approx({(0, 0): 0.5, (0, 2): -0.5, (0, 3): 0.0})


def test_an_answer_after_its_own_thought_counts_for_itself_only():
    group = thoughts()
    own = replace(trajectory(b"xy)N", 0.0), thinking=Thinking(2, ((2, "forced"),), ()))
    group.trajectories[1] = own
    advantages, spans = token_advantages([group], budget_config())
    assert advantages[0, 1] == -0.5
    assert {one.advantage for one in spans[0, 0]} == {0.0}


def test_the_weights_are_the_prior():
    thinking = {**BUDGETS, "budgets": [4, 2], "weights": [3.0, 1.0]}
    config = config_of(
        loss={"advantage": "budget_relative"}, thinking=thinking, max_turns=1,
        reuse={"episodes": 1},
    )  # fmt: skip
    _, spans = token_advantages([thoughts()], config)
    rewards = np.array([[[0.0], [1.0]], [[1.0], [0.0]]])
    parts_HS = thought_advantages(rewards, np.array([1.0, 3.0]), 0.5)
    assert [one.advantage for one in spans[0, 0]] == parts_HS[0].tolist()


@pytest.mark.parametrize(
    "surrogate", [name for name, traits in SURROGATES.items() if not traits.good_or_bad]
)
def test_every_surrogate_reads_the_advantages_of_tokens(surrogate):
    """Equal ones give the loss of the row's; a token's own changes only its gradient."""
    torch.manual_seed(0)
    rollout = -torch.rand(3, 5)
    mask_NC, rows_N = torch.ones(3, 5), torch.tensor([0.5, -1.0, 2.0])
    config, totals = LossConfig(surrogate=surrogate), Totals(tokens=15.0, sequences=3, horizon=8)

    def gradient(spread_NC):
        logprobs = (rollout + 1e-4).requires_grad_()
        inputs = LossInputs(
            logprobs, rollout, rows_N, mask_NC, torch.arange(3), advantages_NC=spread_NC
        )
        policy_loss(config, inputs, totals).loss.backward()
        return logprobs.grad

    spread_NC = rows_N[:, None].repeat(1, 5)
    assert torch.equal(gradient(None), gradient(spread_NC))
    changed_NC = spread_NC.clone()
    changed_NC[0, 1] = 3.0
    moved = gradient(changed_NC) != gradient(spread_NC)
    assert moved.nonzero().tolist() == [[0, 1]]
