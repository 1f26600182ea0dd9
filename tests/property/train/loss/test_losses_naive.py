"""The losses and the divergence against loops over Python's own floats, and their gradients."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltawire.config import SURROGATES, CorrectionConfig, LossConfig
from deltawire.errors import InputError
from deltawire.parity import divergence
from deltawire.train import loss as losses
from deltawire.train.loss import (
    ADVANTAGES,
    PENALTIES,
    ClipBounds,
    LossInputs,
    Totals,
    correction_weights,
    policy_loss,
    surrogate_named,
)

PER_TOKEN = [name for name, traits in SURROGATES.items() if not traits.good_or_bad]
"""`test_kto_naive` has the loss of whole answers."""
logprobs = st.floats(-12, 0, width=32)
rewards = st.floats(-3, 3, width=32)
bounds = st.floats(0.015625, 0.5, width=32)


@st.composite
def batches(draw):
    """Trainer and sampler log-probabilities, a mask (all float64[N, C]), advantages (N)."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def table(values):
        cells = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(
            draw(st.lists(cells, min_size=rows, max_size=rows)), dtype=torch.float64
        )

    advantages = draw(st.lists(rewards, min_size=rows, max_size=rows))
    ours, near = table(logprobs), table(st.floats(-1.5, 1.5, width=32))
    mask = table(st.sampled_from([0.0, 1.0]))
    return ours, ours + near, mask, torch.tensor(advantages, dtype=torch.float64)


@st.composite
def sequences(draw, rows):
    """Each row's sequence, numbered from 0 without a gap."""
    numbers = draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
    order = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    return torch.tensor([order[number] for number in numbers])


# Advantages


def naive_advantages(name, groups):
    found = []
    for group in groups:
        for place, reward in enumerate(group):
            if name == "given":
                found.append(reward)
                continue
            others = group[:place] + group[place + 1 :]
            if name == "leave_one_out":
                found.append(reward - statistics.fmean(others) if others else 0.0)
                continue
            deviation = statistics.stdev(group) if others else 0.0
            scale = deviation + 1e-4 if name == "group_std" else 1.0
            found.append((reward - statistics.fmean(group)) / scale)
    return found


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None, max_examples=50)
@given(groups=st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=4))
def test_advantages_are_the_naive_ones(name, groups):
    flat = torch.tensor([reward for group in groups for reward in group])
    numbers = torch.tensor([n for n, group in enumerate(groups) for _ in group])
    found = ADVANTAGES[name](flat, numbers)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(naive_advantages(name, groups), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "given"])
@settings(deadline=None, max_examples=50)
@given(reward=rewards, count=st.integers(1, 64), groups=st.integers(1, 3))
def test_equal_rewards_give_no_advantage(name, reward, count, groups):
    flat = torch.full((count * groups,), reward)
    numbers = torch.arange(groups).repeat_interleave(count)
    assert ADVANTAGES[name](flat, numbers).tolist() == [0.0] * (count * groups)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_do_not_depend_on_the_order_of_rows(name):
    generator = torch.Generator().manual_seed(0)
    flat, numbers = torch.rand(24, generator=generator), torch.arange(24) % 5
    found = ADVANTAGES[name](flat, numbers)
    order = torch.randperm(24, generator=generator)
    torch.testing.assert_close(ADVANTAGES[name](flat[order], numbers[order]), found[order])


# Surrogates


def naive_mean_logs(ours, theirs, mask, numbers):
    """Each sequence's mean log-ratio."""
    logs = {}
    for n, number in enumerate(numbers.tolist()):
        drawn = logs.setdefault(number, [])
        drawn += [
            ours[n, c].item() - theirs[n, c].item() for c in range(ours.shape[1]) if mask[n, c]
        ]
    return {number: statistics.fmean(values or [0.0]) for number, values in logs.items()}


def clip(value, low, high):
    return min(max(value, low), high)


def naive_token(name, logprob, anchor, advantage, mean_log, low, high, dual):
    """One token's loss, and its derivative by its log-probability."""
    ratio = math.exp(logprob - anchor)
    if name == "reinforce":
        return -advantage * logprob, -advantage
    if name == "importance_sampling":
        return -ratio * advantage, -ratio * advantage
    if name == "cispo":
        held = clip(ratio, max(1 - low, 0), 1 + high)
        return -held * advantage * logprob, -held * advantage
    if name == "dppo":
        moved = math.exp(logprob) - math.exp(anchor)
        far = moved > high if advantage > 0 else moved < -low
        return (0.0, 0.0) if far else (-ratio * advantage, -ratio * advantage)
    ratio = math.exp(mean_log) if name == "gspo" else ratio
    free, held = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    gain, slope = min(free, held), -free if free <= held else 0.0
    if dual and advantage < 0 and gain < dual * advantage:
        gain, slope = dual * advantage, 0.0
    return -gain, slope


