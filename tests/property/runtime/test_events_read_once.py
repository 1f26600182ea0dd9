"""Readers of a run's events, compared with readers that list everything each time.

Writers come, go and return, the store fails before and after a put, old segments are deleted or
archived, old archives are deleted, and readers read at random moments.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numbered_events import numbered_event

from deltawire.errors import RetryError
from deltawire.events import decode_lines
from deltawire.runtime.event_archive import EventArchiver, read_archive
from deltawire.runtime.event_cursor import QUIET_S, first_since, newest_segment, number_of, segments
from deltawire.runtime.event_log import EventLog
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.event_window import TAIL, RecentEvents, recent
from deltawire.runtime.retained import read_retained
from deltawire.store import open_bare_bucket
from deltawire.store.bucket import ObjectMeta
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys

WINDOW_S = 300.0


class ClockedBucket(FaultyBucket):
    """A store whose clock is in the test's hand."""

    def __init__(self, inner):
        super().__init__(inner)
        self.now = 1_000_000.0
        self.stamps: dict[str, float] = {}

    def put(self, key, data):
        self.stamps[key] = self.now
        super().put(key, data)

    def create(self, key, data):
        self.stamps.setdefault(key, self.now)
        return super().create(key, data)

    def head(self, key):
        return self._stamped(super().head(key))

    def list_objects(self, prefix, *, after=None):
        return [self._stamped(entry) for entry in super().list_objects(prefix, after=after)]

    def _stamped(self, entry):
        if entry is None:
            return None
        at = datetime.fromtimestamp(self.stamps[entry.key], UTC)
        return ObjectMeta(entry.key, entry.bytes, at)


