"""Publishers, subscribers, compaction, retention, a relay and stores that fail, in any order.

The model is a list of dicts of arrays: what each version must hold. Whatever happens, a committed
version holds that, at the source and where a relay has carried it; a subscriber holds one of them;
and nothing but an error of deltawire's own is ever raised.
"""

import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deltawire import codec
from deltawire.errors import CorruptError, DeltawireError, FencedError, RetryError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import (
    Compactor,
    Mirror,
    Publisher,
    Relay,
    Subscriber,
    create_run,
    load_mirror,
    newest_version,
    read_manifest,
)
from deltawire.sync.chain import gc_intents as intents
from deltawire.sync.chain import objects as chain
from deltawire.sync.chain import retention
from deltawire.sync.chain.retention import prune
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, flip_bit, no_answer
from deltawire.testing.tiny import same_bits
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec

SPECS = [
    TensorSpec("embed", (9, 5), "BF16"),
    TensorSpec("norm", (7,), "F32"),
    TensorSpec("nothing", (0, 3), "BF16"),
]


def fresh(rng):
    return {
        spec.name: np.frombuffer(
            rng.bytes(spec.count * codec.ITEMSIZE[spec.dtype]), codec.unsigned_of(spec.dtype)
        ).reshape(spec.shape)
        for spec in SPECS
    }


ANYWHERE = st.integers(1, 25) | st.none()
TIMES = st.sampled_from([1, 4, None])


