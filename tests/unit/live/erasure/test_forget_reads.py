"""Tests what an erasure reads and keeps for a trainer, and that it acts on sound answers."""

import threading

import pytest
from forgotten_users import learned
from live_answers import answer

from deltawire.errors import UnreadableError
from deltawire.live.erasure.forgetting import GroupsNeededError, forget_user
from deltawire.live.erasure.user_groups import READERS
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.sync import read_run
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.lineage import Forgotten
from deltawire.wire.objects import decode_json

ALICE = "a" * 32
VERSIONS = 3 * 16


@pytest.fixture
def bucket(monkeypatch):
    """Version 1 consumed a group with answers of Alice, another one waits."""
    found = FaultyBucket(open_bare_bucket("memory://"))
    start_run(found)
    learned(found, {2: ALICE, 6: ALICE})
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    return found


def publish(bucket, versions, consumed=None):
    publisher = start_publisher(bucket)
    for version in versions:
        step = CommitMetadata(step=version, consumed=(consumed or {}).get(version, []))
        publisher.publish(weights(version % 3), metadata=step.to_dict())
    publisher.close()


def stored_record(bucket):
    key = keys.live_forgotten(ALICE)
    return decode_json(bucket.get(key, limit=1 << 20), Forgotten, run="", key=key)


class Together(DelegatingBucket):
    """Answers a read of a manifest once sixteen are under way, and counts the most of them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.local = False
        self.reads, self.under_way, self.most = [], 0, 0
        self._all_there = threading.Barrier(16)
        self._counting = threading.Lock()

    def get(self, key, *, limit):
        if not key.startswith(keys.MANIFESTS):
            return super().get(key, limit=limit)
        with self._counting:
            self.reads.append(key)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self._all_there.wait(60)
        with self._counting:
            self.under_way -= 1
        return super().get(key, limit=limit)


def test_each_manifest_is_read_once_and_sixteen_at_a_time(bucket):
    publish(bucket, range(2, VERSIONS))
    remote = Together(bucket)
    assert forget_user(remote, read_run(bucket), ALICE, no_trainer=True).versions == [1]
    assert sorted(remote.reads) == [keys.manifest(version) for version in range(VERSIONS)]
    assert remote.most == READERS == 16


def test_a_version_that_is_committed_meanwhile_is_named_before_its_group_goes(bucket):
    publish_it = lambda: publish(bucket.inner, [2], {2: [("live", 1)]})  # noqa: E731
    bucket.pause("list", keys.LIVE_CAPTURES, wait=publish_it)
    record = forget_user(bucket, start_run(bucket), ALICE, no_trainer=True)
    assert record.versions == stored_record(bucket).versions == [1, 2]
    assert not bucket.exists(keys.rollout("live", 1)), "it is consumed, so it is deleted whole"


@pytest.mark.parametrize("stored", [True, False], ids=["a checkpoint", "none yet"])
def test_groups_that_a_trainer_needs_stay_until_its_next_checkpoint(bucket, stored):
    publish(bucket, range(2, 5))
    if stored:  # Without one, a trainer starts again from version 0.
        bucket.put(keys.checkpoint_commit(0), b"{}")
    with pytest.raises(GroupsNeededError, match="newest checkpoint") as kept:
        forget_user(bucket, start_run(bucket), ALICE)
    assert kept.value.record.versions == [1]
    assert "next checkpoint" in kept.value.hint
    assert "--no-trainer" in kept.value.hint
    assert bucket.exists(keys.rollout("live", 0))
    waiting = bucket.get(keys.rollout("live", 1), limit=1 << 20)
    assert answer(6).tokens not in waiting, "what no trainer needs is deleted"
    bucket.put(keys.checkpoint_commit(4), b"{}")
    again = forget_user(bucket, start_run(bucket), ALICE)
    assert not bucket.exists(keys.rollout("live", 0))
    assert (again.versions, again.answers, again.feedback) == ([1], 2, 2)


def test_without_a_trainer_to_come_no_group_is_needed(bucket):
    publish(bucket, range(2, 5))
    record = forget_user(bucket, start_run(bucket), ALICE, no_trainer=True)
    assert record.versions == [1]
    assert not bucket.exists(keys.rollout("live", 0))


def test_an_object_that_cannot_be_read_is_no_reason_to_report_an_erasure(bucket):
    key = keys.live_lineage("live", 1)
    bucket.damage(key, half)
    with pytest.raises(UnreadableError, match="nothing was deleted") as unreadable:
        forget_user(bucket, start_run(bucket), ALICE)
    assert unreadable.value.key == key
    assert bucket.exists(keys.rollout("live", 0))
    bucket.heal()
    record = forget_user(bucket, start_run(bucket), ALICE, no_trainer=True)
    assert record.groups == [("live", 0), ("live", 1)]
