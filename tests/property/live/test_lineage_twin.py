"""Lineages that are compacted, erased and deleted by age are those of a plain dictionary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_answers import NOW
from stored_lineages import compact_lineages, lineage_of, put_checkpoint, put_lineage

from deltawire.live.compaction import compactor
from deltawire.live.compaction.compactor import EXPIRED_ROWS_S, StreamCompactor
from deltawire.live.compaction.lineage_rows import LineageRows
from deltawire.live.erasure.forgetting import forget_user
from deltawire.rl.control.lineages import read_lineage, read_lineages, require_lineages
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.lineage import without_users

USERS = [f"{n:x}" * 32 for n in range(1, 5)]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sets(st.integers(0, 3), min_size=1)),
        st.tuples(st.just("settle"), st.just(0)),
        st.tuples(st.just("compact"), st.booleans()),
        st.tuples(st.just("forget"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("expire"), st.integers(0, 10)),
    ),
    max_size=24,
)
STEP_S = EXPIRED_ROWS_S / 2


class Twin:
    """A bucket, and the lineages and groups that it should hold."""

    def __init__(self):
        self.bucket = open_bucket("memory://")
        self.run = start_run(self.bucket)
        self.publisher = start_publisher(self.bucket)
        self.publisher.publish(weights(0))
        self.version = self.settled = self.next = 0
        self.lineages, self.groups, self.gone = {}, set(), set()

    def store(self, users):
        named = [USERS[n] for n in sorted(users) if USERS[n] not in self.gone]
        one = lineage_of(self.next, named or ["f" * 32], at=NOW + STEP_S * self.next)
        put_lineage(self.bucket, one)
        self.lineages[self.next] = one
        self.groups.add(self.next)
        self.next += 1

    def settle(self, _):
        new = [("live", n) for n in range(self.settled, self.next)]
        self.version, self.settled = self.version + 1, self.next
        step = CommitMetadata(step=self.version, consumed=new)
        self.publisher.publish(weights(self.version), metadata=step.to_dict())
        put_checkpoint(self.bucket, self.version, {"live": self.settled})

    def compact(self, late):
        compact_lineages(self.bucket, **({"clock": lambda: 1e12} if late else {}))

    def forget(self, number):
        self.settle(0)  # Else groups are emptied, which are none here.
        user = USERS[number]
        forget_user(self.bucket, self.run, user)
        self.gone.add(user)
        for n, one in self.lineages.items():
            if any(answer.user == user for answer in one.answers):
                self.groups.discard(n)
                self.lineages[n] = without_users(one, {user})

    def drop(self, number):
        """Retention deletes a group."""
        if number < self.settled:
            for place in (keys.rollout, keys.reference, keys.proof_salt):
                self.bucket.delete(place("live", number))
            self.groups.discard(number)

    def expire(self, days):
        before = NOW + days * EXPIRED_ROWS_S
        self.compact(True)
        StreamCompactor(self.bucket, LineageRows(), "live").expire(before)
        left = {one.sequence for one in read_lineages(self.bucket)}
        for n in self.lineages.keys() - left:
            one = self.lineages.pop(n)
            assert n not in self.groups, "something of the group is stored"
            assert n < self.settled
            assert one.at < before
        for n, one in self.lineages.items():
            due = n < self.settled and n not in self.groups
            assert not (due and one.at < before - EXPIRED_ROWS_S), "it is too old"

    def check(self):
        wanted = [self.lineages[n] for n in sorted(self.lineages)]
        assert read_lineages(self.bucket) == wanted
        for user in USERS:
            mine = [w for w in wanted if any(answer.user == user for answer in w.answers)]
            assert require_lineages(self.bucket, users=[user]) == mine
        for n in range(self.next + 1):
            assert read_lineage(self.bucket, "live", n) == self.lineages.get(n)


@settings(max_examples=25)
@given(OPERATIONS)
def test_lineages_are_those_of_a_dictionary(operations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compactor, "FAN_IN", 2)
        patch.setattr(compactor, "KEPT", 1)
        twin = Twin()
        for name, value in operations:
            getattr(twin, name)(value)
            if name != "store":
                twin.check()
        twin.compact(True)
        twin.check()
        twin.publisher.close()
