"""Accuracy over thinking budgets: each figure against a naive twin, and a measured curve."""

import asyncio
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import open_tasks
from deltawire.estimates import BudgetScore
from deltawire.rl.evaluate.budget_curve import (
    AnsweredProblem,
    area_of,
    majority_is_correct,
    measure_budgets,
    pass_at,
)
from deltawire.train.build import build_model


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_choices(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    naive = np.mean([any(chosen) for chosen in combinations(correct, k)])
    assert pass_at(k, len(correct), sum(correct)) == pytest.approx(naive)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_the_majority_is_the_most_frequent_answer(answers):
    problem = AnsweredProblem("", tuple(answers), tuple(answer == "a" for answer in answers))
    counts = {answer: answers.count(answer) for answer in answers}
    most = next(answer for answer in answers if counts[answer] == max(counts.values()))
    assert majority_is_correct(problem) == (most == "a")


def score(budget, accuracy):
    return BudgetScore(
        budget=budget, accuracy=accuracy, pass_at={}, majority=0.0, tokens=1.0,
        tokens_per_correct=None, forced=0.0,
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.floats(0, 1)),
        min_size=2,
        max_size=8,
        unique_by=lambda one: one[0],
    )
)
def test_the_area_is_that_under_the_line(points):
    points.sort()
    budgets, levels = zip(*points, strict=True)
    fine = np.linspace(budgets[0], budgets[-1], 20_001)
    naive = np.interp(fine, budgets, levels).mean()
    found = area_of([score(*point) for point in points])
    assert found == pytest.approx(naive, abs=2e-3)
    assert 0 <= found <= 1


def test_a_curve_of_one_point_or_none():
    assert area_of([]) is None
    assert area_of([score(8, 0.25)]) == 0.25


def test_a_curve_is_measured(byte_tokenizer):
    raw = {
        "name": "run",
        "model": {"build": {"layers": 1, "hidden_size": 32}},
        "task": {"heldout": 4},
        "rollout": {
            "max_tokens": 24, "context": 160,
            "thinking": {"end": ")", "budgets": [8], "answer_tokens": 6},
        },
        "evaluate": {"budgets": [2, 8, 16], "samples": 3},
    }  # fmt: skip
    config = parse_config(raw, source="test")
    model = build_model(config.model.build, seed=1).float().eval()
    engine = TransformersEngine(model, stop_tokens=[256], slots=16, capacity=160, seed=1)
    served = SimpleNamespace(
        engine=engine, text=Text(byte_tokenizer), tasks=open_tasks(config.task, seed=1)
    )
    scores = asyncio.run(measure_budgets(served, config))
    assert [one.budget for one in scores] == [2, 8, 16]
    for one in scores:
        assert list(one.pass_at) == ["1", "2"]
        assert one.tokens <= one.budget + 6
        assert one.forced > 0.5
        assert one.families
    assert scores[0].tokens < scores[2].tokens
