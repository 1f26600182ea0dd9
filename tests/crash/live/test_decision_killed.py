"""Deciders that die at any write, and two that decide at once: one valid series."""

import itertools
import threading

import pytest

from deltawire.config.release import ReleaseConfig
from deltawire.errors import RetryError
from deltawire.live.release.next_decision import Situation, decide_next
from deltawire.live.release.paired_gate import SetScore
from deltawire.live.release.shadow_evidence import shadow_evidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire.captures import ShadowCounts
from deltawire.wire.decisions import ServedVersion

RUN = "1" * 32
RELEASE = ReleaseConfig(gate={"accuracy": 0.02}, stages=[0.25, 0.5])
SHADOW = ReleaseConfig(gate={"accuracy": 0.02}, stages=[0.25, 0.5], shadow=5)
COPIES = shadow_evidence([ShadowCounts(shadow="s", copies=5)], SHADOW)
WITHOUT, WITH = ["serve", "gate", "canary"], ["serve", "gate", "shadow", "canary"]
SCORES = {version: {"accuracy": SetScore(0.5)} for version in range(9)}


def served(version):
    return ServedVersion(version, f"{version:032x}")


def step(log, *, by, release=RELEASE):
    """Decide once, as a process does; returns whether a decision of its own was stored."""
    log.poll()
    serving = log.newest.serving.version if log.newest else 0
    situation = Situation(
        newest=served(serving), candidate=served(serving + 1), scores=SCORES, shadow=COPIES,
        now=log.next_number,
    )  # fmt: skip
    decision = decide_next(log, release, situation, by=by)
    return decision is not None and log.append(decision)


@pytest.mark.parametrize(("release", "verdicts"), [(RELEASE, WITHOUT), (SHADOW, WITH)])
@pytest.mark.parametrize("done", [False, True])
def test_a_decider_that_dies_at_any_write_leaves_a_valid_series(done, release, verdicts):
    """Its decision is stored or not, and the next process goes on from there."""
    for at in range(1, len(verdicts) + 1):
        bucket = open_bare_bucket("memory://", create=True)
        dying = FaultyBucket(bucket)
        dying.fail("create", "live/decisions/*", at=at, done=done)
        log = DecisionLog(dying, RUN)
        assert all(step(log, by="first", release=release) for _ in range(at - 1))
        with pytest.raises(RetryError):
            step(log, by="first", release=release)
        after = DecisionLog(bucket, RUN)
        after.poll()
        assert len(after.decisions) == at - 1 + done
        while step(after, by="second", release=release):
            pass
        assert [one.verdict for one in after.decisions] == verdicts
        assert not after.void


def test_a_repeated_create_finds_its_own_decision():
    """The store did it, its answer was lost, and the process asks again: that is success."""
    bucket = FaultyBucket(open_bare_bucket("memory://", create=True))
    log = DecisionLog(bucket, RUN)
    bucket.fail("create", "live/decisions/*", done=True)
    situation = Situation(newest=served(0), now=1.0)
    decision = decide_next(log, RELEASE, situation, by="first")
    with pytest.raises(RetryError):
        log.append(decision)
    assert log.append(decision)
    assert log.decisions == [decision]


def test_two_threads_that_decide_at_once_agree():
    bucket = open_bare_bucket("memory://", create=True)
    logs = [DecisionLog(bucket, RUN) for _ in range(2)]
    together, stored = threading.Barrier(2), [0, 0]

    def decide(number):
        for _ in range(6):
            together.wait()
            stored[number] += step(logs[number], by=f"g{number}")

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.poll()
    assert logs[0].decisions == logs[1].decisions
    assert [one.verdict for one in logs[0].decisions] == ["serve", "gate", "canary"]
    assert sum(stored) == 3
    assert not logs[0].void


def test_a_reader_of_a_store_without_an_answer_keeps_what_it_knew():
    bucket = FaultyBucket(open_bare_bucket("memory://", create=True))
    log = DecisionLog(bucket, RUN)
    assert all(itertools.islice(iter(lambda: step(log, by="g0"), None), 3))
    bucket.fail("get", "live/decisions/*", times=None)
    with pytest.raises(RetryError):
        log.poll()
    assert log.newest.verdict == "canary"
