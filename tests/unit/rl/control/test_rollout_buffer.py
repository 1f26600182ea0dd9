"""The trainer's buffer: oldest first, too old never, damaged never, everything once."""

import random
from dataclasses import replace

import numpy as np
import pytest

from deltawire.errors import CorruptError
from deltawire.rl.control import rollout_reader as groups_module
from deltawire.rl.control.rollout_buffer import QUARANTINE_AFTER, RolloutBuffer, read_consumed
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.control.staleness import Strict
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.rollouts import encode_group


@pytest.fixture
def bucket():
    return open_bucket("memory://")


@pytest.fixture
def store(bucket, make_group):
    def put(worker, sequence, *versions, by=None):
        data = encode_group(make_group(by or worker, versions))
        assert bucket.create(keys.rollout(worker, sequence), data)

    return put


def names(batch):
    return [(buffered.group.worker, buffered.sequence) for buffered in batch.taken]


def test_the_oldest_groups_come_first_from_any_worker(bucket, store):
    for sequence, version in enumerate([3, 5, 4]):
        store("a", sequence, version)
    for sequence, version in enumerate([4, 3]):
        store("b", sequence, version)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    assert buffer.poll(["a", "b"]) == 5
    first = buffer.next_batch(Strict(2, 2), version=5)
    assert names(first) == [("a", 0), ("b", 1)]
    assert first.staleness == [2, 2]
    second = buffer.next_batch(Strict(3, 2), version=5)
    assert names(second) == [("b", 0), ("a", 2), ("a", 1)]
    assert second.staleness == [1, 1, 0]
    assert buffer.waiting == 0


def test_the_oldest_token_of_any_trajectory_is_the_groups_age(bucket, store):
    store("a", 0, 6, 2, 6)
    store("a", 1, 3, 3)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    assert buffer.next_batch(Strict(2, 4), version=6).staleness == [4, 3]


def test_too_few_are_left_to_wait(bucket, store):
    store("a", 0, 0)
    buffer = RolloutBuffer(bucket, Ledger(), limit=4)
    buffer.poll(["a"])
    assert buffer.next_batch(Strict(2, 0), version=0) is None
    assert buffer.waiting == 1
    store("a", 1, 0)
    assert buffer.poll(["a"]) == 1
    assert names(buffer.next_batch(Strict(2, 0), version=0)) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_exactly_what_exceeds_the_bound_is_dropped(bucket, store, staleness):
    for sequence, version in enumerate(range(7)):
        store("a", sequence, version)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    batch = buffer.next_batch(Strict(1, staleness), version=6)
    assert batch.staleness == [staleness]
    assert batch.dropped == [("a", sequence) for sequence in range(6 - staleness)]


def test_drops_are_reported_once_with_the_next_batch(bucket, store):
    store("a", 0, 0)
    store("a", 1, 0)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a", "b"])
    assert buffer.next_batch(Strict(1, 2), version=5) is None
    assert (buffer.waiting, buffer.dropping()["a"], buffer.dropping()["b"]) == (0, 2, 0)
    assert buffer.next_batch(Strict(1, 2), version=5) is None
    assert buffer.dropping()["a"] == 2
    store("b", 0, 5)
    store("b", 1, 5)
    buffer.poll(["a", "b"])
    assert buffer.next_batch(Strict(1, 2), version=5).dropped == [("a", 0), ("a", 1)]
    assert buffer.dropping()["a"] == 0
    assert buffer.next_batch(Strict(1, 2), version=5).dropped == []


