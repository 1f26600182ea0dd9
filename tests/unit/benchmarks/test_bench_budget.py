"""The frame of ``deltawire bench budget``, its stored cells, and its prices."""

import importlib
import json

import numpy as np
import pytest

from benchmarks.budget import controlled, forecasts, other_sets, other_worlds
from benchmarks.budget.allocation import SHOWN, TARGET, gains, price
from benchmarks.budget.cells import Cells
from benchmarks.budget.enforcement import count_faults
from benchmarks.budget.keys import KEYS, PACKAGE
from benchmarks.training.keys import Options
from deltawire.cli.main import build_parser
from deltawire.wire.rollouts import Trajectory


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_the_command_takes_a_folder_and_seeds():
    arguments = build_parser().parse_args(["bench", "budget", "--json", "--cases", "2"])
    options = Options.of(arguments)
    assert (options.cases, options.out) == (2, "runs/bench-budget")


def test_a_cell_is_measured_once_and_a_missing_one_gives_none(tmp_path):
    cells, calls = Cells(tmp_path, seeds=range(2)), []

    def call():
        calls.append(1)
        return {"tokens": 5}

    for _ in range(2):
        assert cells.measure("fixed", 0, call) == {"tokens": 5}
    assert len(calls) == 1
    assert cells.all("fixed") is None
    cells.path("fixed", 1).write_text('{"tokens"')  # Cut off: it counts as missing.
    assert cells.all("fixed") is None
    cells.measure("fixed", 1, call)
    assert cells.all("fixed") == [{"tokens": 5}] * 2


def test_a_price_is_that_of_the_first_time():
    curve = [(10, 0.5), (20, 0.71), (30, 0.6), (40, 0.9)]
    assert price(curve, 0.7) == 20
    assert price(curve, 0.95) is None


@pytest.mark.parametrize(("theirs", "expected"), [([30, 40], [3.0, 2.0]), ([30, None], None)])
def test_gains_are_ratios_of_equal_seeds(tmp_path, theirs, expected):
    cells = Cells(tmp_path, seeds=range(2))
    for seed, (ours, other) in enumerate(zip([10, 20], theirs, strict=True)):
        for name, tokens in ((SHOWN, ours), ("fixed", other)):
            cells.path(name, seed).write_text(json.dumps({"tokens": {str(TARGET): tokens}}))
    assert gains(cells, "fixed", TARGET) == expected
    cells.path(SHOWN, 1).unlink()
    assert gains(cells, "fixed", TARGET) is None


def rising(middle):
    return [(step * 100, 0.2 + 0.6 / (1 + (middle / max(step, 1e-9)) ** 1.5)) for step in range(81)]


def test_a_forecast_is_scored_over_all_seeds_that_gain(tmp_path):
    cells = Cells(tmp_path / "forecast")
    options = Options(out=str(tmp_path), cases=0)
    for seed in range(4):
        cells.measure("forecast", seed, lambda: {"curve": rising(40.0)})
    missing = forecasts.measure(options)
    assert set(missing.values.values()) == {None}
    assert missing.details["halves"] is None
    cells.measure("forecast", 4, lambda: {"curve": rising(0.5)})  # It gains little.
    values, details = forecasts.measure(options)
    assert details["gaining"] == 4
    assert len(details["halves"]) == 5
    assert values["forecast_error"] < 0.03
    assert values["forecast_error_like"] < 0.03
    assert len(details["halves_like"]) == 5
    assert values["forecast_over_carried"] < 0.5


def test_runs_that_gain_nothing_score_nothing(tmp_path):
    cells = Cells(tmp_path / "forecast")
    for seed in range(5):
        cells.measure("forecast", seed, lambda: {"curve": rising(0.01)})
    values, details = forecasts.measure(Options(out=str(tmp_path), cases=0))
    assert set(values.values()) == {None}
    assert details["gaining"] == 0


def turn(text, mask):
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    size = len(data)
    return Trajectory(
        data, np.zeros(size, np.float32), np.zeros(size, np.int32), np.array(mask, np.uint8),
        0.0, "stop",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "mask", "found"),
    [
        (b"abso)yes", [1, 1, 0, 0, 0, 1, 1, 1], (0, 0, 1)),
        (b"abso)yes", [1, 1, 0, 0, 1, 1, 1, 1], (0, 1, 1)),
        (b"abcso)yes", [1, 1, 1, 0, 0, 0, 1, 1, 1], (1, 0, 1)),
        (b"ab)yes", [1] * 6, (0, 0, 0)),
        (b"abcd)yes", [1] * 8, (1, 0, 0)),
        (b"abcd", [1] * 4, (1, 0, 0)),
    ],
)
def test_faults_are_counted_from_the_tokens(text, mask, found):
    assert count_faults(turn(text, mask), budget=2) == found


def arm(accuracy, gain=0.1):
    return {"accuracy": accuracy, "area_start": 0.6, "area_end": 0.6 + gain}