class ReadersAndWriters(RuleBasedStateMachine):
    """The segments written, by stream; those still there; and those that each reader has seen."""

    @initialize(seed=st.integers(0, 99))
    def begin(self, seed):
        self.bucket = ClockedBucket(open_bare_bucket("memory://"))
        self.seed = seed
        self._heal()
        self.now = 0.0
        self.count = 0
        self.jumped = False
        self.writers: list[EventLog] = []
        self.written: dict[str, list[int]] = {}
        self.tail = EventTail(self.bucket, clock=lambda: self.now)
        self.delivered: dict[str, list[int]] = {}
        self.recent = RecentEvents(self.bucket, WINDOW_S, clock=lambda: self.now)
        self.gotten: Counter[str] = Counter()
        self.strikes = 0
        self.archived: set[str] = set()
        self.start("trainer")
        self.start("w0")

    @rule(kind=st.sampled_from(["trainer", "w0", "evaluator"]))
    def start(self, kind):
        stream = f"{kind}-{len(self.writers)}"

        def put(number, data):
            self.bucket.put(keys.events(stream, number), data)

        self.writers.append(EventLog(stream, put, clock=lambda: self.now))
        self.written[stream] = []

    @rule(
        which=st.integers(0, 5),
        rounds=st.integers(1, 12),
        struck=st.sampled_from(["", "", "before", "after"]),
        at=st.integers(1, 2),
        watched=st.booleans(),
    )
    def write(self, which, rounds, struck, at, watched):
        if struck:
            self.bucket.fail("put", at=at, done=struck == "after")
        for _ in range(rounds):
            self._write(which)
            if watched:
                self._read_tail(everything=False)
        self._heal()

    @rule(verb=st.sampled_from(["get", "head", "list"]), at=st.integers(1, 4))
    def strike_a_look(self, verb, at):
        for which in range(2):
            self._write(which)
        self.bucket.fail(verb, at=at)
        with contextlib.suppress(RetryError):
            self._look_at_recent(everything=False)
        self._read_tail(everything=False)
        self.strikes += 1
        self._heal()

    @rule(seconds=st.sampled_from([1.0, QUIET_S, WINDOW_S - 1, 1000.0, 50_000.0]))
    def wait(self, seconds):
        self._pass(seconds)

    @rule(seconds=st.sampled_from([-5000.0, -30.0, 5000.0]))
    def jump_the_stores_clock(self, seconds):
        self.bucket.now += seconds
        self.jumped = self.jumped or seconds < 0

    @rule(which=st.integers(0, 5), rounds=st.integers(0, 9), count=st.integers(1, 20))
    def delete_the_oldest(self, which, rounds, count):
        """All but a stream' last words, as a rule by age would, perhaps under a reader."""
        for _ in range(rounds):
            self._write(which)
        stream = self.writers[which % len(self.writers)].process
        for entry in segments(self.bucket.inner, stream)[:-TAIL][:count]:
            self.bucket.inner.delete(entry.key)

    @rule(
        which=st.integers(0, 5),
        rounds=st.integers(0, 3),
        fails=st.integers(0, 8),
        days=st.sampled_from([0.0, 0.0, 0.1]),
    )
    def archive(self, which, rounds, fails, days):
        """Archive a worker's stream, and the old segments of all others, perhaps while they are
        read or with a failure half-way."""
        for _ in range(rounds):
            self._write(which)
        ended = self.writers[which % len(self.writers)].process
        if not ended.startswith("w0"):
            return
        archiver = EventArchiver(
            self.bucket, after_s=0.0, compact_segments=4, keep_days=days, clock=lambda: self.now
        )
        archiver._fleet = SimpleNamespace(poll=lambda: None, streams=self.written.keys() - {ended})
        if fails:
            self.bucket.fail(at=fails)
        with contextlib.suppress(RetryError):
            archiver.archive()
        self._heal()
        self.archived.add(ended)

    @rule(everything=st.booleans())
    def follow(self, everything):
        self._read_tail(everything=everything)
        if everything:
            for stream in self.written:
                there = self._there(stream)
                assert there == [n for n in self.delivered.get(stream, []) if n in set(there)]
            number = read_retained(self.bucket.inner).archives
            while (archive := read_archive(self.bucket.inner, number)) is not None:
                for segment in archive:
                    events = {event.version for event in decode_lines(segment.data)}
                    assert events <= set(self.delivered.get(segment.stream, []))
                number += 1

    @rule(everything=st.booleans())
    def look(self, everything):
        kept = self._look_at_recent(everything=everything)
        entries = self.bucket.list_objects(keys.EVENTS)
        wanted = {entry.key for entry in recent(entries, WINDOW_S)}
        there = {entry.key for entry in entries}
        every = self.bucket.stamps.items()
        stamps = [(key, at) for key, at in every if key.startswith(keys.EVENTS)]
        gone = max((at for key, at in stamps if key not in there), default=0.0)
        # Once the newest stream is archived the window ends earlier, and what had left it is gone.
        moved_back = gone > max((at for key, at in stamps if key in there), default=0.0)
        if everything and not self.jumped and not moved_back:
            assert wanted == {key for key in kept if key in there}
        elif everything:
            for stream in self.bucket.list_prefixes(keys.EVENTS):
                tail = [entry.key for entry in segments(self.bucket, stream)[-TAIL:]]
                assert kept.keys() >= set(tail)

    @rule()
    def find_ends(self):
        """Doubling and halving against a listing."""
        for stream in self.bucket.list_prefixes(keys.EVENTS):
            listed = segments(self.bucket.inner, stream)
            newest = newest_segment(self.bucket, stream)
            assert newest is not None
            assert newest.key == listed[-1].key
            if not self.jumped:
                since_s = self.bucket.stamps[newest.key] - WINDOW_S
                first = first_since(self.bucket, stream, number_of(newest), since_s)
                young = [e for e in listed if self.bucket.stamps[e.key] >= since_s]
                assert first == number_of(young[0])

    @invariant()
    def each_once_and_in_order(self):
        for stream, delivered in getattr(self, "delivered", {}).items():
            assert delivered == sorted(set(delivered))
            assert set(delivered) <= set(self.written[stream])

    def _write(self, which):
        log = self.writers[which % len(self.writers)]
        for _ in range(1 + self.count % 2):
            log.record(numbered_event(log.process, self.count))
            self.written[log.process].append(self.count)
            self.count += 1
        log.flush()
        self._pass(1.0)

    def _heal(self):
        self.bucket.heal()
        self.bucket.shuffle(seed=self.seed)

    def _pass(self, seconds):
        self.now += seconds
        self.bucket.now += seconds

    def _there(self, stream):
        """The events of what lies in the bucket, by listing."""
        stored = (
            self.bucket.inner.get(entry.key, limit=1 << 20) or b""
            for entry in segments(self.bucket.inner, stream)
        )
        return [event.version for data in stored for event in decode_lines(data)]

    def _read_tail(self, *, everything):
        for event in self.tail.read(everything=everything):
            self.delivered.setdefault(event.process, []).append(event.version)

    def _look_at_recent(self, *, everything):
        before = len(self.bucket.operations)
        try:
            self.recent.read(everything=everything)
        finally:
            made = self.bucket.operations[before:]
            self.gotten.update(key for verb, key in made if verb == "get")
        assert max(self.gotten.values(), default=0) <= 1 + self.strikes
        return self.recent._kept


TestReadersAndWriters = ReadersAndWriters.TestCase
TestReadersAndWriters.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_an_archived_stream_does_not_move_the_window():
    """A look that failed half-way kept a segment that was archived before the next look."""
    play = ReadersAndWriters()
    play.begin(seed=0)
    play.delete_the_oldest(count=1, rounds=2, which=0)
    play.wait(seconds=WINDOW_S - 1)
    play.strike_a_look(at=1, verb="get")
    play.archive(days=0.0, fails=0, rounds=0, which=1)
    play.look(everything=True)