DAMAGE = {
    "cut": lambda data: data[:-3],
    "empty": lambda _: b"",
    "garbage": lambda _: b"\xc1" * 40,
    "other type": lambda _: b"\x93\x01\x02\x03",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_groups_are_dropped_and_named(bucket, store, make_group, damage):
    store("a", 0, 0)
    bucket.put(keys.rollout("a", 1), DAMAGE[damage](encode_group(make_group("a", [0]))))
    store("a", 2, 0)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    assert buffer.damaged == [keys.rollout("a", 1)]
    assert buffer.dropping()["a"] == 1
    batch = buffer.next_batch(Strict(2, 0), version=0)
    assert names(batch) == [("a", 0), ("a", 2)]
    assert batch.dropped == [("a", 1)]


def test_a_group_under_another_workers_name_is_damaged(bucket, store):
    store("a", 0, 0, by="b")
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a", "b"])
    assert buffer.damaged == [keys.rollout("a", 0)]
    assert buffer.waiting == 0


def test_a_huge_object_is_never_read(bucket, store, monkeypatch):
    store("a", 0, 0)
    monkeypatch.setattr(groups_module, "MAX_GROUP_BYTES", 10)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    assert buffer.damaged == [keys.rollout("a", 0)]


def test_no_more_are_held_than_can_be_of_use(bucket, store):
    for sequence in range(30):
        store("a", sequence, 0)
    buffer = RolloutBuffer(bucket, Ledger(), limit=4)
    assert buffer.poll(["a"]) == 8
    assert buffer.stored("a") == 8
    assert buffer.poll(["a"]) == 0
    assert len(buffer.next_batch(Strict(4, 0), version=0).taken) == 4
    assert buffer.poll(["a"]) == 4


def test_the_last_groups_of_a_worker_that_left_are_found(bucket, store):
    buffer = RolloutBuffer(bucket, Ledger(), limit=4)
    assert buffer.poll(["a", "b"]) == 0
    store("b", 0, 0)
    assert buffer.poll(["a", "b"]) == 1
    assert names(buffer.next_batch(Strict(1, 0), version=0)) == [("b", 0)]


def test_a_hole_is_waited_for(bucket, store):
    """A later sequence is not looked at before the earlier one is there: puts come in order."""
    store("a", 0, 0)
    store("a", 2, 0)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    assert buffer.poll(["a"]) == 1
    store("a", 1, 0)
    assert buffer.poll(["a"]) == 2
    assert buffer.stored("a") == 3


def test_every_group_is_handed_out_once_across_restarts(bucket, store):
    """A trainer that dies keeps only its ledger; the next buffer takes up exactly the rest."""
    rng = random.Random(0)
    counts = {"a": 17, "b": 9, "c": 1}
    for worker, count in counts.items():
        for sequence in range(count):
            store(worker, sequence, rng.randint(0, 3))
    ledger, seen = Ledger(), []
    for _ in range(20):
        buffer = RolloutBuffer(bucket, ledger.copy(), limit=6)
        buffer.poll(sorted(counts))
        batch = buffer.next_batch(Strict(rng.randint(1, 4), 2), version=3)
        if batch is None:
            break
        for worker, sequence in [*names(batch), *batch.dropped]:
            assert not ledger.settled(worker, sequence)
            ledger.settle(worker, sequence)
            seen.append((worker, sequence))
    # Drops for which there was no group left to report them with.
    seen += [(drop.worker, drop.sequence) for drop in buffer._dropped]
    left = {(buffered.group.worker, buffered.sequence) for buffered in buffer._waiting}
    assert len(seen) == len(set(seen))
    assert {*seen, *left} == {(w, s) for w, count in counts.items() for s in range(count)}


def test_a_batch_that_was_not_committed_comes_again(bucket, store):
    for sequence in range(4):
        store("a", sequence, 0)
    ledger = Ledger()
    buffer = RolloutBuffer(bucket, ledger, limit=4)
    buffer.poll(["a"])
    lost = names(buffer.next_batch(Strict(2, 0), version=0))
    again = RolloutBuffer(bucket, ledger, limit=4)
    again.poll(["a"])
    assert names(again.next_batch(Strict(2, 0), version=0)) == lost


def test_named_groups_are_fetched_in_their_order(bucket, store):
    store("a", 0, 1)
    store("b", 0, 2)
    found = read_consumed(bucket, CommitMetadata(consumed=[("b", 0), ("a", 0)]))
    assert [(p.group.worker, p.sequence, p.group.oldest_version) for p in found] == [
        ("b", 0, 2),
        ("a", 0, 1),
    ]
    with pytest.raises(CorruptError, match="missing") as caught:
        read_consumed(bucket, CommitMetadata(consumed=[("a", 1)]))
    assert keys.rollout("a", 1) in str(caught.value)


def test_the_ledger_is_a_set(bucket):
    rng = random.Random(3)
    ledger, twin = Ledger(), set()
    for _ in range(400):
        worker, sequence = rng.choice("ab"), rng.randrange(60)
        ledger.settle(worker, sequence)
        twin.add((worker, sequence))
    for worker in "abc":
        assert ledger.count(worker) == sum(name == worker for name, _ in twin)
        for sequence in range(70):
            assert ledger.settled(worker, sequence) == ((worker, sequence) in twin)
    other = ledger.copy()
    other.settle("a", 1000)
    assert not ledger.settled("a", 1000)


def test_a_version_that_does_not_exist_yet_is_dropped(bucket, store):
    store("a", 0, 3)
    store("a", 1, 2, 4)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    batch = buffer.next_batch(Strict(1, 2), version=3)
    assert names(batch) == [("a", 0)]
    assert batch.dropped == [("a", 1)]


KEPT = Bounds(vocabulary=9, temperature=1.0, context=3)


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        (KEPT, True),
        (replace(KEPT, vocabulary=8), False),
        (replace(KEPT, temperature=0.5), False),
        (replace(KEPT, context=2), False),
        (replace(KEPT, episodes=0), False),
        (replace(KEPT, reward=-1.0), False),
    ],
    ids=["sound", "token", "temperature", "context", "episodes", "reward"],
)
def test_a_group_beyond_the_bounds_is_damaged(bucket, make_group, bounds, kept):
    """A group at another temperature would be scored at that of the others in its batch."""
    assert bucket.create(keys.rollout("a", 0), encode_group(make_group("a", [1])))
    buffer = RolloutBuffer(bucket, Ledger(), limit=10, bounds=bounds)
    buffer.poll(["a"])
    assert buffer.waiting == int(kept)
    assert buffer.damaged == ([] if kept else [keys.rollout("a", 0)])


