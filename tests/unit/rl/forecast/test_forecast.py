"""Forecasts: known curves are found, bands hold them, and too little is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.cli.main import main
from deltawire.config import parse_config
from deltawire.dashboard.forecast_view import plot_forecast
from deltawire.dashboard.series import notes
from deltawire.dashboard.state import RunState
from deltawire.errors import InputError
from deltawire.estimates import FamilyCounts
from deltawire.events import Evaluated, Step, encode_lines
from deltawire.rl.forecast import stop_rule
from deltawire.rl.forecast.forecast import backtest_of, forecast_of, read_curve
from deltawire.rl.forecast.sigmoid import CurvePrior, SigmoidFit
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec

RAW = {
    "name": "run",
    "model": {"build": {}},
    "evaluate": {"every": 5},
    "budget": {"stop_when": 0.02},
}
CONFIG = parse_config(RAW, source="s")


def curve(compute, start, plateau, middle, steepness):
    with np.errstate(divide="ignore"):
        return start + (plateau - start) / (1 + (middle / np.asarray(compute)) ** steepness)


def step(version, reward=0.5):
    return Step(
        process="trainer", at=float(version), version=version, groups=4, dropped=1,
        reward_mean=reward, loss=0.0, grad_norm=1.0, k3=0.0, ratio_max=1.0, clipped=0.0,
        staleness=[], tokens=100, seconds=2.0,
        families={"a": FamilyCounts(trained=4, trained_tokens=150, dropped=1, dropped_tokens=50)},
    )  # fmt: skip


def evaluated(version, accuracy):
    return Evaluated(
        process="evaluator", at=float(version), version=version, accuracy=accuracy, problems=400,
        seconds=1.0,
    )  # fmt: skip


def events_of_run(last=60, plateau=0.8, middle=6000.0):
    at = np.arange(0, last + 1, 5)
    levels = curve(at * 300.0, 0.2, plateau, middle, 1.5)
    return [step(version) for version in range(1, last + 1)] + [
        evaluated(int(version), float(level)) for version, level in zip(at, levels, strict=True)
    ]


@given(
    st.floats(0.0, 0.4), st.floats(0.5, 0.95), st.floats(0.1, 0.6), st.floats(0.8, 3.0),
    st.integers(8, 40),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_a_curve_past_its_middle_is_found(start, plateau, middle, steepness, count):
    at = np.linspace(0, 1, count)
    seen = curve(at, start, plateau, middle, steepness)
    fit = SigmoidFit(at, seen, floor=0.0, ceiling=1.0)
    assert fit.plateau.low - 0.04 <= plateau <= fit.plateau.high + 0.04
    truth = curve([2.0], start, plateau, middle, steepness)[0]
    assert abs(fit.at(2.0).median - truth) < 0.06
    assert fit.gain(2.0).low >= 0.0
    assert 0.0 <= fit.at(0.5).low <= fit.at(0.5).median <= fit.at(0.5).high <= 1.0


def test_intervals_hold_what_follows_as_often_as_they_say():
    rng = np.random.default_rng(7)
    held, missed, carried = [], [], []
    for _ in range(60):
        start = rng.uniform(0, 0.4)
        plateau = rng.uniform(start + 0.1, 1.0)
        middle = np.exp(rng.uniform(np.log(0.15), np.log(2)))
        at = np.linspace(0, 1, 24)
        truth = curve(at, start, plateau, middle, np.exp(rng.normal(np.log(1.5), 0.4)))
        seen = np.clip(truth + rng.normal(0, 0.01, 24), 0, 1)
        fit = SigmoidFit(at[:12], seen[:12], floor=0.0, ceiling=1.0)
        found = [fit.at(x) for x in at[12:]]
        held += [one.low <= y <= one.high for one, y in zip(found, truth[12:], strict=True)]
        if seen[-1] - seen[11] >= 0.1:
            missed.append(np.median([abs(f.median - y) for f, y in zip(found, seen[12:])]))  # noqa: B905
            carried.append(np.median(np.abs(seen[11] - seen[12:])))
    assert 0.8 <= np.mean(held) <= 0.99
    assert np.median(missed) <= 0.03 < np.median(carried)


def wandering(rng, count, size, correlation):
    """Residuals that follow one another."""
    found = rng.normal(0, size, count)
    for place in range(1, count):
        found[place] = correlation * found[place - 1] + found[place] * (1 - correlation**2) ** 0.5
    return found


def test_intervals_hold_what_follows_a_run_that_wanders():
    """Thirty measurements that lie above or below the curve for some time are not thirty."""
    rng, held = np.random.default_rng(3), []
    at = np.linspace(0, 1, 60)
    for _ in range(40):
        truth = curve(at, 0.2, rng.uniform(0.5, 0.9), rng.uniform(0.2, 1.0), 1.2)
        seen = np.clip(truth + wandering(rng, 60, 0.01, 0.8), 0, 1)
        fit = SigmoidFit(at[:30], seen[:30], floor=0.0, ceiling=1.0)
        found = [fit.at(x) for x in at[30:]]
        held += [one.low <= y <= one.high for one, y in zip(found, truth[30:], strict=True)]
    assert 0.75 <= np.mean(held) <= 0.99


def run_like(rng, *, last):
    """One of several runs of a kind: their parameters differ a little."""
    at = np.linspace(0, last, 16)
    plateau, middle = rng.normal(0.75, 0.02), np.exp(rng.normal(np.log(0.6), 0.1))
    truth = curve(at, 0.2, plateau, middle, np.exp(rng.normal(np.log(1.2), 0.05)))
    return at, np.clip(truth + rng.normal(0, 0.015, 16), 0, 1)


def test_earlier_runs_say_what_a_first_half_does_not():
    rng = np.random.default_rng(11)
    earlier = [SigmoidFit(*run_like(rng, last=1.0), floor=0.0, ceiling=1.0) for _ in range(4)]
    prior = CurvePrior.of(earlier)
    assert prior.runs == 4
    alone, informed, widths = [], [], []
    for _ in range(12):
        at, seen = run_like(rng, last=1.0)
        for errors, known in ((alone, None), (informed, prior)):
            fit = SigmoidFit(at[:6], seen[:6], floor=0.0, ceiling=1.0, prior=known)
            found = [fit.at(x) for x in at[6:]]
            errors.append(np.mean([abs(one.median - y) for one, y in zip(found, seen[6:])]))  # noqa: B905
            widths.append((known is not None, found[-1].high - found[-1].low))
    assert np.median(informed) < 0.85 * np.median(alone)
    assert np.mean([w for known, w in widths if known]) < np.mean([w for k, w in widths if not k])


def test_a_prior_of_other_runs_gives_way_to_measurements():
    """Four runs that ended at 0.75 say little of one that has passed its middle at 0.45."""
    rng = np.random.default_rng(11)
    earlier = [SigmoidFit(*run_like(rng, last=1.0), floor=0.0, ceiling=1.0) for _ in range(4)]
    at = np.linspace(0, 6, 40)
    seen = curve(at, 0.2, 0.45, 0.3, 1.5)
    fit = SigmoidFit(at, seen, floor=0.0, ceiling=1.0, prior=CurvePrior.of(earlier))
    assert abs(fit.at(12.0).median - 0.45) < 0.02


def test_a_prior_of_one_run_is_wide():
    rng = np.random.default_rng(2)
    fit = SigmoidFit(*run_like(rng, last=1.0), floor=0.0, ceiling=1.0)
    one, four = CurvePrior.of([fit]), CurvePrior.of([fit] * 4)
    assert (np.diag(one.covariance) > np.diag(four.covariance)).all()
    assert one.mean == pytest.approx(four.mean)
    with pytest.raises(InputError, match="at least one earlier run"):
        CurvePrior.of([])


def test_noise_alone_widens_the_band():
    at = np.linspace(0, 1, 10)
    seen = curve(at, 0.2, 0.8, 0.4, 1.5)
    sure = SigmoidFit(at, seen, floor=0.0, ceiling=1.0).gain(2.0)
    unsure = SigmoidFit(at, seen, floor=0.0, ceiling=1.0, noise=0.05).gain(2.0)
    assert unsure.high - unsure.low > 1.5 * (sure.high - sure.low)


@pytest.mark.parametrize(
    ("compute", "values", "words"),
    [
        ([0, 1, 2], [0.1, 0.2, 0.3], "needs 5 measurements"),
        ([0, 1, 2, 2, 3], [0.1] * 5, "does not rise"),
        ([-1, 1, 2, 3, 4], [0.1] * 5, "does not rise"),
        ([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4, float("nan")], "not a finite number"),
        ([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4, 1.4], "outside"),
        ([0, 1, 2, 3, 4], [0.1] * 4, "differ in number"),
    ],
)
def test_what_cannot_be_fitted_is_refused(compute, values, words):
    with pytest.raises(InputError, match=words):
        SigmoidFit(compute, values, floor=0.0, ceiling=1.0)


def test_compute_counts_sampled_dropped_and_trained_tokens():
    found = read_curve(events_of_run(10), CONFIG, measure="accuracy", unit="tokens")
    assert [one.compute for one in found.points] == [0.0, 1500.0, 3000.0]
    seconds = read_curve(events_of_run(10), CONFIG, measure="accuracy", unit="seconds")
    assert [one.compute for one in seconds.points] == [0.0, 10.0, 20.0]
    later = read_curve(events_of_run(10), CONFIG, measure="accuracy", unit="versions", first=5)
    assert [one.compute for one in later.points] == [5.0, 10.0]


def test_a_lost_step_costs_the_mean_and_a_repeated_one_counts_once():
    events = [one for one in events_of_run(10) if one.version != 3 or isinstance(one, Evaluated)]
    found = read_curve([*events, step(2)], CONFIG, measure="accuracy", unit="tokens")
    assert found.points[-1].compute == 3000.0


def test_rewards_are_averaged_in_bins():
    steps = [step(version, 0.2 + 0.001 * version) for version in range(1, 201)]
    found = read_curve(steps, CONFIG, measure="reward", unit="versions")
    assert len(found.points) == 40
    assert found.points[0].value == pytest.approx(np.mean([0.2 + 0.001 * v for v in range(1, 6)]))
    assert (found.floor, found.ceiling) == (0.0, 1.0)


def test_a_forecast_of_a_run_and_its_second_half():
    found = forecast_of(read_curve(events_of_run(), CONFIG, measure="accuracy", unit="tokens"))
    truth = curve([36_000.0], 0.2, 0.8, 6000.0, 1.5)[0]
    assert found.doubled.low <= truth <= found.doubled.high
    assert found.plateau.low <= 0.8 <= found.plateau.high
    assert found.gain.median == pytest.approx(found.doubled.median - found.now.median, abs=0.01)
    assert not found.falling
    assert found.backtest is not None
    assert found.backtest.error < found.backtest.carried_error
    assert found.band[-1].compute == 2 * found.compute


def test_a_curve_that_never_rose_is_not_near_its_plateau():
    steps = [step(version, reward=0.0) for version in range(1, 17)]
    found = forecast_of(read_curve(steps, CONFIG, measure="reward", unit="tokens"))
    assert found.plateau.high > 0.5, "it may still rise"
    assert found.reached < 0.1


def test_a_fall_is_named():
    events = events_of_run()
    fallen = [evaluated(version, 0.3) for version in (65, 70, 75)]
    steps = [step(version) for version in range(61, 76)]
    found = read_curve([*events, *steps, *fallen], CONFIG, measure="accuracy", unit="tokens")
    assert forecast_of(found).falling


def test_few_measurements_have_no_backtest():
    assert (
        backtest_of(read_curve(events_of_run(25), CONFIG, measure="accuracy", unit="tokens"))
        is None
    )


def stored_run(tmp_path, events, raw=RAW):
    bucket = open_bucket(f"{tmp_path}/bucket", create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket,
        Run(id="ab" * 16, name="run", created_at=0.0, tensors=tensors, digest="0" * 32, config=raw),
    )
    store_events(bucket, events)
    return bucket


def store_events(bucket, events, segment=0):
    for process in ("trainer", "evaluator"):
        lines = encode_lines(one for one in events if one.process == process)
        bucket.put(keys.events(f"{process}-1", segment), lines)


def test_the_command_prints_and_draws(tmp_path, capsys):
    bucket = stored_run(tmp_path, events_of_run())
    picture = tmp_path / "forecast.svg"
    assert main(["forecast", bucket.url, "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measure"] == "accuracy"
    assert found["version"] == 60
    assert found["plateau"]["low"] <= 0.8 <= found["plateau"]["high"]
    assert picture.read_text().lstrip().startswith("<?xml")
    assert main(["forecast", bucket.url, "--of", "reward", "--compute", "seconds"]) == 0
    assert "with twice the compute" in capsys.readouterr().out


def test_earlier_runs_are_read(tmp_path, capsys):
    now = stored_run(tmp_path, events_of_run(30))
    places = [str(tmp_path / name) for name in ("one", "two")]
    for place in places:
        stored_run(Path(place), events_of_run(60))
    like = [word for place in places for word in ("--like", f"{place}/bucket")]
    assert main(["forecast", now.url, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main(["forecast", now.url, "--json", *like]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (alone["like"], found["like"]) == (0, 2)
    width = [one["doubled"]["high"] - one["doubled"]["low"] for one in (alone, found)]
    assert width[1] < width[0]
    assert main(["forecast", now.url, *like]) == 0
    assert "with what 2 earlier runs say" in " ".join(capsys.readouterr().out.split())


def test_an_earlier_run_with_too_little_is_named(tmp_path, capsys):
    now = stored_run(tmp_path, events_of_run())
    short = stored_run(tmp_path / "short", events_of_run(10))
    assert main(["forecast", now.url, "--like", short.url]) != 0
    said = capsys.readouterr().err
    assert "a forecast needs 5 measurements" in said
    assert "short" in said


@pytest.mark.parametrize(
    ("events", "options", "words"),
    [
        (events_of_run(10), [], "a forecast needs 5 measurements"),
        (events_of_run(20), ["--from", "10"], "there are 3"),
        (events_of_run(), ["--of", "area"], "no area to forecast"),
        ([], [], "no accuracy to forecast"),
        (events_of_run(), ["--plot", "x.txt"], "--plot x.txt"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, events, options, words):
    bucket = stored_run(tmp_path, events)
    assert main(["forecast", bucket.url, *options]) != 0
    assert words in capsys.readouterr().err


def test_a_forecast_of_three_points_is_refused(tmp_path, capsys):
    bucket = stored_run(tmp_path, events_of_run(10))
    assert main(["forecast", bucket.url, "--json"]) == 2
    said = capsys.readouterr().err
    assert "a forecast needs 5 measurements, one more than the sigmoid has parameters" in said
    assert "there are 3" in said
    assert "evaluate.every" in said


def test_a_picture_shows_a_forecast_of_any_name(tmp_path):
    found = forecast_of(read_curve(events_of_run(), CONFIG, measure="accuracy", unit="versions"))
    plot_forecast(found, "$x_{", tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_a_run_ends_once_more_compute_buys_too_little(tmp_path):
    bucket = stored_run(tmp_path, events_of_run(20, middle=2000.0))
    recorded = []
    rule = stop_rule.StopRule(bucket, CONFIG, recorded.append)
    rule.stepped(20)
    assert not rule.reached
    assert len(recorded) == 1
    rule.stepped(21)  # nothing new was measured
    assert len(recorded) == 1
    more = events_of_run(200, middle=2000.0)
    store_events(bucket, [one for one in more if one.version > 20], segment=1)
    rule.stepped(25)
    assert rule.reached
    newest = recorded[-1]
    assert newest.stops
    assert newest.gain[2] < newest.limit
    assert newest.version == 200
    state = RunState()
    state.add(recorded)
    assert state.newest_forecast == newest
    assert "finished below 0.02" in notes(state)[0].text


def test_without_the_setting_nothing_is_forecast(tmp_path):
    bucket = stored_run(tmp_path, events_of_run(200))
    recorded = []
    rule = stop_rule.StopRule(
        bucket, parse_config({**RAW, "budget": {}}, source="s"), recorded.append
    )
    rule.stepped(50)
    assert not rule.reached
    assert not recorded


def test_too_little_stops_nothing(tmp_path):
    recorded = []
    rule = stop_rule.StopRule(stored_run(tmp_path, events_of_run(10)), CONFIG, recorded.append)
    rule.stepped(10)
    assert not rule.reached
    assert not recorded


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate": {"every": 0}}, "evaluate.every is 0"),
        ({"budget": {"stop_when": 0.1, "measure": "area"}}, "without evaluate.budgets"),
        ({"midtrain": {"streams": [{"path": "x"}]}}, "midtrain"),
    ],
)
def test_a_stop_rule_without_measurements_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        parse_config({**RAW, **changes}, source="s")