class Wire(RuleBasedStateMachine):
    publishers = Bundle("publishers")
    subscribers = Bundle("subscribers")
    relays = Bundle("relays")

    @initialize(
        target=publishers,
        seed=st.integers(0, 2**32 - 1),
        chunk=st.sampled_from([8, 1000]),
        last=st.integers(0, 8),
    )
    def start(self, seed, chunk, last):
        self.rng = np.random.default_rng(seed)
        self.inner = open_bare_bucket("memory://")
        self.region = open_bare_bucket("memory://")
        self.model = [fresh(self.rng)]
        self.tried = {0: [self.model[0]]}
        flat = {name: bits.reshape(-1) for name, bits in self.model[0].items()}
        run = Run(
            id="ab" * 16,
            name="r",
            created_at=0.0,
            tensors=SPECS,
            chunk=chunk,
            digest=codec.digest_model(flat).hex(),
        )
        self.run = create_run(self.inner, run)
        self.closed = 0
        self.opened = []
        self.compactor = None
        publisher = self.new_publisher()
        publisher.publish(self.model[0])
        publisher.flush()
        for _ in range(last):
            self.publish(publisher, 0.05, None, None, False, None)
        return publisher

    def new_publisher(self):
        """With the next epoch, on a separate bucket handle that may fail."""
        epoch = 0
        if newest_version(self.inner) is None:
            blank = {s.name: np.zeros(s.count, codec.unsigned_of(s.dtype)) for s in SPECS}
            mirror = Mirror(blank, -1, codec.ZERO)
        else:
            mirror = load_mirror(self.inner, self.run)
            epoch = read_manifest(self.inner, self.run, mirror.version).epoch + 1
        bucket = RetryingBucket(FaultyBucket(self.inner))
        publisher = Publisher(
            bucket, self.run, mirror, epoch=epoch, anchor_every=4, compaction_strides=(), threads=1
        )
        self.opened.append(publisher)
        return publisher

    def committed(self):
        return newest_version(self.inner)

    @rule(target=publishers)
    def start_publisher(self):
        """A restart, or a rival: the other publishers are not notified."""
        return self.new_publisher()

    @rule(publisher=consumes(publishers))
    def stop_publisher(self, publisher):
        publisher.bucket.inner.heal()
        with suppress(DeltawireError):
            publisher.close()
        self.follow_up()

    @rule(
        publisher=publishers,
        density=st.sampled_from([0.0, 0.05, 1.0]),
        at=st.integers(1, 12) | st.none(),
        times=TIMES,
        done=st.booleans(),
        meanwhile=st.sampled_from([None, None, "prune", "relay"]),
    )
    def publish(self, publisher, density, at, times, done, meanwhile):
        """The next version; the store may fail meanwhile, or the publisher be stalled while others
        go on."""
        if at is not None and meanwhile is None:
            publisher.bucket.inner.fail(at=at, times=times, done=done, error=no_answer)
        elif at is not None:
            publisher.bucket.inner.pause(at=at, done=done, wait=lambda: self.go_on(meanwhile))
        base = self.model[-1]
        tensors = {
            name: np.where(self.rng.random(bits.shape) < density, other, bits).astype(bits.dtype)
            for (name, bits), other in zip(base.items(), fresh(self.rng).values(), strict=True)
        }
        before = self.committed()
        number = None
        with suppress(DeltawireError):
            # One that has failed has to be told before it takes new weights.
            with suppress(DeltawireError):
                publisher.flush()
            number = publisher.publish(tensors)
            self.tried.setdefault(number, []).append(tensors)
            publisher.flush()
            publisher.wait_for_anchor()
            assert publisher.version == number == self.committed()
        publisher.bucket.inner.heal()
        self.follow_up()
        assert before <= self.committed() <= before + 1 or number is None

    @rule(publisher=publishers, count=st.integers(2, 4), density=st.sampled_from([0.0, 0.05]))
    def publish_some(self, publisher, count, density):
        """Days go by."""
        for _ in range(count):
            self.publish(publisher, density, None, None, False, None)

    def go_on(self, who):
        if who == "prune":
            prune(self.inner, self.run, cutoff=self.committed(), grace_s=0)
            self.closed = chain.newest_retention_floor(self.inner, self.run)
        else:
            Relay(self.inner, self.region, strides=(), grace_s=0).advance()

    def follow_up(self):
        """Take into the model what has been committed: one of those that were tried."""
        for version in range(len(self.model), self.committed() + 1):
            held = load_mirror(self.inner, self.run, at=version)
            (found, *_) = [t for t in self.tried[version] if same_bits(held.tensors, t)]
            self.model.append(found)

    @rule(
        target=subscribers,
        back=st.integers(0, 9),
        stepwise=st.booleans(),
        part=st.sampled_from([None, ["norm"], {"embed": (2, 5)}]),
        far=st.booleans(),
    )
    def join(self, back, stepwise, part, far):
        version = max(self.committed() - back, self.closed)
        mirror = None
        if far:
            with suppress(CorruptError):  # Perhaps the relay has not come so far, or is past it.
                mirror = load_mirror(self.region, self.run, at=version, wanted=part)
        bucket = RetryingBucket(FaultyBucket(self.inner if mirror is None else self.region))
        if mirror is None:
            mirror = load_mirror(bucket, self.run, at=version, wanted=part)
        return Subscriber(bucket, self.run, mirror, stepwise=stepwise)

    @rule(
        subscriber=subscribers,
        at=st.integers(1, 6) | st.none(),
        trouble=st.sampled_from(["fail", "flip", "short"]),
        bit=st.integers(0, 10**6),
    )
    def step(self, subscriber, at, trouble, bit):
        """One step; the store may fail or lie meanwhile. Nothing changes but by a commit."""
        mirror = subscriber.mirror
        before = mirror.copy()
        if at is not None and trouble == "fail":
            subscriber.bucket.inner.fail(at=at)
        elif at is not None:
            change = (lambda d: d[: len(d) // 2]) if trouble == "short" else None
            subscriber.bucket.inner.damage(
                "*", change or (lambda d: flip_bit(d, bit)), at=at, times=1
            )
        update = None
        with suppress(CorruptError, RetryError):
            update = subscriber.prepare()
        subscriber.bucket.inner.heal()
        assert (mirror.version, mirror.digest) == (before.version, before.digest)
        assert all((mirror.tensors[n] == before.tensors[n]).all() for n in before.tensors)
        if update is not None:
            assert update.version > mirror.version
            subscriber.commit(update)
            assert mirror.version == update.version
        self.holds(mirror)

    @rule(subscriber=consumes(subscribers))
    def catch_up(self, subscriber):
        """At any lag, and whatever retention pruned: to the newest, in few steps."""
        if subscriber.bucket.inner.inner is self.region:
            self.start_relay(None).advance()
        for _ in range(25):
            update = None
            with suppress(CorruptError):
                update = subscriber.prepare()
            if update is not None:
                subscriber.commit(update)
        assert subscriber.mirror.version == self.committed()
        self.holds(subscriber.mirror)

    @rule(restart=st.booleans())
    def compact(self, restart):
        # Its own thread would run at moments that no seed repeats. Deltas to compact may be gone;
        # then readers do without, and another compactor begins at a later version.
        if restart or self.compactor is None:
            self.compactor = Compactor(self.inner, self.run, (2, 4), threads=1)
        try:
            self.compactor.compact_up_to(self.committed())
        except CorruptError:
            self.compactor = None

    @rule(target=relays, start=st.integers(0, 9) | st.none())
    def start_relay(self, start):
        """The first, another next to it, or one again after it was stopped."""
        source = RetryingBucket(FaultyBucket(self.inner))
        region = RetryingBucket(FaultyBucket(self.region))
        if start is not None and start < self.closed:
            start = None
        return Relay(source, region, start=start, strides=(), grace_s=0)

    @rule(
        relay=relays,
        side=st.sampled_from(["source", "destination"]),
        at=ANYWHERE,
        times=TIMES,
        done=st.booleans(),
        steps=st.integers(1, 4),
    )
    def relay_through_faults(self, relay, side, at, times, done, steps):
        """Some versions, stopped at any point: by a store that fails, and is not asked again."""
        faulty = getattr(relay, side).inner
        if at is not None:
            faulty.fail(at=at, times=times, done=done)
        # A damaged or lost object is an error of this world, but there are none in it: what the
        # relay counts on may be pruned under its feet, and then it says so.
        with suppress(RetryError, CorruptError):
            for _ in range(steps):
                relay.step()
            relay.prune()
        faulty.heal()

    @rule(relay=consumes(relays))
    def relay_all(self, relay):
        """Once nothing disturbs it, the region is the source, and whole."""
        with suppress(CorruptError):
            # Another relay has gone on meanwhile, and pruned what this one's mirror builds on.
            relay.advance()
        relay = self.start_relay(None)
        relay.advance()
        assert newest_version(self.region) == self.committed()
        found = check_run(self.region)
        assert found.whole, found.faults
        assert chain.newest_retention_floor(self.region, self.run) >= self.closed
        first = max(found.floor, found.first)
        for version in range(first, self.committed() + 1):
            self.holds(load_mirror(self.region, self.run, at=version))

    @rule()
    def check(self):
        found = check_run(self.inner)
        assert found.faults == []
        assert found.newest == self.committed()

    @precondition(lambda self: len(self.model) > 3)
    @rule(
        keep=st.integers(0, 6),
        at=ANYWHERE,
        times=TIMES,
        done=st.booleans(),
    )
    def prune(self, keep, at, times, done):
        """With a grace period of nothing, and given up at any point."""
        bucket = FaultyBucket(self.inner)
        if at is not None:
            bucket.fail(at=at, times=times, done=done)
        with suppress(RetryError):
            prune(RetryingBucket(bucket), self.run, cutoff=self.committed() - keep, grace_s=0)
        floors = [keys.trailing_number(key) for key in self.inner.list(keys.RETENTION_FLOORS)]
        highest = max(floors, default=0)
        assert self.closed <= highest <= max(self.committed() - keep, self.closed)
        self.closed = highest

    def holds(self, mirror):
        """A mirror, whole or in part, holds what its version must hold."""
        wanted = self.model[mirror.version]
        for name, bits in mirror.tensors.items():
            start = mirror.starts.get(name, 0)
            assert (bits == wanted[name].reshape(-1)[start : start + bits.size]).all()
        assert mirror.compute_held() == mirror.held_digest

    @invariant()
    def every_version_that_is_kept_can_be_read(self):
        newest = self.committed()
        assert newest == len(self.model) - 1
        version = self.closed + int(self.rng.integers(newest - self.closed + 1))
        for at in {version, newest}:
            self.holds(load_mirror(self.inner, self.run, at=at))

    @invariant()
    def a_region_is_behind_and_never_wrong(self):
        newest = newest_version(self.region)
        assert newest is None or newest <= self.committed()
        if newest is not None:
            with suppress(CorruptError):  # The versions that were pruned before they were carried.
                self.holds(load_mirror(self.region, self.run, at=newest))

    def teardown(self):
        for publisher in getattr(self, "opened", []):
            publisher.bucket.inner.heal()
            with suppress(DeltawireError):
                publisher.close()


@pytest.fixture
def _time_flies(monkeypatch):
    """Pauses take no time, and waiting for an intent advances the store's clock."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    real, passed = intents.store_clock, [0.0]

    def clock(bucket):
        return real(bucket) + timedelta(seconds=passed[0])

    def sleep(seconds):
        passed[0] += 100.0

    monkeypatch.setattr(intents, "store_clock", clock)
    monkeypatch.setattr(retention, "store_clock", clock)
    monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))


@pytest.mark.usefixtures("_time_flies")
def test_any_order_of_events():
    run_wire(seed=0, examples=12)


@pytest.mark.drills
@pytest.mark.usefixtures("_time_flies")
def test_any_order_of_many_events(drill_seed):
    run_wire(seed=1 + drill_seed, examples=30)


def run_wire(*, seed, examples):
    run_state_machine_as_test(
        hypothesis.seed(seed)(Wire),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("wrong", ["model", "fence"])
def test_the_machine_would_notice(wrong):
    """A broken wire raises an assertion instead of passing silently."""
    machine = Wire()
    machine.start(seed=1, chunk=8, last=0)
    first, rival = machine.new_publisher(), machine.new_publisher()
    rival.publish(fresh(machine.rng))
    rival.flush()
    if wrong == "model":
        machine.model.append(machine.model[0])
        with pytest.raises(AssertionError):
            machine.every_version_that_is_kept_can_be_read()
    else:
        first.publish(machine.model[0])
        with pytest.raises(FencedError):
            first.flush()
        with pytest.raises(AssertionError):
            machine.every_version_that_is_kept_can_be_read()
    machine.teardown()