def surrogate_of(name, ours, theirs, advantages, mask, numbers, low, high, dual=0.0):
    inputs = LossInputs(ours, theirs, advantages, mask, numbers)
    return surrogate_named(name)(inputs, ClipBounds(low, high, dual))


def near_an_edge(name, ours, theirs, mean_logs, low, high, dual):
    """True if any token is so near a bound that rounding decides on which side it is."""
    edges = [1 - low, 1 + high, *([dual] if dual else [])]
    values = [ratio.item() for ratio in (ours - theirs).exp().flatten()]
    if name == "gspo":
        values = [math.exp(mean) for mean in mean_logs.values()]
    if name == "dppo":
        edges, values = [high, -low], (ours.exp() - theirs.exp()).flatten().tolist()
    return any(abs(value - edge) < 1e-9 for value in values for edge in edges)


@pytest.mark.parametrize("name", PER_TOKEN)
@settings(deadline=None, max_examples=60)
@given(
    batch=batches(), low=bounds, high=bounds, dual=st.sampled_from([0.0, 1.5, 3.0]), data=st.data()
)
def test_surrogates_and_their_gradients_are_the_naive_ones(name, batch, low, high, dual, data):
    ours, theirs, mask, advantages = batch
    numbers = data.draw(sequences(len(ours)))
    mean_logs = naive_mean_logs(ours, theirs, mask, numbers)
    dual = dual if name == "ppo" else 0.0
    assume(not near_an_edge(name, ours, theirs, mean_logs, low, high, dual))
    ours = ours.clone().requires_grad_()
    found = surrogate_of(name, ours, theirs, advantages, mask, numbers, low, high, dual)
    found.losses_NC.sum().backward()
    for n, advantage in enumerate(advantages.tolist()):
        for c in range(ours.shape[1]):
            mean = mean_logs[int(numbers[n])]
            loss, slope = naive_token(
                name, ours[n, c].item(), theirs[n, c].item(), advantage, mean, low, high, dual
            )
            assert found.losses_NC[n, c].item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
            assert ours.grad[n, c].item() == pytest.approx(slope, rel=1e-9, abs=1e-9)
            if name in ("ppo", "gspo", "dppo") and abs(advantage) > 1e-6:
                assert bool(found.clipped_NC[n, c]) == (slope == 0.0)


@pytest.mark.parametrize("name", PER_TOKEN)
@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name, batch):
    """d loss / d log π = −A, the score-function estimator's, whatever the bounds."""
    ours, _, mask, advantages = batch
    ours = ours.clone().requires_grad_()
    numbers = torch.arange(len(ours))
    found = surrogate_of(name, ours, ours.detach(), advantages, mask, numbers, 0.2, 0.28, 3.0)
    found.losses_NC.sum().backward()
    torch.testing.assert_close(ours.grad, -advantages[:, None].expand_as(ours))
    assert not found.clipped_NC.any()


@pytest.mark.parametrize("name", PER_TOKEN)
def test_gradients_stay_finite_where_ratios_overflow(name):
    """A masked token of a wild ratio must not turn its neighbours into NaN."""
    ours = torch.tensor([[0.0, -1.0], [-400.0, -1.0]], requires_grad=True)
    theirs, mask = torch.tensor([[-400.0, -1.0], [0.0, -1.0]]), torch.tensor([[0.0, 1.0]] * 2)
    advantages = torch.tensor([1.0, -1.0])
    found = surrogate_of(name, ours, theirs, advantages, mask, torch.arange(2), 0.2, 0.28)
    (found.losses_NC * mask).sum().backward()
    assert torch.isfinite(ours.grad).all()
    assert not ours.grad[:, 0].any()


def test_a_gradient_by_finite_differences():
    """Of the whole loss by the log-probabilities, where nothing is held without a gradient."""
    generator = torch.Generator().manual_seed(1)
    ours = -3 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    theirs = ours + 0.4 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    reference = ours + 0.4 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 5, generator=generator) > 0.3).double()
    numbers = torch.tensor([0, 0, 1, 2])
    totals = Totals(tokens=float(mask.sum()), sequences=3, horizon=7)
    for surrogate in ("ppo", "importance_sampling", "dppo", "reinforce"):
        for aggregation in losses.AGGREGATIONS:
            for kl in ("none", *PENALTIES):
                config = LossConfig(
                    surrogate=surrogate, aggregation=aggregation, kl=kl, kl_coefficient=0.3
                )

                def loss(logprobs, config=config):
                    inputs = LossInputs(
                        logprobs, theirs, advantages, mask, numbers, reference_NC=reference
                    )
                    return policy_loss(config, inputs, totals).loss

                assert torch.autograd.gradcheck(loss, (ours.clone().requires_grad_(),))


# Corrections

