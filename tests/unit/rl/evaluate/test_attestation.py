"""What the end of a run says of its workers."""

from deltawire.rl.evaluate.attestation import attested
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat, TrainerStatus

LAST = TrainerStatus(phase="finished", version=20, digest="20", epoch=2, credits={}, at=0.0)


def beat(worker, version, **changes):
    fields = {
        "worker": worker,
        "nonce": "n",
        "phase": "finished",
        "version": version,
        "digest": str(version),
        "attested": True,
        "lag": 0,
        "stored": 1,
        "supervised": False,
        "host": "h",
        "pid": 1,
        "started_at": 0.0,
        "at": 0.0,
    }
    return Heartbeat(**{**fields, **changes})


def test_who_finished_with_an_earlier_end_is_not_blamed_for_it(new_bucket):
    """The run went on from version 10 to 20, and that worker's machine was given back."""
    bucket = new_bucket("memory")
    beats = [
        beat("left", 10),
        beat("sound", 20),
        beat("wrong", 20, digest="x"),
        beat("stopped", 20, phase="stopped"),
    ]
    for one in beats:
        bucket.put(keys.heartbeat(one.worker), encode_json(one))
    found = {verdict.worker: verdict.identical for verdict in attested(bucket, LAST)}
    assert found == {"sound": True, "wrong": False}
