"""Groups that a rebuild releases: what a learner asks for while it waits for the trainer."""

import pytest

from benchmarks.scale.live_users import POLLS, poll_rolled_back
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.store import open_bare_bucket
from deltawire.sync import read_manifest
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.decisions import FORGETS, Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import ranges_of
from deltawire.wire.objects import encode_json

VERSIONS = 30


@pytest.fixture
def rolled_back():
    """Thirty versions; a decision asks the trainer to restore version 0 without a user."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=100)
    for version in range(VERSIONS):
        publisher.publish(weights(version % 2))
    publisher.flush()
    first, newest = (
        ServedVersion(v, read_manifest(bucket, publisher.run, v).digest) for v in (0, VERSIONS - 1)
    )
    for decision in (
        Decision(
            number=0, run=publisher.run.id, verdict="serve", serving=first, at=0.0, by="ann"
        ),
        Decision(
            number=1, run=publisher.run.id, verdict="rollback", serving=first, candidate=newest,
            at=0.0, by="ann", evidence={FORGETS: 1.0},
        ),
    ):  # fmt: skip
        bucket.put(keys.live_decision(decision.number), encode_json(decision))
    yield bucket, publisher, first
    publisher.close()


def test_a_poll_after_a_rollback_asks_for_new_decisions_and_new_versions_only(rolled_back):
    bucket, publisher, first = rolled_back
    released = ReleasedGroups(bucket, publisher.run)
    for _ in range(3):
        bucket.operations.clear()
        assert not released.poll()
    assert len(bucket.operations) <= 3
    publisher.publish(weights(2))
    record = RestoreRecord(
        decision=1, restored=first, first=1, last=VERSIONS, state="weights",
        groups=ranges_of([("live", 1), ("live", 2)]),
    )  # fmt: skip
    publisher.publish(weights(0), metadata=record.to_dict())
    publisher.flush()
    bucket.operations.clear()
    assert released.poll()
    assert released.groups == {("live", 1), ("live", 2)}
    read = [key for verb, key in bucket.operations if verb == "get" and keys.MANIFESTS in key]
    assert read == [keys.manifest(VERSIONS), keys.manifest(VERSIONS + 1)]
    bucket.operations.clear()
    assert not released.poll()
    assert len(bucket.operations) == 1, "nothing is open, so only the next decision is asked for"


def test_the_benchmark_counts_these_requests():
    found = poll_rolled_back(5)
    assert 1 <= found["most"] <= 3
    assert found["polls"] == POLLS
