"""The picture of accuracy over thinking budgets: names of lines stay apart and inside."""

import re
from itertools import pairwise

import pytest

from deltawire.dashboard import plots
from deltawire.dashboard.state import RunState
from deltawire.estimates import BudgetScore
from deltawire.events import Evaluated


def score(budget, accuracy):
    return BudgetScore(
        budget=budget, accuracy=accuracy, pass_at={}, majority=accuracy, tokens=float(budget),
        tokens_per_correct=None, forced=0.0,
    )  # fmt: skip


def evaluated(version, budgets, levels):
    return Evaluated(
        process="evaluator", at=float(version), version=version, accuracy=0.5, problems=100,
        seconds=1.0, budgets=[score(*one) for one in zip(budgets, levels, strict=True)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("budgets", "ends"),
    [((4, 8, 14), (0.98, 0.985, 1.0)), ((256, 1024, 32768), (1.0, 1.0, 1.0)), ((8,), (0.0,) * 3)],
)
def test_names_of_lines_stay_apart_and_inside(budgets, ends):
    state = RunState()
    state.add(
        evaluated(version, budgets, [0.5] * (len(budgets) - 1) + [end])
        for version, end in zip((0, 30, 60), ends, strict=True)
    )
    drawn = plots._budgets(state)
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawn)[1])
    texts = re.findall(r"translate\(([\d.]+) ([\d.]+)\) scale", drawn)
    right = max(float(x) for x, _ in texts)
    names = sorted(float(y) for x, y in texts if float(x) > right - 1)
    assert len(names) == 3
    assert all(lower - upper >= 10 for upper, lower in pairwise(names))
    assert names[0] >= 6
    assert names[-1] <= height
