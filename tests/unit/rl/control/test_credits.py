"""The trainer's desk: credits as the workers read them, and who counts as alive."""

import msgspec
import pytest

from deltawire.config import RunConfig, StalenessConfig, TrainConfig
from deltawire.errors import CorruptError
from deltawire.rl.control import credits as desk_module
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import Strict, WindowedFifo
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.rollouts import encode_group

CONFIG = RunConfig(name="test", train=TrainConfig(groups_per_step=2, max_staleness=1))


@pytest.fixture
def bucket():
    return open_bucket("memory://")


def desk_at(bucket, ledger=None, granted=None, policy="strict"):
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
    desk, pool = desk_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    desk.observe(pool, {"a", "b"})
    desk.write("training")
    assert credits_of(bucket) == {"a": 2, "b": 2}


def test_nothing_is_granted_before_training(bucket):
    desk, pool = desk_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    desk.observe(pool, {"a"})
    desk.write()
    assert credits_of(bucket) == {}
    assert read_trainer(bucket).phase == "starting"


def test_a_commit_settles_and_grants_at_once(bucket, make_group):
    desk, pool = desk_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    desk.observe(pool, {"a"})
    desk.write("training")
    store(bucket, make_group, "a", 4, 0)
    pool.poll(["a"])
    desk.observe(pool, {"a"})
    desk.write()
    assert credits_of(bucket) == {"a": 4}
    desk.expect(1, CommitMetadata(step=1, consumed=[("a", 0)], dropped=[("a", 2)]))
    assert credits_of(bucket) == {"a": 4}
    desk.committed(1, "0123")
    status = read_trainer(bucket)
    assert (status.version, status.digest, status.epoch) == (1, "0123", 3)
    assert status.credits == {"a": 6}


def test_drops_make_room_although_no_batch_reports_them(bucket, make_group):
    """Every outstanding group is too old, so no batch can come: the places they hold must be
    granted again, or the run would stand still for ever."""
    desk, pool = desk_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    desk.observe(pool, {"a"})
    desk.write("training")
    store(bucket, make_group, "a", 4, 0)
    pool.poll(["a"])
    assert pool.take(Strict(2, 1), version=2) is None
    desk.observe(pool, {"a"})
    desk.write()
    assert credits_of(bucket) == {"a": 8}
    desk.write()
    assert credits_of(bucket) == {"a": 8}
    store(bucket, make_group, "a", 2, 2, first=4)
    pool.poll(["a"])
    batch = pool.take(Strict(2, 1), version=2)
    assert len(batch.dropped) == 4
    desk.observe(pool, {"a"})
    desk.expect(3, CommitMetadata(step=3, consumed=[("a", 4), ("a", 5)], dropped=batch.dropped))
    desk.write()
    assert credits_of(bucket) == {"a": 8}
    desk.committed(3, "")
    assert credits_of(bucket) == {"a": 10}


def test_credits_outlive_the_trainer(bucket):
    """A new trainer starts from the credits it finds: they are cumulative and never shrink."""
    ledger = Ledger()
    for sequence in range(5):
        ledger.settle("a", sequence)
    desk = desk_at(bucket, ledger, {"a": 7, "gone": 3})
    desk.observe(RolloutBuffer(bucket, ledger.copy(), limit=4), {"a"})
    desk.write("training")
    assert credits_of(bucket)["gone"] == 3
    assert credits_of(bucket)["a"] >= 7


def test_more_groups_than_credits_count_as_granted(bucket, make_group):
    """A worker whose credits were lost with ``trainer.json`` is not owed them again."""
    desk, pool = desk_at(bucket), RolloutBuffer(bucket, Ledger(), limit=4)
    store(bucket, make_group, "a", 3, 0)
    pool.poll(["a"])
    desk.observe(pool, {"a"})
    desk.write("training")
    assert credits_of(bucket) == {"a": 4}


def test_the_status_is_written_only_when_it_changed(bucket, monkeypatch):
    puts = []
    monkeypatch.setattr(bucket, "put", lambda key, data: puts.append(key))
    desk = desk_at(bucket)
    desk.observe(RolloutBuffer(bucket, Ledger(), limit=4), {"a"})
    for _ in range(3):
        desk.write("training")
    assert puts == [keys.TRAINER]
    desk.write("finished")
    assert puts == [keys.TRAINER] * 2


def test_a_status_that_cannot_be_read_is_corrupt(bucket):
    assert read_trainer(bucket) is None
    bucket.put(keys.TRAINER, b"{}")
    with pytest.raises(CorruptError):
        read_trainer(bucket)


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(desk_module.time, "monotonic", clock.monotonic)
    return clock


@pytest.mark.parametrize("policy", ["strict", "windowed_fifo"])
def test_who_is_gone_for_long_is_forgotten_and_may_come_back(bucket, make_group, clock, policy):
    """``trainer.json`` names no more workers than there are, and a name used again goes on."""
    ledger = Ledger()
    desk = desk_at(bucket, ledger, policy=policy)
    pool = RolloutBuffer(
        bucket, ledger, limit=8, arrive=desk.staleness.arrive, clock=clock.monotonic
    )
    for worker in ("a", "b"):
        desk.observe(pool, {worker})
        desk.write("training")
        store(bucket, make_group, worker, 2, 0)
        pool.poll([worker])
    ledger.settle("a", 0)
    ledger.settle("a", 1)
    desk.observe(pool, {"c"})
    desk.write("training")
    assert credits_of(bucket).keys() == {"a", "b", "c"}
    clock.now += desk_module.FORGET_S
    desk.observe(pool, {"c"})
    desk.write("training")
    assert credits_of(bucket).keys() == {"b", "c"}, "b has groups that wait"
    before = desk.staleness.limit
    desk.observe(pool, {"a", "c"})
    desk.write("training")
    assert credits_of(bucket)["a"] >= 2
    loads = desk._loads()
    outstanding = sum((w.granted if w.alive else w.stored) - w.settled for w in loads.values())
    assert outstanding <= before
    if isinstance(desk.staleness, WindowedFifo):
        # A credit that was forgotten must not be waited for: nobody will work it off.
        assert len(desk.staleness._open.get("a", [])) == credits_of(bucket)["a"] - 2


def test_the_silent_are_asked_for_groups_ever_more_rarely(bucket, make_group, clock):
    """A group whose put came late is taken all the same, at once if its worker lives."""
    faulty = FaultyBucket(bucket)
    pool = RolloutBuffer(faulty, Ledger(), limit=4, clock=clock.monotonic)
    names = {f"w{number}" for number in range(20)}
    pool.poll(names, {"live"})
    for _ in range(3600):
        clock.now += 1
        pool.poll({*names, "live"}, {"live"})
    asked = [key for verb, key in faulty.operations if verb == "get"]
    dead = [key for key in asked if "/live/" not in key]
    assert len(dead) <= 20 * 14
    assert len(asked) - len(dead) == 3600
    store(bucket, make_group, "w3", 1, 0)
    assert pool.poll(names, {"w3"}) == 1
    store(bucket, make_group, "w4", 1, 0)
    clock.now += 3700
    assert pool.poll(names, set()) == 1
