"""``deltawire simulate``: what it amounts to, what it refuses, and the report and its picture."""

import json
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deltawire.cli.main import main
from deltawire.config import load_config
from deltawire.dashboard.simulation import Simulated, lines_of, report_of, write_simulation
from deltawire.launch import simulate as simulate_module
from deltawire.launch.simulate import LiveStack, SimulationOptions
from deltawire.store import open_bucket
from deltawire.testing.users import Population
from deltawire.testing.users.driver import DriveResult, ServedNote
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.objects import encode_json

ROOT = Path(__file__).parents[3]
WITHOUT_RELEASES = str(ROOT / "benchmarks" / "live" / "users.toml")
EXAMPLE = str(ROOT / "examples" / "live.toml")


def note(at, satisfaction, *, version=0, arm="serving", style="brief"):
    return ServedNote(
        at=at, took_s=0.1, kind="mail", style=style, role="honest", satisfaction=satisfaction,
        version=version, arm=arm, propensity=1.0,
    )  # fmt: skip


def test_a_dry_run_states_what_it_amounts_to_and_starts_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["simulate", WITHOUT_RELEASES, "--out", str(out), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == 3600.0
    assert found["versions_at_most"] == 112
    assert found["indifferent"] < 0.55 < 0.85 < found["optimum"]
    assert not out.exists()
    assert main(["simulate", WITHOUT_RELEASES, "--dry-run", "--seconds", "60"]) == 0
    assert "versions at most" in capsys.readouterr().out
    assert main(["simulate", WITHOUT_RELEASES, "--dry-run", "--requests", "70", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"] == 70


def test_a_dry_run_states_what_a_release_needs(tmp_path, capsys):
    assert main(["simulate", EXAMPLE, "--dry-run", "--rate", "10", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["release"]
    stage = plan["stages"][0]
    assert (stage["share"], plan["margin"], plan["power"]) == (0.5, 0.1, 0.9)
    assert stage["answers"] > stage["outcomes"] > 500  # Some users ask twice.
    assert plan["minutes"] == pytest.approx((stage["answers"] / 10 + 8 + 2) / 60)
    few = tmp_path / "few.toml"
    few.write_text(Path(EXAMPLE).read_text().replace("users = 20000", "users = 200"))
    assert main(["simulate", str(few), "--dry-run"]) == 0
    assert "more users than there are" in capsys.readouterr().out
    few.write_text(Path(EXAMPLE).read_text().replace("\nevery = 4\n", "\nevery = 0\n"))
    assert main(["simulate", str(few), "--dry-run"]) == 2
    assert "needs releases" in capsys.readouterr().err
    assert main(["simulate", WITHOUT_RELEASES, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["release"] is None


def test_what_cannot_be_simulated_is_refused(tmp_path, capsys):
    other = tmp_path / "other.toml"
    text, released = Path(WITHOUT_RELEASES).read_text(), Path(EXAMPLE).read_text()
    cases = [
        (
            re.sub("planted = {.*}", "planted = { gate = 12, users = 20 }", released),
            [],
            "12 and 20",
        ),
        *((text, [f"--seconds={value}"], "above 0") for value in ("0", "-1", "nan", "inf", "1e99")),
        *((text, [f"--rate={value}"], "above 0") for value in ("0", "nan", "1e99")),
        (text, ["--requests=0"], "--requests must be from 1"),
        (text.replace('"given"', '"group_mean"'), [], "given"),
        (
            text.replace('"simulated_users"', '"reasoning_gym"').replace("options", "# "),
            [],
            "simul",
        ),
    ]
    for content, more, words in cases:
        other.write_text(content)
        assert main(["simulate", str(other), "--dry-run", *more]) == 2
        assert words in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "missing.toml"), "--dry-run"]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err
    for place in (other, other / "below"):
        assert main(["simulate", EXAMPLE, "--out", str(place)]) == 2
        assert "is not a folder; choose another --out" in capsys.readouterr().err
    (tmp_path / "out" / "bucket").mkdir(parents=True)
    assert main(["simulate", EXAMPLE, "--out", str(tmp_path / "out")]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_the_report_compares_the_ends_and_the_picture_shows_arms_and_decisions(tmp_path):
    bucket, began = open_bucket("memory://"), time.time()
    answers = [LearnedAnswer(f"{n:032x}", "", 1.0, 0.5, 1.0, age) for n, age in enumerate((3, 99))]
    bucket.put(
        keys.live_lineage("live", 0),
        encode_json(Lineage(worker="live", sequence=0, at=began, answers=answers)),
    )
    bucket.put(
        keys.live_gateway("g0"),
        encode_json(
            GatewayState(
                gateway="g0", run="a" * 32, public_key="b" * 64, started=began, at=began,
                counts={"captures_lost": 2.0},
            )
        ),
    )  # fmt: skip
    decision = Decision(
        number=0, run="a" * 32, verdict="canary", serving=ServedVersion(0, "c" * 32),
        candidate=ServedVersion(4, "d" * 32), share=0.25, at=began + 40, by="g0", reason="passed",
    )  # fmt: skip
    bucket.put(f"{keys.LIVE_DECISIONS}{0:010}.json", encode_json(decision))
    notes = [note(n, 0.4 if n % 2 else 0.5, arm="serving") for n in range(20)]
    notes += [note(80 + n, 0.7 if n % 2 else 0.8, version=4, arm="candidate") for n in range(20)]
    result = DriveResult(notes, Counter(asked=41, failed=1, reports=30))
    done = Simulated("live", Population(), result, bucket, began, 100.0)
    report = report_of(done)
    assert report.gain == pytest.approx(0.3)
    assert report.gain_se == pytest.approx((2 * 0.05**2 / 19) ** 0.5)
    assert report.trained_by_age == {"≤ 5 s": 1, "> 80 s": 1}
    assert (report.versions, report.captures_lost, report.failed) == (4, 2.0, 1)
    assert report.arms == {"serving": 20, "candidate": 20}
    assert report.decisions[0].at == pytest.approx(40.0)
    picture = write_simulation(report, notes, tmp_path).read_text()
    for words in ("canary", "candidate", "best policy", "v4"):
        assert words in picture
    assert json.loads((tmp_path / "live.json").read_bytes())["gain"] == pytest.approx(0.3)
    assert len((tmp_path / "notes.jsonl").read_text().splitlines()) == 40
    assert any("canary" in value for _, value in lines_of(report))
    answers = dict(lines_of(report))["answers"]
    assert answers == "40 of 41 requests in 100 s, 1 failed, 0 turned away, 0 waited for a place"
    assert report.failures == []
    lost = msgspec.structs.replace(report, first=0.75, last=0.45, gain=-0.3)
    assert lost.failures == ["users are less satisfied: 0.750 → 0.450"]
    assert msgspec.structs.replace(lost, gain_se=0.11).failures == []  # It may be chance.


def test_the_report_tells_what_became_of_each_candidate(tmp_path):
    bucket, began = open_bucket("memory://"), time.time()
    zero, four, eight, nine = (ServedVersion(v, f"{v:032x}") for v in (0, 4, 8, 9))
    story = [
        ("serve", zero, None, 0, 0.0),
        ("gate", zero, four, 10, 0.0),
        ("rollback", zero, four, 12, 0.0),
        ("promote", nine, None, 14, 0.0),
        ("gate", nine, eight, 20, 0.0),
        ("canary", nine, eight, 21, 0.25),
        ("rollback", nine, eight, 50, 0.0),
        ("gate", nine, ServedVersion(12, "c" * 32), 60, 0.0),
        ("canary", nine, ServedVersion(12, "c" * 32), 61, 0.25),
        ("promote", ServedVersion(12, "c" * 32), None, 80, 0.0),
        ("gate", ServedVersion(12, "c" * 32), ServedVersion(16, "d" * 32), 90, 0.0),
    ]
    for number, (verdict, serving, candidate, at, share) in enumerate(story):
        made = Decision(
            number=number, run="a" * 32, verdict=verdict, serving=serving, candidate=candidate,
            share=share, at=began + at, by="g0", reason="because",
        )  # fmt: skip
        bucket.put(f"{keys.LIVE_DECISIONS}{number:010}.json", encode_json(made))
    notes = [note(30, 0.2, version=8, arm="candidate"), note(31, 0.5), note(55, 0.9)]
    result = DriveResult(notes, Counter(asked=3))
    planted = {"gate": 3, "users": 11}
    report = report_of(Simulated("live", Population(), result, bucket, began, 100.0, planted))
    told = [(one.version, one.planted, one.outcome, one.answers) for one in report.candidates]
    assert told == [
        (4, "gate", "stopped by the gate", 0),
        (8, "", "rolled back", 1),
        (12, "users", "promoted", 0),
        (16, "", "undecided", 0),
    ]
    assert (report.candidates[1].satisfaction, report.candidates[1].serving) == (0.2, 0.5)
    assert [one.seconds for one in report.candidates] == pytest.approx([2, 30, 20, 10], abs=0.01)
    assert report.failures == ["candidate 12, planted for users, was promoted"]
    rows = dict(lines_of(report))
    assert rows["candidate 8"] == "rolled back after 30 s; satisfaction 0.200, of others 0.500"
    assert rows["candidate 4"] == "stopped by the gate after 2 s, planted: gate"
    assert not [name for name in rows if name.startswith("planted")]
    early = msgspec.structs.replace(report, candidates=report.candidates[:2])
    assert dict(lines_of(early))["planted: users"].startswith("version 11 was in no candidate")


def test_a_failure_is_said_and_ends_with_a_code(tmp_path, monkeypatch, capsys):
    result = DriveResult([note(at, 0.9 - 0.008 * at) for at in range(100)], Counter(asked=100))
    bucket = open_bucket("memory://")
    report = report_of(Simulated("live", Population(), result, bucket, time.time(), 100.0))
    monkeypatch.setattr("deltawire.launch.simulate.simulate", lambda *_, **__: report)
    for options in ([], ["--json"]):
        assert main(["simulate", EXAMPLE, "--out", str(tmp_path), *options]) == 13
        said = capsys.readouterr()
        assert said.err == "failed: users are less satisfied: 0.824 → 0.184\n"
        assert "less satisfied" not in said.out


@pytest.mark.parametrize(("hold_back", "count"), [(0.0, 2), (0.05, 3)])
def test_a_hold_back_version_has_a_replica(tmp_path, monkeypatch, hold_back, count):
    config = load_config(Path(EXAMPLE))
    release = msgspec.structs.replace(config.live.release, hold_back=hold_back)
    live = msgspec.structs.replace(config.live, release=release)
    stack = LiveStack(
        msgspec.structs.replace(config, live=live), Path(EXAMPLE), SimulationOptions(out=tmp_path)
    )
    started = []

    def command(name, *arguments, log=""):
        started.append(name)
        return SimpleNamespace(url=lambda: f"http://replica-{len(started)}")

    monkeypatch.setattr(stack, "_command", command)
    monkeypatch.setattr(simulate_module, "take_decision", lambda *_: None)
    arguments = stack._replicas(open_bucket("memory://"))
    assert started.count("replica") == arguments.count("--replica") == count
    assert started.count("live") == 1
