"""The state of releases in status, problems, metrics and report."""

from types import SimpleNamespace

import msgspec
import pytest
from live_gateway import published
from test_metrics_export import STATUS, Stub, scrape

from deltawire.dashboard.problems import problems_of
from deltawire.dashboard.release import release_of
from deltawire.dashboard.report import _candidates, _restores
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import Watch
from deltawire.events import Restored
from deltawire.launch.watching import _candidates as candidates_in
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, ServedVersion

OLD, NEW, BACK = ServedVersion(0, "0" * 32), ServedVersion(2, "2" * 32), ServedVersion(3, "0" * 32)


@pytest.fixture
def bucket():
    return published()


def decide(bucket, *series):
    """Append decisions; returns the log."""
    log = DecisionLog(bucket, read_run(bucket).id)
    for verdict, serving, candidate, facts in series:
        log.poll()
        decision = Decision(
            number=log.next_number, run=log.run, verdict=verdict, serving=serving,
            candidate=candidate, at=1.0, by="ann", reason="why", **facts,
        )  # fmt: skip
        assert log.append(decision)
    return log


CANARY = [
    ("serve", OLD, None, {}),
    ("gate", OLD, NEW, {}),
    ("canary", OLD, NEW, {"share": 0.25, "salt": "s"}),
]
HELD = ("hold", OLD, NEW, {"share": 0.25, "salt": "s", "waits_for": "person"})
ROLLED = ("rollback", OLD, NEW, {})
FORWARD = ("promote", BACK, None, {"evidence": {"restores_version": 0.0}})


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (CANARY[:1], "version 0 serves; serve by ann: why"),
        (CANARY, "version 0 serves, candidate 2 at 25% of users; canary by ann: why"),
        ([*CANARY, HELD], "at 25% of users, held for a person; hold by ann: why"),
        ([*CANARY, ROLLED], "version 0 serves; rollback by ann: why"),
        ([*CANARY, ROLLED, FORWARD], "version 3 serves with the weights of version 0; promote"),
    ],
)
def test_the_status_says_what_serves_and_who_decided(bucket, series, words):
    watch = Watch(bucket)
    assert watch.poll().release is None
    decide(bucket, *series)
    assert words in watch.poll().release.words


def test_a_hold_for_a_person_and_void_decisions_are_problems(bucket):
    decide(bucket, *CANARY, HELD)
    bucket.create(keys.live_decision(4), b"{}")
    status = Watch(bucket).poll()
    found = [one.text for one in problems_of(status)]
    assert any("held for a person" in text for text in found)
    assert "void decisions: 1; see deltawire live status" in found


def test_metrics_have_the_arms_and_the_verdicts(bucket):
    release = release_of(decide(bucket, *CANARY))
    found = scrape(Stub(msgspec.structs.replace(STATUS, release=release)))
    by_name = {}
    for name, labels in found:
        if "release" in name:
            by_name.setdefault(name, set()).update(str(labels).split("'")[1::2])
    assert {"serving", "candidate"} <= by_name["deltawire_release_version"]
    assert {"serve", "gate", "canary", "void"} <= by_name["deltawire_release_decisions"]


def test_the_report_names_what_the_trainer_restored():
    state = RunState()
    state.add(
        [
            Restored(
                process="trainer", at=1.0, version=3, decision=3, restored=0, first=1, last=2,
                groups=4, state="weights", seconds=0.1,
            )
        ]
    )  # fmt: skip
    ((name, words),) = _restores(state)
    assert name == "Rollback 3, followed by the trainer"
    assert "version 3 restores version 0 with a new optimizer" in words


def test_the_report_lists_candidates_with_the_estimate_and_what_users_showed(bucket):
    assert _candidates(SimpleNamespace(candidates=candidates_in(bucket))) == []
    assert candidates_in(open_bucket("memory://", create=True)) == [], "there is no run"
    estimate = {"estimate_snips": 0.4, "estimate_snips_error": 0.02, "estimate_doubly_robust": 0.41}
    shown = {"live_candidate": 0.45, "live_serving": 0.4}
    decide(
        bucket,
        *CANARY[:2],
        ("canary", OLD, NEW, {"share": 0.25, "salt": "s", "evidence": estimate}),
        ("rollback", OLD, NEW, {"evidence": shown}),
        FORWARD,
    )
    ((name, words),) = _candidates(SimpleNamespace(candidates=candidates_in(bucket)))
    assert name == "Candidate version 2, decision 3"
    assert words == (
        "rollback; estimated 0.400 ± 0.020 (SNIPS); 0.410 (doubly robust); "
        "users showed 0.450, serving version 0.400"
    )