correction = st.builds(
    CorrectionConfig,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    action=st.sampled_from(["truncate", "clip", "mask"]),
    low=st.floats(0, 0.875, width=32),
    high=st.floats(1, 3, width=32),
    weigh=st.booleans(),
)


def inputs_of(ours, theirs, mask, numbers):
    return LossInputs(ours, theirs, torch.zeros(len(ours)), mask, numbers)


def naive_weight(correction, logs, log):
    level = {"token": log, "sequence": math.fsum(logs), "geometric": statistics.fmean(logs or [0])}
    weight = math.exp(clip(level[correction.level], -20, 20))
    inside = correction.low <= weight <= correction.high
    if not correction.weigh:
        return 1.0 if inside else 0.0
    if correction.action == "truncate":
        return min(weight, correction.high)
    if correction.action == "clip":
        return clip(weight, correction.low, correction.high)
    return weight if inside else 0.0


@settings(deadline=None)
@given(batches(), st.lists(correction, max_size=3), st.data())
def test_corrections_are_the_naive_ones(batch, corrections, data):
    ours, theirs, mask, _ = batch
    numbers = data.draw(sequences(len(ours)))
    found = correction_weights(inputs_of(ours, theirs, mask, numbers), corrections)
    for n, number in enumerate(numbers.tolist()):
        logs = [
            (ours[m, c] - theirs[m, c]).item()
            for m in range(len(ours))
            for c in range(ours.shape[1])
            if mask[m, c] and int(numbers[m]) == number
        ]
        for c in range(ours.shape[1]):
            log = (ours[n, c] - theirs[n, c]).item()
            weights = [naive_weight(one, logs, log) for one in corrections]
            levels = {"sequence": math.fsum(logs), "geometric": statistics.fmean(logs or [0])}
            edges = [
                math.exp(clip(levels.get(one.level, log), -20, 20)) - edge
                for one in corrections
                for edge in (one.low, one.high)
            ]
            if all(abs(edge) > 1e-9 for edge in edges):
                assert found[n, c].item() == pytest.approx(math.prod(weights), rel=1e-9)


def test_corrections_carry_no_gradient():
    ours = torch.full((1, 2), -1.0, requires_grad=True)
    theirs, mask = torch.full((1, 2), -1.3), torch.ones(1, 2)
    inputs = inputs_of(ours, theirs, mask, torch.zeros(1).long())
    weights = correction_weights(inputs, [CorrectionConfig()])
    assert not weights.requires_grad