def test_the_controller_is_compared_with_the_best_and_the_worst_of_all_seeds(tmp_path):
    cells = Cells(tmp_path, seeds=range(2))
    fixed = {"half": [0.5, 0.52], "default": [0.7, 0.71], "double": [0.97, 0.95]}
    for name, values in fixed.items():
        for seed, value in enumerate(values):
            cells.path(name, seed).write_text(json.dumps(arm(value, 0.1 + 0.1 * seed)))
    cells.path("auto", 0).write_text(json.dumps(arm(0.96)))
    missing = controlled.compare(cells).values
    assert missing["auto_vs_best_fixed"] is None
    assert missing["auto_vs_worst_fixed"] is None
    assert missing["area_gain"] == pytest.approx(0.15 / 0.05)

    cells.path("auto", 1).write_text(json.dumps(arm(0.96)))
    found = controlled.compare(cells)
    assert found.details["auto_vs_best_fixed"]["over"] == "double"
    assert found.details["auto_vs_worst_fixed"]["over"] == "half"
    assert found.details["auto_vs_best_fixed"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert found.values["auto_vs_worst_fixed"] == pytest.approx(0.45 / 0.01)


def test_a_noisy_difference_counts_no_more_than_two_points_of_error(tmp_path):
    cells = Cells(tmp_path, seeds=range(2))
    for name, values in {"half": [0.4, 0.4], "default": [0.5, 0.5], "double": [0.9, 0.9]}.items():
        for seed, value in enumerate(values):
            cells.path(name, seed).write_text(json.dumps(arm(value)))
    for seed, value in enumerate([0.9, 0.78]):  # 0.06 worse, give or take 0.06.
        cells.path("auto", seed).write_text(json.dumps(arm(value)))
    assert controlled.compare(cells).values["auto_vs_best_fixed"] == pytest.approx(-3.0)


def test_an_arm_of_a_made_up_world_pays_for_what_it_measures():
    """Longer thinking pays at once, so that the controller moves to it and stays."""
    fixed, auto = (
        other_worlds.run("logarithmic", "at once", arm, 3, 100_000) for arm in ("default", "auto")
    )
    assert (fixed["measured"], fixed["moves"], fixed["budget"]) == (0.0, 0, 8)
    assert auto["measured"] > 0.1
    assert (auto["moves"], auto["budget"]) == (1, 16)
    assert auto["accuracy"][8] < fixed["accuracy"][8]
    for cell in (fixed, auto):
        assert cell["accuracy"][4] < cell["accuracy"][8] < cell["accuracy"][16]


def test_a_made_up_world_says_when_longer_thinking_pays():
    shown = {}
    for pays in other_worlds.PAYS:
        world = other_worlds.World("two stages", pays, 0, 10)
        before = world.accuracy(16) - world.accuracy(4)
        for _ in range(15):
            world.step(16)
        shown[pays] = before, world.accuracy(16) - world.accuracy(4)
    assert shown["never"] == (0.0, 0.0)
    assert shown["late"][0] == 0.0
    assert shown["late"][1] > 0.2
    assert min(shown["at once"]) > 0.2


def test_a_controller_is_compared_with_the_best_fixed_budget_at_the_same_ones(monkeypatch):
    accuracies = {"half": 0.4, "default": 0.8, "double": 0.2, "auto": 0.6}

    def run(curve, pays, arm, seed, tokens):
        value = accuracies[arm] * (1 + 0.1 * seed)
        by_budget = {4: value, 8: value, 16: value}
        return {"accuracy": by_budget, "budget": 8, "moves": 1, "measured": 0.2}

    monkeypatch.setattr(other_worlds, "run", run)
    found = other_worlds.compare("two stages", "never", 1.0, range(3))
    assert found["best_fixed"] == "default"
    assert found["ratio"] == pytest.approx(0.75)
    assert found["error"] == pytest.approx(0.0, abs=1e-9)
    assert found["over"]["double"]["ratio"] == pytest.approx(3.0)


def test_allocation_is_compared_with_the_cheapest_arm_without_pilots(tmp_path):
    cells = Cells(tmp_path, seeds=range(2))
    arms = other_sets.RIVALS | other_sets.ALLOCATED
    for arm in arms:
        for seed, tokens in enumerate((800, 900)):
            scale = {"refill, 2 prompts": 0.5, "knapsack": 0.75}.get(arm, 1.0)
            text = json.dumps({"tokens": tokens * scale, "reached": seed == 0})
            cells.path(f"hard, {arm}", seed).write_text(text)
    found = other_sets.compare(cells, "hard")
    assert found["cheapest"] == "refill, 2 prompts"
    assert found["gains"]["knapsack"]["gain"] == pytest.approx(2 / 3)
    assert found["reached"]["knapsack"] == 1
    cells.path("hard, knapsack", 1).unlink()
    assert other_sets.compare(cells, "hard") is None


def test_a_wrong_checker_flips_its_share_of_the_rewards(monkeypatch):
    monkeypatch.setattr(other_sets, "PROMPTS", 2)
    monkeypatch.setattr("benchmarks.budget.allocation.PROMPTS", 2)
    rates, rules = (0.5,), other_sets.ALLOCATED["knapsack"][0]
    session = other_sets.TableSession(rules, 0, step=2, rates=rates, wrong=1.0)
    session._logprobs = np.full((2, 264), np.log(1 / 264))
    right = 48 + session.set.right[0]
    for t in session.complete(0, 500):
        assert t.reward == float(t.tokens_T[0] != right)
    before = session.set.pass_rates().mean()
    assert 0 <= session.train() <= 1
    assert session.set.pass_rates().mean() != before
