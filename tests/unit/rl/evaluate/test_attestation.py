"""Workers attest their weights at the end of a run."""

from heartbeats import put_heartbeat

from deltawire.rl.evaluate.attestation import attested, wait_for_workers
from deltawire.wire.status import TrainerStatus

LAST = TrainerStatus(phase="finished", version=20, digest="20", epoch=2, credits={}, at=0.0)


def finish(bucket, worker, version, **changes):
    fields = {"phase": "finished", "digest": str(version), "attested": True, "ended": True}
    put_heartbeat(bucket, worker, version=version, **{**fields, **changes})


def test_a_worker_that_finished_with_an_earlier_end_is_ignored(new_bucket):
    """The run continued from version 10 to 20, and the machine of that worker was gone."""
    bucket = new_bucket("memory")
    finish(bucket, "left", 10)
    finish(bucket, "sound", 20)
    finish(bucket, "wrong", 20, digest="x")
    finish(bucket, "stopped", 20, phase="stopped")
    put_heartbeat(bucket, "trainer", "trainer")
    found = {one.worker: one.identical for one in attested(bucket, LAST)}
    assert found == {"sound": True, "wrong": False}


def test_the_audit_waits_for_living_workers_only(new_bucket):
    bucket = new_bucket("memory")
    put_heartbeat(bucket, "killed", at=0.0, number=3)  # Hours old: not waited for.
    put_heartbeat(bucket, "slow", at=9e12, worker=None)  # It was restarted a moment ago.
    ticks = []

    def tick():
        ticks.append(1)
        if len(ticks) == 3:
            finish(bucket, "slow", 20, number=7)

    found = wait_for_workers(bucket, LAST, tick, silence_s=30.0)
    assert len(ticks) == 3
    assert [(one.worker, one.identical) for one in found] == [("slow", True)]
