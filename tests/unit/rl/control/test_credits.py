"""The credit issuer: credits as the workers read them."""

import msgspec
import pytest

from deltawire.config import RunConfig, StalenessConfig, TrainConfig
from deltawire.errors import CorruptError
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import Strict, WindowedFifo
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.rollouts import encode_group

CONFIG = RunConfig(name="test", train=TrainConfig(groups_per_step=2, max_staleness=1))


@pytest.fixture
def bucket():
    return open_bare_bucket("memory://")


def issuer_at(bucket, ledger=None, granted=None, policy="strict"):
    train = msgspec.structs.replace(CONFIG.train, staleness=StalenessConfig(policy=policy))
    config = msgspec.structs.replace(CONFIG, train=train)
    return CreditIssuer(
        bucket, config, Ledger() if ledger is None else ledger, epoch=3, granted=granted or {}
    )


def credits_of(bucket):
    return read_trainer(bucket).credits


def store(bucket, make_group, worker, count, version, first=0):
    for sequence in range(first, first + count):
        data = encode_group(make_group(worker, [version]))
        assert bucket.create(keys.rollout(worker, sequence), data)


def test_credits_are_shared_out_up_to_the_limit(bucket):
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    issuer.observe(buffer, {"a", "b"})
    issuer.write("training")
    assert credits_of(bucket) == {"a": 2, "b": 2}


def test_nothing_is_granted_before_training(bucket):
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    issuer.observe(buffer, {"a"})
    issuer.write()
    assert credits_of(bucket) == {}
    assert read_trainer(bucket).phase == "starting"


def test_a_commit_settles_and_grants_at_once(bucket, make_group):
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    issuer.observe(buffer, {"a"})
    issuer.write("training")
    store(bucket, make_group, "a", 4, 0)
    buffer.poll(["a"])
    issuer.observe(buffer, {"a"})
    issuer.write()
    assert credits_of(bucket) == {"a": 4}
    issuer.expect(1, CommitMetadata(step=1, consumed=[("a", 0)], dropped=[("a", 2, 1)]))
    assert credits_of(bucket) == {"a": 4}
    issuer.committed(1, "0123")
    status = read_trainer(bucket)
    assert (status.version, status.digest, status.epoch) == (1, "0123", 3)
    assert status.credits == {"a": 6}


def test_drops_make_room_although_no_batch_reports_them(bucket, make_group):
    """Every outstanding group is too old, so no batch can come: the places they hold must be
    granted again, or the run would stand still forever.
    """
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    issuer.observe(buffer, {"a"})
    issuer.write("training")
    store(bucket, make_group, "a", 4, 0)
    buffer.poll(["a"])
    assert buffer.next_batch(Strict(2, 1), version=2) is None
    issuer.observe(buffer, {"a"})
    issuer.write()
    assert credits_of(bucket) == {"a": 8}
    issuer.write()
    assert credits_of(bucket) == {"a": 8}
    store(bucket, make_group, "a", 2, 2, first=4)
    buffer.poll(["a"])
    batch = buffer.next_batch(Strict(2, 1), version=2)
    assert len(batch.dropped) == 4
    issuer.observe(buffer, {"a"})
    issuer.expect(
        3, CommitMetadata(step=3, consumed=[("a", 4), ("a", 5)], dropped=ranges_of(batch.dropped))
    )
    issuer.write()
    assert credits_of(bucket) == {"a": 8}
    issuer.committed(3, "")
    assert credits_of(bucket) == {"a": 10}


def test_credits_outlive_the_trainer(bucket):
    """A new trainer starts from the credits it finds: they are cumulative and never shrink."""
    ledger = Ledger()
    for sequence in range(5):
        ledger.settle("a", sequence)
    issuer = issuer_at(bucket, ledger, {"a": 7, "gone": 3})
    issuer.observe(RolloutBuffer(bucket, ledger.copy(), limit=4), {"a"})
    issuer.write("training")
    assert credits_of(bucket)["gone"] == 3
    assert credits_of(bucket)["a"] >= 7


def test_more_groups_than_credits_count_as_granted(bucket, make_group):
    """A worker whose credits were lost with ``trainer.json`` is not owed them again."""
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    store(bucket, make_group, "a", 3, 0)
    buffer.poll(["a"])
    issuer.observe(buffer, {"a"})
    issuer.write("training")
    assert credits_of(bucket) == {"a": 4}


