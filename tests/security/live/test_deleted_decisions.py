"""Deleting a decision, such as a rollback, brings no earlier decision back."""

import pytest
from signed_run import OTHER, SignedRun

from deltawire.errors import SignatureError
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bare_bucket
from deltawire.sync import read_manifest
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.roles import GATEWAY_ROLE


@pytest.fixture
def run():
    run = SignedRun(versions=3)
    run.grant(GATEWAY_ROLE, OTHER)
    return run


def decision(run, number, verdict, serving, candidate=None):
    def served(version):
        return ServedVersion(version, read_manifest(run.plain, run.run, version).digest)

    return Decision(
        number=number, run=run.run.id, verdict=verdict, serving=served(serving),
        candidate=None if candidate is None else served(candidate), at=1.0, by="ann",
    )  # fmt: skip


def decided(run):
    """Version 2 served and was rolled back."""
    gateway = DecisionLog(run.bucket(GATEWAY_ROLE, signer=OTHER), run.run.id)
    gateway.poll()
    assert gateway.append(decision(run, 0, "serve", 2))
    assert gateway.append(decision(run, 1, "rollback", 0, 2))
    return gateway


def reader(run, *, allow_rollback=False):
    """A pinned reader on this machine, as commands open one."""
    bucket = run.bucket()
    bucket.remember(allow_rollback=allow_rollback)
    return DecisionLog(bucket, run.run.id)


def test_a_pinned_reader_remembers_the_newest_decision(run):
    decided(run)
    assert reader(run).poll() == 2
    run.plain.delete([keys.live_decision(1)])
    with pytest.raises(SignatureError, match="decision 1 was read on this machine before"):
        reader(run).poll()
    assert reader(run, allow_rollback=True).poll() == 1, "the owner may accept it"


def test_a_reader_that_went_on_remembers_what_came_later(run):
    gateway = DecisionLog(run.bucket(GATEWAY_ROLE, signer=OTHER), run.run.id)
    assert gateway.append(decision(run, 0, "serve", 2))
    log = reader(run)
    assert log.poll() == 1
    assert gateway.append(decision(run, 1, "rollback", 0, 2))
    assert log.poll() == 1
    run.plain.delete([keys.live_decision(1)])
    with pytest.raises(SignatureError, match="decision 1 was read"):
        reader(run).poll()


def test_a_decision_that_is_missing_between_others_is_noticed_by_everyone(run):
    gateway = decided(run)
    assert gateway.append(decision(run, 2, "promote", 1))
    run.plain.delete([keys.live_decision(1)])
    with pytest.raises(SignatureError, match="decision 1 is missing, and decision 2 exists"):
        DecisionLog(run.bucket(), run.run.id).poll()


def test_a_decision_that_was_replaced_breaks_the_chain(run):
    """The gateways signed another decision 1 for a bucket that was set back meanwhile."""
    decided(run)
    first = run.plain.get(keys.live_decision(1), limit=1 << 20)
    run.plain.delete([keys.live_decision(1)])
    gateway = DecisionLog(run.bucket(GATEWAY_ROLE, signer=OTHER), run.run.id)
    gateway.poll()
    assert gateway.append(decision(run, 1, "promote", 1))
    assert gateway.append(decision(run, 2, "promote", 2))
    run.plain.delete([keys.live_decision(1)])
    run.plain.create(keys.live_decision(1), first)
    log = DecisionLog(run.bucket(), run.run.id)
    log.poll()
    assert log.void == {2: "it follows another decision than the one before"}
    assert log.newest.verdict == "rollback"


def test_one_damaged_answer_voids_no_decision():
    """A short answer to the read of a rollback does not undo it in this reader."""
    bucket = open_bare_bucket("memory://", create=True)
    one, two = ServedVersion(1, "1" * 32), ServedVersion(2, "2" * 32)
    log = DecisionLog(bucket, "a" * 32)
    assert log.append(
        Decision(number=0, run=log.run, verdict="serve", serving=two, at=0.0, by="ann")
    )
    assert log.append(
        Decision(
            number=1, run=log.run, verdict="rollback", serving=one, candidate=two, at=1.0, by="ann"
        )
    )
    faulty = FaultyBucket(bucket)
    faulty.damage(keys.live_decision(1), half, times=1)
    again = DecisionLog(faulty, log.run)
    again.poll()
    assert not again.void
    assert again.newest == log.newest
