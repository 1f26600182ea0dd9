"""Probes on live data: a reward that users give to answers that do not help is flagged."""

import json
import time

import msgspec
import pytest
from live_answers import NOW, answer, config_of, put_rows, report
from live_gateway import published

from deltawire.cli.exit_codes import FLAGGED
from deltawire.cli.main import main
from deltawire.live.release.live_probes import monitor_live, probes_of
from deltawire.reward_monitor.watch import figures_of
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.captures import FAILED

AFTER_S = 60.0


@pytest.fixture
def bucket():
    return open_bucket("memory://", create=True)


def config(**release):
    release = {"outcome_after_s": AFTER_S, **release}
    return config_of(rewards={"accept": 1.0, "reject": -1.0}, silent=0.0, release=release)


def streams(bucket, settings=None, *, now=NOW + 1e6):
    state = monitor_live(bucket, settings or config(), now=now)
    return {(one.family, one.probe): one for one in state.streams}


def fill(bucket, count, *, marks=lambda number: [], kind=lambda number: "accept", **changes):
    """Answers that users report on, a second apart."""
    answers = [answer(n, at=NOW + n, marks=marks(n), task="chat", **changes) for n in range(count)]
    reports = [report(n, kind(n), at=NOW + n) for n in range(count)]
    put_rows(bucket, 0, answers, reports)


def test_users_who_reward_refusals_are_noticed_with_answers_to_look_at(bucket):
    fill(bucket, 60, marks=lambda n: ["refusal"] if n >= 20 else [])
    found = streams(bucket)
    stream = found["chat", "alarm.refusal"]
    assert stream.flagged_at == 0
    assert 20 < stream.flagged_after <= 40
    example = stream.examples[-1]
    assert (example.worker, example.sequence) == ("g0", 0)
    assert example.answer == f"{59:032x}"
    quiet = [one for (_, probe), one in found.items() if probe != "alarm.refusal"]
    assert len(quiet) >= 10
    assert not any(one.flagged_at is not None for one in quiet)


def test_refusals_that_users_reject_and_rare_ones_are_not(bucket):
    fill(
        bucket, 400, marks=lambda n: ["refusal"] if n % 3 == 0 or n % 40 == 1 else [],
        kind=lambda n: "reject" if n % 3 == 0 else "accept",
    )  # fmt: skip
    stream = streams(bucket)["*", "alarm.refusal"]
    assert stream.groups == 400
    assert stream.means[1] > 0.3
    assert stream.flagged_at is None


def test_a_second_opinion_below_the_reward_is_noticed(bucket):
    answers = [answer(n, at=NOW + n) for n in range(80)]
    kept = [report(n, "kept_share", 0.1, at=NOW + n) for n in range(80)]
    put_rows(bucket, 0, answers, [*(report(n, at=NOW + n) for n in range(80)), *kept])
    assert streams(bucket)["", "kept_share"].flagged_at is not None
    weighed = config_of(
        rewards={"accept": 1.0, "kept_share": 0.5}, release={"outcome_after_s": AFTER_S}
    )
    assert ("", "kept_share") not in streams(bucket, weighed)


def test_probes_leave_out_what_the_reward_weighs():
    served = answer(1, finish="length", broken_calls=1, calls=1, marks=["hedging"])
    values = {"detected_retry": 1.0, "detected_dissatisfaction": 0.0, "kept_share": 0.5}
    found = probes_of(served, values, {"accept"})
    on = {name for name, value in found.items() if value}
    assert on == {
        "alarm.hedging", "alarm.broken_call", "alarm.cut_off", "alarm.retry", "kept_share",
    }  # fmt: skip
    assert found["alarm.dissatisfaction"] == 0.0
    seen = {"answer_broken_calls", "answer_cut_off", "detected_retry", "kept_share"}
    left = probes_of(served, values, seen)
    assert {name for name, value in left.items() if value} == {"alarm.hedging"}
    assert found.keys() - left.keys() == {
        "alarm.broken_call", "alarm.cut_off", "alarm.retry", "kept_share",
    }  # fmt: skip


def test_answers_without_an_outcome_and_failures_do_not_count(bucket):
    fill(bucket, 10)
    failed = [answer(n, at=NOW, finish=FAILED, unusable="the replica failed") for n in (20, 21)]
    put_rows(bucket, 1, failed)
    late = report(5, "reject", at=NOW + 5, after_s=AFTER_S + 1)
    put_rows(bucket, 2, [], [late])
    assert streams(bucket, now=NOW + AFTER_S + 3.5)["*", "alarm.refusal"].groups == 4
    stream = streams(bucket)["*", "alarm.refusal"]
    assert (stream.groups, stream.reward) == (10, 10.0)
    unusable = answer(30, at=NOW, unusable="redacted", tokens=0, spans=[])
    put_rows(bucket, 3, [msgspec.structs.replace(unusable, prompt=b"", logprobs=b"")])
    assert streams(bucket)["*", "alarm.refusal"].groups == 11, "silent ones are worth 0"
    bucket.put(keys.live_forgotten(f"{1:032x}"), b"{}")
    assert streams(bucket)["*", "alarm.refusal"].groups == 10


def test_a_users_answers_of_one_version_count_once_unless_each_is_a_unit(bucket):
    answers = [answer(n, at=NOW + n, user=f"{n % 4:032x}", spans=[(n // 8, 4)]) for n in range(24)]
    put_rows(bucket, 0, answers, [report(n, at=NOW + n) for n in range(24)])
    assert streams(bucket)["*", "alarm.refusal"].groups == 12
    assert streams(bucket, config(unit="answer"))["*", "alarm.refusal"].groups == 24
    assert monitor_live(bucket, config(), now=NOW + 1e6).version == 2


def test_a_later_look_adds_to_an_earlier_one(bucket):
    """Evidence holds at every look only if looks agree about what came before."""
    fill(bucket, 50, marks=lambda n: ["question"] if n % 2 else [])
    early = streams(bucket, now=NOW + AFTER_S + 24)["chat", "alarm.question"]
    other = open_bucket("memory://", create=True)
    fill(other, 25, marks=lambda n: ["question"] if n % 2 else [])
    assert msgspec.to_builtins(early) == msgspec.to_builtins(
        streams(other)["chat", "alarm.question"]
    )


def test_the_command_shows_live_probes_as_it_shows_those_of_training(tmp_path, capsys):
    url = (tmp_path / "run").as_uri()
    store = open_bucket(url, create=True)
    published(url=url)
    assert main(["probes", url, "--live"]) == 2
    assert "no answer of a live user has a reward yet" in capsys.readouterr().err
    assert main(["probes", url]) == 2
    assert "--live" in capsys.readouterr().err
    at = time.time() - 7200
    answers = [answer(n, at=at + n, marks=["refusal"], task="a\x1b[31m") for n in range(60)]
    put_rows(store, 0, answers, [report(n, value=1.0, at=at + n) for n in range(60)])
    assert main(["probes", url, "--live", "--json"]) == FLAGGED
    found = json.loads(capsys.readouterr().out)
    assert found["flagged"] == 2
    assert (
        found.keys()
        == msgspec.to_builtins(figures_of(monitor_live(store, config(), now=time.time()))).keys()
    )
    assert main(["probes", url, "--live"]) == FLAGGED
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "live/captures/g0/0, answer 0000000000000000000000000000003b" in " ".join(shown.split())
    assert "drawn by version 0" in " ".join(shown.split())
