"""The warm start: a plain cross-entropy, stopped when it should be."""

import pytest
import torch

from deltawire.config import WarmStartConfig
from deltawire.train.warm_start import answer_loss, warm_start

PAIRS = [
    ([10, 11], [12, 256]),
    ([20, 21, 22, 23, 24], [25, 256]),
    ([30], [31, 32, 33, 34, 256]),
]


def test_the_loss_is_the_mean_over_answer_tokens(tiny):
    """One forward a pair, without padding; prompts do not count."""
    losses = []
    for prompt, answer in PAIRS:
        logits = tiny(input_ids=torch.tensor([prompt + answer])).logits[0].detach().double()
        logprobs = torch.log_softmax(logits, dim=-1)
        losses += [-float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
    assert float(answer_loss(tiny, PAIRS).detach()) == pytest.approx(
        sum(losses) / len(losses), rel=1e-4
    )


def run(model, *, stop_after=None, accuracies=(), **settings):
    told, drawn, checks = [], [], iter(accuracies)

    def draw(step):
        drawn.append(step)
        return PAIRS

    config = WarmStartConfig(**{"learning_rate": 5e-3, "max_steps": 12, **settings})
    end = warm_start(
        model,
        config,
        draw=draw,
        check=lambda: next(checks),
        report=told.append,
        stopping=lambda: stop_after is not None and len(told) >= stop_after,
    )
    return end, told, drawn


def test_it_learns(tiny):
    end, told, drawn = run(tiny, max_steps=60, check_every=100, accuracies=[0.5])
    assert drawn == list(range(60))
    assert end == told[-1]
    assert (end.step, end.accuracy) == (60, 0.5)
    assert end.loss < 0.2 * told[0].loss


def test_it_stops_at_the_accuracy(tiny):
    end, told, _ = run(tiny, check_every=4, stop_at_accuracy=0.9, accuracies=[0.2, 0.9])
    assert (end.step, end.accuracy) == (8, 0.9)
    assert [p.accuracy for p in told if p.accuracy is not None] == [0.2, 0.9]


def test_it_checks_at_the_last_step(tiny):
    end, told, _ = run(tiny, check_every=5, accuracies=[0.1, 0.2, 0.3])
    assert [(p.step, p.accuracy) for p in told if p.accuracy is not None] == [
        (5, 0.1),
        (10, 0.2),
        (12, 0.3),
    ]
    assert end.accuracy == 0.3


def test_it_stops_on_request(tiny):
    before = tiny.lm_head.weight.detach().clone()
    end, told, drawn = run(tiny, stop_after=3, check_every=100)
    assert (end.step, len(told), drawn) == (3, 3, [0, 1, 2])
    assert not torch.equal(tiny.lm_head.weight, before)


def test_no_step_at_all_changes_nothing(tiny):
    before = tiny.lm_head.weight.detach().clone()
    end, told, _ = run(tiny, max_steps=0)
    assert (end.step, told) == (0, [])
    assert torch.equal(tiny.lm_head.weight, before)


def test_the_same_pairs_give_the_same_bits(tiny, sharp):
    import copy

    twin = copy.deepcopy(tiny)
    for model in (tiny, twin):
        run(model, check_every=100, accuracies=[0.0])
    for ours, theirs in zip(tiny.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