def test_the_status_is_written_only_when_it_changed(bucket, monkeypatch):
    puts = []
    monkeypatch.setattr(bucket, "put", lambda key, data: puts.append(key))
    issuer = issuer_at(bucket)
    issuer.observe(RolloutBuffer(bucket, Ledger(), limit=4), {"a"})
    for _ in range(3):
        issuer.write("training")
    assert puts == [keys.TRAINER]
    issuer.write("finished")
    assert puts == [keys.TRAINER] * 2


def test_a_status_that_cannot_be_read_is_corrupt(bucket):
    assert read_trainer(bucket) is None
    bucket.put(keys.TRAINER, b"{}")
    with pytest.raises(CorruptError):
        read_trainer(bucket)


@pytest.mark.parametrize("policy", ["strict", "windowed_fifo"])
def test_a_worker_that_is_gone_is_forgotten_and_may_return(bucket, make_group, policy):
    """``trainer.json`` names no more workers than there are, and a name used again continues."""
    ledger = Ledger()
    issuer = issuer_at(bucket, ledger, policy=policy)
    buffer = RolloutBuffer(bucket, ledger, limit=8, arrive=issuer.staleness.arrive)
    for worker in ("a", "b"):
        issuer.observe(buffer, {worker})
        issuer.write("training")
        store(bucket, make_group, worker, 2, 0)
        buffer.poll([worker])
    ledger.settle("a", 0)
    ledger.settle("a", 1)
    issuer.observe(buffer, {"c"})
    issuer.write("training")
    assert credits_of(bucket).keys() == {"a", "b", "c"}
    assert [issuer.is_settled(worker) for worker in "ab"] == [True, False]
    issuer.forget("a")
    buffer.forget("a")
    issuer.observe(buffer, {"c"})
    issuer.write("training")
    assert credits_of(bucket).keys() == {"b", "c"}
    buffer.poll(["a"])
    issuer.observe(buffer, {"a", "c"})
    issuer.write("training")
    assert credits_of(bucket)["a"] >= 2
    loads = issuer._loads()
    outstanding = sum((w.granted if w.alive else w.stored) - w.settled for w in loads.values())
    assert outstanding <= issuer.staleness.limit
    if isinstance(issuer.staleness, WindowedFifo):
        # A forgotten credit must not be waited for: no worker will use it.
        assert len(issuer.staleness._open.get("a", [])) == credits_of(bucket)["a"] - 2


def test_groups_that_were_not_granted_are_not_read(bucket, make_group):
    """A worker that stores more than it may gains nothing, and costs no more than its credits."""
    faulty = FaultyBucket(bucket)
    issuer, buffer = issuer_at(bucket), RolloutBuffer(faulty, Ledger(), limit=4)
    store(bucket, make_group, "flood", 40, 0)
    issuer.observe(buffer, {"flood", "honest"})
    issuer.write("training")
    assert buffer.poll(["flood", "honest"], issuer.granted()) == 2
    read = {key for verb, key in faulty.operations if verb == "get"}
    assert keys.rollout("flood", 1) in read
    assert keys.rollout("flood", 2) not in read


def test_every_worker_contributes_before_any_contributes_twice(bucket, make_group):
    for worker in "abc":
        store(bucket, make_group, worker, 3, 0)
    for readers in (1, 4):
        buffer = RolloutBuffer(bucket, Ledger(), limit=9, readers=readers)
        buffer.poll("cab")
        taken = buffer.next_batch(Strict(6, 1), version=0).taken
        assert [one.group.worker for one in taken] == [*"abcabc"]


def test_a_worker_that_never_delivers_loses_its_credits(bucket, make_group, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("deltawire.rl.control.credits.time.monotonic", lambda: now[0])
    issuer, buffer = issuer_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)

    def poll():
        buffer.poll(["mute", "honest"], issuer.granted())
        issuer.observe(buffer, {"mute", "honest"})
        issuer.write("training")

    poll()
    assert credits_of(bucket) == {"honest": 2, "mute": 2}
    for _ in range(3):
        now[0] += CONFIG.faults.long_s / 2
        poll()
        stored = buffer.stored("honest")
        store(bucket, make_group, "honest", credits_of(bucket)["honest"] - stored, 0, first=stored)
    poll()
    assert credits_of(bucket) == {"honest": 4, "mute": 2}
    store(bucket, make_group, "mute", 1, 0)
    poll()
    poll()
    assert "mute" in issuer.alive
