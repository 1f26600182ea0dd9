"""The frame of ``deltawire bench live``."""

import importlib
import sys

import msgspec
import pytest

from benchmarks.live import bandit, releases, satisfaction, seeds
from benchmarks.live.delays import lost_rejections
from benchmarks.live.freshness import lag_of
from benchmarks.live.influence import CAP, largest_share
from benchmarks.live.keys import KEYS, PACKAGE
from benchmarks.live.lagged import kept_gain
from benchmarks.live.seeds import Ended
from benchmarks.training.keys import Options, choose_keys
from deltawire.cli.main import build_parser
from deltawire.dashboard.simulation import CandidateNote, SimulationReport


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def report_of_seed(gain):
    return SimulationReport(
        name="live", seed=0, seconds=1.0, answers=1, failed=0, reports=1, first=0.4,
        last=0.4 + gain, gain=gain, gain_se=0.1, indifferent=0.4, optimum=0.9, versions=3,
        trained=4, captures_lost=0.0, feedback_lost=0.0,
    )  # fmt: skip


def test_a_missing_seed_is_null_and_only_missing_ones_are_measured(tmp_path, monkeypatch):
    ran = []

    def run_seed(folder, seed, **_):
        ran.append(seed)
        if seed != 3:  # This one fails.
            folder.mkdir(parents=True, exist_ok=True)
            report = report_of_seed(0.2 + 0.01 * seed)
            (folder / "live.json").write_bytes(msgspec.json.encode(report))

    monkeypatch.setattr(satisfaction, "run_seed", run_seed)
    options = Options(out=str(tmp_path), repeats=4)
    first = satisfaction.measure(options)
    assert (ran, first.values["satisfaction_gain"]) == ([0, 1, 2, 3], None)
    assert [cell is None for cell in first.details["seeds"].values()] == [False] * 3 + [True] * 2
    assert "[3, 4]" in first.details["missing"]
    (tmp_path / "seed-3").mkdir()
    (tmp_path / "seed-3" / "live.json").write_text("{half")
    assert satisfaction.measure(options).values["satisfaction_gain"] is None
    assert ran == [0, 1, 2, 3, 3, 4]
    (tmp_path / "seed-3" / "live.json").write_bytes(msgspec.json.encode(report_of_seed(0.23)))
    whole = satisfaction.measure(options)
    assert ran == [0, 1, 2, 3, 3, 4]
    assert whole.values["satisfaction_gain"] == pytest.approx(0.22)
    error = (2.5 * 0.01**2 / 5) ** 0.5
    assert whole.details["standard_error"] == pytest.approx(error)
    assert whole.values["satisfaction_gain_errors"] == pytest.approx(0.22 / error)


def candidate(planted, outcome):
    return CandidateNote(8, planted, outcome, 30.0, 100, 0.5, 0.5)


STOPPED = [candidate("gate", "stopped by the gate"), candidate("users", "rolled back")]


@pytest.mark.parametrize(
    ("candidates", "gain", "code", "right"),
    [
        (STOPPED, 0.2, 0, True),
        ([*STOPPED, candidate("", "promoted")], 0.2, 0, True),
        (STOPPED, 0.09, 0, False),
        (STOPPED, 0.2, 13, False),
        (STOPPED[:1], 0.2, 0, False),
        ([*STOPPED, candidate("users", "promoted")], 0.2, 0, False),
        ([STOPPED[0], candidate("users", "undecided")], 0.2, 0, False),
    ],
)
def test_a_run_of_releases_is_right_if_both_plants_were_stopped(candidates, gain, code, right):
    report = msgspec.structs.replace(
        report_of_seed(gain), candidates=candidates, counts={"asked": 10, "turned_away": 3}
    )
    row = releases.row_of(report, Ended(code, "", 9.0, 2.0), ["gate", "users"])
    assert row["right"] is right
    assert (row["asked"], row["turned_away"], row["load"]) == (10, 3, 2.0)
    assert not releases.row_of(None, Ended(7, "ratios", 1.0, 2.0), ["gate"])["right"]


def test_a_seed_of_releases_is_run_once_and_says_how_it_ended(tmp_path, monkeypatch):
    words = "import sys; sys.stderr.write('ratios explode'); sys.exit(7)"
    monkeypatch.setattr(seeds, "COMMAND", (sys.executable, "-c", words))
    options = Options(out=str(tmp_path), repeats=1)
    first = releases.measure(options)
    assert first.values == {"releases_right": None}
    row = first.details["seeds"]["0"]
    assert (row["right"], row["code"], row["said"]) == (False, 7, "ratios explode")
    assert first.details["seeds"]["1"] is None
    again = releases.measure(options)
    assert again.details["seeds"]["0"] == row
    assert again.details["seeds"]["1"]["code"] == 7


def test_a_seed_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    seeds.run_seed(
        tmp_path / "0", 0, config=releases.EXAMPLE, span=("--requests", "9"), limit_s=0.2
    )  # fmt: skip
    assert seeds.read_ended(tmp_path / "0").code is None
    assert seeds.read_report(tmp_path / "0") is None


def test_the_bandit_learns_what_honest_users_like():
    learned = bandit.learn(bandit.HONEST, bandit.config_of(), seconds=40)
    assert learned.trained >= 10 * bandit.GROUP
    assert learned.gain > 0.05
    assert learned.of_attackers == 0


def test_a_seed_of_the_lagged_sweep_is_measured_once(tmp_path):
    asked = []

    def gain(seed):
        asked.append(seed)
        return 0.25 + seed

    found = [kept_gain(seed, str(tmp_path / "out"), gain) for seed in (1, 2, 1)]
    assert (found, asked) == ([1.25, 2.25, 1.25], [1, 2])
    assert kept_gain(1, "", gain) == 1.25
    assert asked == [1, 2, 1], "nothing is kept without a folder"


def test_the_bandit_learns_from_edits_only():
    users = msgspec.structs.replace(bandit.HONEST, rewrites=0.6)
    learned = bandit.learn(users, bandit.config_of(bandit.PAIRS), seconds=60)
    assert learned.trained >= bandit.GROUP
    assert learned.gain > 0.1
    without = bandit.learn(bandit.HONEST, bandit.config_of(bandit.PAIRS), seconds=30)
    assert (without.trained, without.gain) == (0, 0), "no user sent an edit"


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_a_long_answer_has_no_more_of_the_gradient_than_the_cap(aggregation):
    assert largest_share(0, 20, aggregation) <= 1.01 * CAP
    assert largest_share(0, 20, aggregation, capped=False) > 0.2


def test_answers_are_trained_on_fresh_where_they_were_old_before():
    paced, before = lag_of(0, 4, seconds=80), lag_of(0, 4, seconds=80, paced=False)
    assert sum(paced.lags) / len(paced.lags) <= 1.5
    assert paced.dropped == 0
    assert len(paced.lags) >= 200
    assert sum(before.lags) / len(before.lags) > 2


def test_late_rejections_are_not_taken_for_silence():
    world = "accept 10 s, reject 300 s"
    lost, used = lost_rejections(world, 0)
    assert lost <= 0.05
    assert used > 0.9
    assert lost_rejections(world, 0, by_kind=False)[0] > 0.2


def test_the_command_takes_keys():
    assert choose_keys("captures_lost", KEYS) == ["captures_lost"]
    arguments = build_parser().parse_args(["bench", "live", "--json", "--keys", "captures_lost"])
    assert (arguments.benchmark, arguments.keys, arguments.json) == ("live", "captures_lost", True)
