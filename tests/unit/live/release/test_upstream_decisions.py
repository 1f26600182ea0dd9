"""Decisions about another provider's model: the next one, the trainer's, a rebuild, a person's."""

import pytest
from live_answers import config_of
from live_gateway import published

from deltawire.errors import InputError
from deltawire.launch.live import Releaser
from deltawire.launch.upstreams import target_of
from deltawire.live.erasure.rebuilding import check_rebuildable
from deltawire.live.release.next_decision import (
    Situation,
    canary_by_hand,
    decide_by_hand,
    decide_next,
    next_candidate,
)
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_manifest, read_run
from deltawire.wire.decisions import RESTORE_RECORD, Decision, RestoreRecord, ServedVersion

PROVIDER, OTHER = map(ServedVersion.of_upstream, ("openai", "other"))
CONFIG = config_of(release={"stages": [0.2, 0.5], "gate": {"accuracy": 0.02}})
RELEASE = CONFIG.live.release


@pytest.fixture
def bucket():
    return published()


@pytest.fixture
def log(bucket):
    return DecisionLog(bucket, read_run(bucket).id)


def served(bucket, version):
    return ServedVersion(version, read_manifest(bucket, read_run(bucket), version).digest)


def decide(log, verdict, serving, candidate=None, **more):
    decision = Decision(
        number=log.next_number, run=log.run, verdict=verdict, serving=serving, at=0.0, by="ann",
        candidate=candidate, **more,
    )  # fmt: skip
    assert log.append(decision)
    return decision


def test_a_version_goes_from_the_gate_to_a_canary_against_a_provider(bucket, log):
    """No gate compares a version with a model that nobody can measure on held-out tasks."""
    decide(log, "serve", PROVIDER)
    scores = {2: {"accuracy": None}}
    found = next_candidate(log, RELEASE, newest=2, scores=scores, now=1e9)
    assert found == 2
    situation = Situation(newest=served(bucket, 2), candidate=served(bucket, 2), now=1e9)
    gate = decide_next(log, RELEASE, situation, by="ann")
    assert (gate.verdict, gate.serving) == ("gate", PROVIDER)
    assert log.append(gate)
    canary = decide_next(log, RELEASE, situation, by="ann")
    assert (canary.verdict, canary.share) == ("canary", 0.2)
    assert "upstream openai is measured by users only" in canary.reason
    assert log.append(canary)
    decide(log, "rollback", PROVIDER, served(bucket, 2))
    assert next_candidate(log, RELEASE, newest=2, scores=scores, now=2e9) is None, "once each"


def test_a_persons_canary_of_one_provider_against_another(bucket, log):
    decide(log, "serve", PROVIDER)
    for _ in range(2):
        log.append(canary_by_hand(log, OTHER, 0.1, by="ann", now=1.0))
    assert (log.newest.candidate, log.newest.share) == (OTHER, 0.1)
    decide(log, "rollback", PROVIDER, OTHER)
    with pytest.raises(InputError, match="upstream other was shown to users"):
        canary_by_hand(log, OTHER, 0.1, by="ann", now=2.0)
    with pytest.raises(InputError, match="upstream other was rolled back"):
        decide_by_hand(log, "promote", by="ann", now=2.0, target=OTHER)
    with pytest.raises(InputError, match="upstream openai serves already"):
        canary_by_hand(log, PROVIDER, 0.1, by="ann", now=2.0)


@pytest.mark.parametrize("of_upstream", [True, False])
def test_a_trainer_follows_no_rollback_to_or_of_a_provider(bucket, log, of_upstream, monkeypatch):
    watch = RollbackWatch(bucket, read_run(bucket), checkpoints=2)
    zero, one = served(bucket, 0), served(bucket, 1)
    if of_upstream:
        decide(log, "serve", zero)
        decide(log, "gate", zero, PROVIDER)
        decide(log, "rollback", zero, PROVIDER)
    else:
        decide(log, "serve", PROVIDER)
        decide(log, "gate", PROVIDER, one)
        decide(log, "rollback", PROVIDER, one)
    assert watch.poll(version=2) is None
    assert watch.oldest_served == (0 if of_upstream else None)
    releaser = Releaser(bucket, read_run(bucket), CONFIG, by="ann")
    releaser.log.poll()
    assert releaser.situation(1e9).restored is None


def test_a_rebuild_is_refused_before_anything_is_deleted(bucket, log):
    decide(log, "serve", PROVIDER)
    with pytest.raises(InputError, match="upstream openai serves, and a rebuild would end that"):
        check_rebuildable(bucket, read_run(bucket))


def test_a_restore_names_a_version():
    record = RestoreRecord(decision=1, restored=PROVIDER, first=1, last=2, state="weights")
    with pytest.raises(Exception, match="restores one that is not before"):
        RestoreRecord.of({RESTORE_RECORD: record.to_dict()[RESTORE_RECORD]}, run="r", version=3)


def test_a_person_names_a_version_or_an_upstream():
    assert target_of(None, "openai", None) == PROVIDER
    assert target_of(None, "", None) is None
    for version, name in ((3, "openai"), (None, "Open AI"), (None, "../x")):
        with pytest.raises(InputError):
            target_of(version, name, None)