def failing(make_group, worker, causes):
    """A group with an episode for each cause; the empty one is that of an episode that went well.
    An episode that failed before a token was drawn has none.
    """
    group = make_group(worker, [0] * len(causes))
    for place, (t, cause) in enumerate(zip(group.trajectories, causes, strict=True)):
        tokens = slice(0) if cause == "reset" else slice(None)
        group.trajectories[place] = replace(
            t,
            tokens_T=t.tokens_T[tokens],
            logprobs_T=t.logprobs_T[tokens],
            versions_T=t.versions_T[tokens],
            mask_T=t.mask_T[tokens],
            cause=cause,
        )
    return group


@pytest.mark.parametrize("causes", [["reset"] * 3, ["tool", "", "tool"], ["tool"], ["tool", ""]])
def test_a_group_that_failures_left_too_small_is_settled_by_its_cause(bucket, make_group, causes):
    bucket.create(keys.rollout("a", 0), encode_group(failing(make_group, "a", causes)))
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    assert (buffer.waiting, buffer.stored("a"), buffer.dropping()["a"]) == (0, 1, 1)
    assert (buffer.failed, buffer.failure) == (1, causes[0])
    bucket.create(keys.rollout("a", 1), encode_group(failing(make_group, "a", ["", "tool", ""])))
    buffer.poll(["a"])
    assert buffer.failed == 0
    batch = buffer.next_batch(Strict(1, 0), version=0)
    assert batch.dropped == [("a", 0)]
    assert (batch.drops[0].cause, batch.drops[0].detail) == ("failed", causes[0])
    assert names(batch) == [("a", 1)]


def test_drops_say_why(bucket, store, make_group):
    store("a", 0, 0)
    store("a", 1, 9)
    bucket.put(keys.rollout("a", 2), b"x")
    bucket.create(keys.rollout("a", 3), encode_group(failing(make_group, "a", ["tool"])))
    store("a", 4, 5)
    buffer = RolloutBuffer(bucket, Ledger(), limit=10)
    buffer.poll(["a"])
    found = buffer.next_batch(Strict(1, 2), version=5)
    assert {drop.sequence: drop.cause for drop in found.drops} == {
        0: "stale",
        1: "unknown version",
        2: "damaged",
        3: "failed",
    }
    assert {drop.sequence: drop.tokens for drop in found.drops} == {0: 2, 1: 2, 2: 0, 3: 2}


def test_an_impossible_log_probability_is_damage(bucket, make_group):
    group = make_group("a", [1])
    group.trajectories[0] = replace(
        group.trajectories[0], logprobs_T=np.full_like(group.trajectories[0].logprobs_T, -101.0)
    )
    assert "log-probability" in KEPT.fault(group)


def test_a_worker_that_stores_damaged_groups_is_quarantined(bucket, store):
    """Its groups cost nothing from then on; a few damaged ones among many cost no worker that."""
    for sequence in range(40):
        bucket.put(keys.rollout("liar", sequence), b"x")
        store("honest", sequence, 0)
    for sequence in range(0, 40, 5):
        bucket.put(keys.rollout("honest", sequence), b"x")
    buffer = RolloutBuffer(bucket, Ledger(), limit=100)
    buffer.poll(["honest", "liar"])
    assert buffer.quarantined.keys() == {"liar"}
    assert buffer.stored("honest") == 40
    assert buffer.stored("liar") == QUARANTINE_AFTER
    assert "not a valid" in buffer.quarantined["liar"]
    assert buffer.poll(["liar"]) == 0