NAMED = {
    "TIS": (CorrectionConfig(high=2.0), [0.5, 1.0, 2.0]),
    "IcePop": (CorrectionConfig(action="mask", low=0.6, high=2.0), [0.0, 1.0, 0.0]),
    "sequence masking": (
        CorrectionConfig(level="sequence", action="mask", high=3.0),
        [2.0, 2.0, 2.0],
    ),
    "rejection by the geometric mean": (
        CorrectionConfig(level="geometric", action="mask", low=0.9, high=1.1, weigh=False),
        [0.0, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_corrections_of_the_field_are_settings(name):
    """On one sequence whose tokens have the ratios 0.5, 1 and 4."""
    settings_, expected = NAMED[name]
    ours = torch.tensor([[0.5, 1.0, 4.0]], dtype=torch.float64).log()
    inputs = inputs_of(ours, torch.zeros_like(ours), torch.ones_like(ours), torch.zeros(1).long())
    weights = correction_weights(inputs, [settings_])
    assert weights[0].tolist() == pytest.approx(expected)


# Aggregation


def naive_aggregate(name, values, mask, numbers, horizon):
    """Of the whole batch in one piece."""
    rows = range(len(values))
    drawn = {n: [float(v) for v, m in zip(values[n], mask[n], strict=True) if m] for n in rows}
    if name == "token_mean":
        return math.fsum(v for row in drawn.values() for v in row) / max(float(mask.sum()), 1.0)
    members = {}
    for n in rows:
        members.setdefault(int(numbers[n]), []).extend(drawn[n])
    if name == "dr_grpo":
        return math.fsum(math.fsum(row) / horizon for row in members.values()) / len(members)
    return math.fsum(math.fsum(row) / max(len(row), 1) for row in members.values()) / len(members)


@pytest.mark.parametrize("name", losses.AGGREGATIONS)
@settings(deadline=None, max_examples=50)
@given(batch=batches(), data=st.data(), horizon=st.integers(1, 50))
def test_micro_batches_add_up_to_the_whole(name, batch, data, horizon):
    """Sequences are never split over micro-batches; their rows are, here, in any order."""
    values, _, mask, _ = batch
    numbers = data.draw(sequences(len(values)))
    count = int(numbers.max()) + 1
    parts = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    tokens = float(mask.sum()) or 1.0
    found = 0.0
    for part in set(parts):
        rows = torch.tensor([n for n, s in enumerate(numbers.tolist()) if parts[s] == part])
        _, local = numbers[rows].unique(return_inverse=True)
        part_inputs = inputs_of(values[rows], values[rows], mask[rows], local)
        weights = losses.AGGREGATIONS[name](part_inputs, Totals(tokens, count, horizon))
        found += float((values[rows] * mask[rows] * weights[:, None]).sum())
    expected = naive_aggregate(name, values, mask, numbers, horizon)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


# Penalties

PLAIN = {
    "k1": lambda x: (x, 1.0),
    "k2": lambda x: (x * x / 2, x),
    "k3": lambda x: (math.exp(-x) - 1 + x, 1 - math.exp(-x)),
}


@pytest.mark.parametrize("name", PENALTIES)
@settings(deadline=None, max_examples=50)
@given(batch=batches())
def test_penalties_and_their_gradients_are_the_naive_ones(name, batch):
    ours, theirs, _, _ = batch
    ours = ours.clone().requires_grad_()
    found = PENALTIES[name](ours, theirs)
    found.sum().backward()
    for n in range(len(ours)):
        for c in range(ours.shape[1]):
            value, slope = PLAIN[name](ours[n, c].item() - theirs[n, c].item())
            assert found[n, c].item() == pytest.approx(value, rel=1e-9, abs=1e-9)
            assert ours.grad[n, c].item() == pytest.approx(slope, rel=1e-9, abs=1e-9)


# The whole


def test_what_a_correction_rejects_leaves_the_rest_as_it_was():
    """Denominators are those from before masking: survivors do not gain by others' rejection."""
    ours = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    theirs = ours - torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    advantages, numbers = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.arange(2)
    band = CorrectionConfig(level="sequence", action="mask", low=0.5, high=2.0)
    for aggregation in losses.AGGREGATIONS:
        totals = Totals(tokens=4.0, sequences=2, horizon=2)
        grads = []
        for corrections in ([], [band]):
            config = LossConfig(
                ratio_base="old",
                surrogate="reinforce",
                aggregation=aggregation,
                corrections=corrections,
            )
            leaf = ours.clone().requires_grad_()
            inputs = LossInputs(leaf, theirs, advantages, torch.ones_like(ours), numbers)
            found = policy_loss(config, inputs, totals)
            found.loss.backward()
            grads.append(leaf.grad)
        assert torch.equal(grads[0][0], grads[1][0])
        assert not grads[1][1].any()
        assert found.rejected == 0.5


def test_what_is_kept_out_stays_in_the_denominators():
    ours = torch.full((2, 2), -1.0)
    config = LossConfig(surrogate="reinforce", ratio_base="old")
    inputs = LossInputs(ours, ours, torch.ones(2), torch.ones(2, 2), torch.arange(2))
    totals = Totals(tokens=4.0, sequences=2, horizon=2)
    whole = policy_loss(config, inputs, totals)
    half = policy_loss(config, replace(inputs, keep_N=torch.tensor([1.0, 0.0])), totals)
    assert float(half.loss) == float(whole.loss) / 2


def test_a_penalty_without_a_reference_is_refused():
    ours = torch.zeros(1, 1)
    with pytest.raises(InputError, match="reference"):
        policy_loss(
            LossConfig(kl="k3"),
            LossInputs(ours, ours, torch.zeros(1), torch.ones(1, 1), torch.zeros(1).long()),
            Totals(1.0, 1, 1),
        )


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


@given(batches(), st.floats(0.015625, 2, width=32))
def test_the_entropy_bonus_is_a_weighted_mean_that_leaves_the_rest(batch, coefficient):
    trainer, sampler, mask, advantages = batch
    assume(mask.sum() > 0)
    config = LossConfig(entropy_coefficient=coefficient)
    entropies = torch.rand(mask.shape, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(trainer, sampler, advantages, mask, torch.arange(len(mask)))
    totals = Totals(float(mask.sum()), len(mask), 7)
    plain = policy_loss(LossConfig(), inputs, totals)
    found = policy_loss(config, replace(inputs, entropy_NC=entropies), totals)
    mean = sum(
        entropies[n, c].item() for n in range(len(mask)) for c in range(mask.shape[1]) if mask[n, c]
    ) / float(mask.sum())
    assert found.loss.item() == pytest.approx(plain.loss.item() - coefficient * mean, abs=1e-9)
    found.loss.backward()
    assert torch.allclose(entropies.grad, -coefficient * mask / mask.sum())


def test_a_bonus_without_entropies_is_refused():
    one = torch.zeros(1, 1)
    inputs = LossInputs(one, one, torch.ones(1), torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(InputError, match="entropy_coefficient needs the entropies"):
        policy_loss(LossConfig(entropy_coefficient=0.1), inputs, Totals(1, 1, 1))
