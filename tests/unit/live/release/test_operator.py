"""An operator begins and stops canaries, and is warned."""

from dataclasses import replace

import msgspec
import pytest
from live_gateway import published

from deltawire.cli.main import main
from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.live.release.evidence import CanaryTests
from deltawire.live.release.next_decision import (
    Situation,
    canary_by_hand,
    decide_by_hand,
    decide_next,
)
from deltawire.live.release.operator_mode import allows, read_operator, store_operator
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import keys
from deltawire.wire.decisions import ServedVersion
from deltawire.wire.operator_state import OperatorState

RUN = "1" * 32
OLD, NEW, NEWER, SAME = (ServedVersion(n, f"{n % 4:032x}") for n in (0, 1, 2, 5))
"""``SAME`` has the weights of ``NEW``."""


@pytest.fixture
def log():
    found = DecisionLog(open_bare_bucket("memory://"), RUN)
    assert found.append(decide_by_hand(found, "promote", by="ann", now=0.0, target=OLD))
    return found


def begin(log, target=NEW, share=0.3, **options):
    """Takes all decisions that a canary by hand needs; returns how many."""
    count = 0
    while (one := canary_by_hand(log, target, share, by="ann", now=1.0, **options)) is not None:
        assert log.append(one)
        count += 1
    return count


def test_a_canary_by_hand_shows_the_version_to_its_share(log):
    assert begin(log, generation=2) == 2
    newest = log.newest
    assert (newest.verdict, newest.candidate, newest.share) == ("canary", NEW, 0.3)
    assert (newest.generation, bool(newest.salt), newest.by) == (2, True, "ann")
    assert log.canary_since() == 1.0
    assert "without a gate" in log.decisions[-2].reason
    assert begin(log, share=0.2) == 0, "a share does not fall"
    assert begin(log, share=0.6) == 1
    assert (log.newest.share, log.newest.salt) == (0.6, newest.salt)


def test_its_tests_are_those_of_any_canary_and_the_margin_is_spent(log):
    begin(log, share=0.6)
    release = ReleaseConfig(margin=0.2, stages=[0.5], stage_outcomes=10)
    tests = CanaryTests(release)
    evidence = tests.evidence()
    situation = Situation(newest=NEW, evidence=evidence, now=2.0)
    assert decide_next(log, release, situation, by="d") is None, "nothing was shown yet"
    metric = replace(evidence.metric, difference=0.1, log_evidence=99.0)
    better = replace(evidence, counts={0.6: (50, 50)}, metric=metric)
    promoted = decide_next(log, release, Situation(newest=NEW, evidence=better, now=2.0), by="d")
    assert promoted.verdict == "promote"
    assert promoted.evidence["margin_spent"] == release.margin


def test_a_version_is_not_tried_until_it_passes(log):
    """Each canary has the whole error rate: three of a worse version would promote it thrice as
    often."""
    begin(log)
    log.append(decide_by_hand(log, "rollback", by="ann", now=2.0))
    with pytest.raises(InputError, match="error rate is spent"):
        canary_by_hand(log, NEW, 0.3, by="ann", now=3.0)
    begin(log, NEWER)
    log.append(decide_by_hand(log, "hold", by="ann", now=4.0))
    with pytest.raises(InputError, match="error rate is spent"):
        canary_by_hand(log, NEWER, 0.3, by="ann", now=5.0)


@pytest.mark.parametrize(
    ("target", "share", "named"),
    [(OLD, 0.3, "serves already"), (NEW, 0.0, "above 0"), (NEW, 1.0, "above 0")],
)
def test_impossible_canaries_are_refused(log, target, share, named):
    with pytest.raises(InputError, match=named):
        canary_by_hand(log, target, share, by="ann", now=1.0)


def test_a_canary_does_not_take_the_place_of_another(log):
    begin(log)
    with pytest.raises(InputError, match="version 1 is undecided"):
        canary_by_hand(log, NEWER, 0.3, by="ann", now=1.0)


@pytest.mark.parametrize("target", [NEW, SAME])
def test_what_was_rolled_back_is_promoted_only_again(log, target):
    begin(log)
    log.append(decide_by_hand(log, "rollback", by="bob", now=1_700_000_000.0, reason="complaints"))
    with pytest.raises(InputError, match=r"rolled back at 2023-11-14T22:13:20Z by bob: complaints"):
        decide_by_hand(log, "promote", by="ann", now=3.0, target=target)
    again = decide_by_hand(log, "promote", by="ann", now=3.0, target=target, again=True)
    assert again.serving == target


def test_modes_stop_what_they_say(log):
    state = OperatorState(run=RUN)
    gate = canary_by_hand(log, NEW, 0.3, by="ann", now=1.0)
    for mode, allowed in (("running", True), ("paused", False), ("frozen", False)):
        assert allows(msgspec.structs.replace(state, mode=mode), log.newest, gate) == allowed
    begin(log)
    stage = canary_by_hand(log, NEW, 0.6, by="ann", now=1.0)
    back = decide_by_hand(log, "rollback", by="ann", now=1.0)
    for decision in (stage, back):
        assert allows(msgspec.structs.replace(state, mode="paused"), log.newest, decision)
        assert not allows(msgspec.structs.replace(state, mode="frozen"), log.newest, decision)


def test_a_mode_that_cannot_be_read_freezes():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    assert read_operator(bucket, RUN).mode == "running"
    store_operator(bucket, OperatorState(run=RUN, mode="paused", by="ann"))
    assert read_operator(bucket, RUN).mode == "paused"
    assert read_operator(bucket, "2" * 32).mode == "frozen"
    bucket.damage(keys.LIVE_OPERATOR, half, times=1)
    assert read_operator(bucket, RUN).mode == "frozen"
    assert read_operator(bucket, RUN).mode == "paused"


def test_the_commands(tmp_path, capsys):
    url = (tmp_path / "run").as_uri()
    open_bare_bucket(url, create=True)
    published(url=url)

    def live(*arguments):
        code = main(["live", arguments[0], url, *arguments[1:]])
        return code, capsys.readouterr()

    assert live("promote", "--version", "0")[0] == 0
    told = live("freeze", "--by", "ann", "--reason", "launch day")[1]
    assert "frozen by ann: launch day" in told.out
    decide = ("decide", "--once", "--gate", "none")
    assert live(*decide)[1].out.startswith("serve: version 0 serves")
    live("pause")
    assert live(*decide)[1].out.startswith("serve: version 0 serves")
    live("canary", "--version", "1", "--share", "0.2")
    code, told = live("status")
    assert code == 10
    assert "canary: version 0 serves, candidate 1 at 0.2" in told.out
    assert "paused" in told.out
    assert "T" in told.out.split()[0]
    assert told.out.split()[0].endswith("Z"), "each line of the log has its time"
    live("resume")
    assert "paused" not in live("status")[1].out
    live("rollback", "--reason", "complaints")
    code, told = live("promote", "--version", "1")
    assert code != 0
    assert "complaints" in told.err
    assert live("promote", "--version", "1", "--again")[0] == 0
