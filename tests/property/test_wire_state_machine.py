"""Publishers, folders, retention and readers in any order, against a list of models."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltawire.errors import CorruptError, FencedError, RetryError
from deltawire.store import open_bucket
from deltawire.sync import (
    Folder,
    Subscriber,
    chain,
    load_mirror,
    newest_version,
    read_manifest,
    retire,
)
from deltawire.sync.check import check_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher, start_run, weights

PARTS = [None, ["norm", "steps"], {"embed.weight": (3, 17)}]


class Wire(RuleBasedStateMachine):
    """What was published is a list; whatever a reader holds must be in it, at its place."""

    @initialize()
    def begin(self):
        self.bucket = FaultyBucket(open_bucket("memory://"))
        self.published = []
        self.boundary = 0
        self.readers = []
        self.stalled = []
        self.step = 0
        self.publisher = start_publisher(self.bucket, anchor_every=4)
        self.run = start_run(self.bucket)
        self.folder = Folder(self.bucket, self.run, (2, 4), threads=1)
        self.publish()

    @rule()
    def publish(self):
        self.step += 1 if self.published else 0
        tensors = weights(self.step)
        self.published.append(tensors)
        assert self.publisher.publish(tensors) == len(self.published) - 1
        self.publisher.flush()

    @rule(verb=st.sampled_from(["put", "create", "list"]), done=st.booleans(), long=st.booleans())
    def publish_through_faults(self, verb, done, long):
        self.bucket.fail(verb, times=None if long else 2, done=done)
        self.step += 1
        tensors = weights(self.step)
        version = self.publisher.publish(tensors)
        try:
            self.publisher.flush()
        except RetryError:
            assert long
        self.bucket.heal()
        # Whether it happened is the bucket's to say; the publisher finds out by itself.
        if newest_version(self.bucket) == version:
            self.published.append(tensors)
        assert newest_version(self.bucket) == len(self.published) - 1

    @rule()
    def restart_the_publisher(self):
        self.stalled.append(self.publisher)
        self.publisher = start_publisher(self.bucket, anchor_every=4)
        assert self.publisher.version == len(self.published) - 1

    @precondition(lambda self: self.stalled)
    @rule()
    def a_stalled_publisher_wakes(self):
        before = newest_version(self.bucket)
        old = self.stalled.pop()
        if old.version == before and old._uncertain is None:
            return  # Nobody has published since: it would rightly go on.
        try:
            old.publish(weights(99, seed=5))
            old.flush()
        except FencedError:
            assert newest_version(self.bucket) == before
        else:
            # Its own commit, never answered, was still the newest.
            assert newest_version(self.bucket) == before + 1
            self.published.append(weights(99, seed=5))
            self.stalled.append(self.publisher)
            self.publisher = old
            return
        old.close()

    @rule()
    def fold(self):
        try:
            self.folder.fold_up_to(len(self.published) - 1)
        except CorruptError:
            # What it stood on was retired meanwhile: another one begins further on.
            self.folder = Folder(self.bucket, self.run, (2, 4), threads=1)

    @rule(back=st.integers(0, 9), grace=st.booleans())
    def retire(self, back, grace):
        found = retire(
            self.bucket,
            self.run,
            cutoff=len(self.published) - 1 - back,
            grace_s=3600 if grace else 0,
        )
        self.boundary = max(self.boundary, found.swept)

    @rule(part=st.sampled_from(PARTS), back=st.integers(0, 6), stepwise=st.booleans())
    def a_reader_joins(self, part, back, stepwise):
        at = max(len(self.published) - 1 - back, self.boundary)
        mirror = load_mirror(self.bucket, self.run, at=at, wanted=part)
        self.readers.append(Subscriber(self.bucket, self.run, mirror, stepwise=stepwise))

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 99), once=st.booleans())
    def a_reader_moves(self, number, once):
        reader = self.readers[number % len(self.readers)]
        if not once:
            reader.advance()
            assert reader.mirror.version == len(self.published) - 1
        elif (update := reader.prepare()) is not None:
            reader.commit(update)

    @precondition(lambda self: self.published)
    @rule()
    def check(self):
        found = check_run(self.bucket)
        assert found.faults == []
        assert found.newest == len(self.published) - 1

    @invariant()
    def nobody_is_ever_wrong(self):
        for reader in getattr(self, "readers", []):
            mirror = reader.mirror
            wanted = self.published[mirror.version]
            for name, bits in mirror.tensors.items():
                start = mirror.starts.get(name, 0)
                flat = wanted[name].reshape(-1)[start : start + bits.size]
                assert same_bits({"": bits}, {"": flat})
            assert mirror.compute_held() == mirror.held_digest

    def teardown(self):
        for publisher in [*getattr(self, "stalled", []), getattr(self, "publisher", None)]:
            if publisher is not None:
                publisher._pool.shutdown()
        if getattr(self, "published", None):
            for version in range(self.boundary, len(self.published)):
                assert not read_manifest(self.bucket, self.run, version).retired
                held = load_mirror(self.bucket, self.run, at=version)
                assert same_bits(held.tensors, self.published[version])


class TestWire(Wire.TestCase):
    """No pauses between attempts: the faults are injected ones."""

    settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

    def setUp(self):
        self._pause = chain.FIRST_PAUSE_S
        chain.FIRST_PAUSE_S = 0.0

    def tearDown(self):
        chain.FIRST_PAUSE_S = self._pause
