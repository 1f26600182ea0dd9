"""Owners: which learner of a run may take an answer.

::

    heartbeats of workers ─▶ living learners, by name ─▶ owner = name number (id mod learners)

Each learner reads the others' heartbeats, and owns a part of the answers by their ids, so sharing
costs no object. Views differ for a moment when a learner comes or goes. An answer that changes its
owner therefore waits `HANDOVER_S`, in which all learners have read the heartbeats, and its new
owner the lineages of the former one. A learner that stood still for longer reads both first. It may
still stop between that and its write: then two groups hold an answer, and the trainer refuses the
one that it reads later (`deltawire.rl.control.trained_answers`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from deltawire.errors import CorruptError
from deltawire.rl.control.lineages import Place, decode_lineages, read_lineage
from deltawire.runtime.compacted_segments import compacted_owners, newer_than, read_compacted
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.lineage import Lineage

POLL_S = 3.0
"""Heartbeats are read so often."""
HANDOVER_S = 15.0
"""More than a heartbeat's period, `POLL_S`, a turn of the learner and a slow request together."""
CATCH_UP_AFTER_S = 3600.0
"""After so long without a look, compacted lineages are looked at too: lineages of a day may be
compacted, also the newest (`deltawire.live.compaction.compactor.SETTLED_S`)."""
MOST_READ = 512
_DIGITS = 16


class AnswerOwners:
    """The living learners of a run, and the answers that one of them owns.

    ``learners`` are their names in order. Times are seconds of the caller's monotonic clock.

    Example::

        owners = AnswerOwners("live", fleet)
        owners.poll(time.monotonic())
        owners.owns("0f…")
    """

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.learners: list[str] = [name]
        self._name = name
        self._fleet = fleet
        self._before: list[str] = []
        """The learners before the last change; at a start nobody knows of this one yet."""
        self._handover = True
        self._changed_at: float | None = None
        self._polled_at = -math.inf

    def poll(self, now: float) -> None:
        """Reads heartbeats, at most every `POLL_S`; raises `RetryError`."""
        if now - self._polled_at >= POLL_S:
            self._fleet.poll()
            beats, alive = self._fleet.heartbeats, self._fleet.states
            found = [
                name
                for name, one in beats.items()
                if one.worker is not None and one.worker.learns and alive[name] == "alive"
            ]
            self.observe({*found}, now)
            self._polled_at = now

    def observe(self, learners: Collection[str], now: float) -> None:
        """Takes the names of the living learners; this one is always among them."""
        found = sorted({*learners, self._name})
        if self._changed_at is None or found != self.learners:
            # Of two changes in a row, only what was owned before both needs no waiting.
            self._before = [] if self._handover else self.learners
            self.learners, self._changed_at = found, now
        self._handover = now - self._changed_at < HANDOVER_S

    def owns(self, answer: str) -> bool:
        """Returns whether this learner may take the answer now."""
        number = int(answer[-_DIGITS:], 16)
        if self.learners[number % len(self.learners)] != self._name:
            return False
        before = self._before
        return not self._handover or (bool(before) and before[number % len(before)] == self._name)


class OtherLineages:
    """The lineages that other learners stored since the last poll. Each is yielded once: its
    answers would count twice in a baseline otherwise. ``clock`` tells seconds since 1970.

    Example::

        for lineage in OtherLineages(bucket, "live").poll():
            maker.claim(lineage)
    """

    def __init__(
        self, bucket: Bucket, name: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._clock = clock
        self._polled_at = clock()
        self._read: dict[str, str] = {}
        self._seen: set[Place] = set()
        self._unread: set[str] = set()
        self._gaps: dict[str, int | None] = {}
        """By worker, the last lineage before some that may be compacted."""

    def skip(self, lineage: Lineage) -> None:
        """Leaves out the lineages of a worker up to this one, which was read elsewhere."""
        key = keys.live_lineage(lineage.worker, lineage.sequence)
        self._read[lineage.worker] = max(key, self._read.get(lineage.worker, ""))
        self._seen.add((lineage.worker, lineage.sequence))

    def poll(self) -> Iterator[Lineage]:
        """Yields new lineages; raises `RetryError`. One that cannot be read is read again by later
        polls, and stops nobody: any writer could store it."""
        now = self._clock()
        self._list()
        # The clock of the machine, since a monotonic one may stand while the machine sleeps.
        if not 0 <= now - self._polled_at <= CATCH_UP_AFTER_S:
            for worker in compacted_owners(self._bucket, "lineage"):
                if worker != self._name:
                    self._note_gap(worker, self._read.get(worker))
        self._polled_at = now
        for lineage in itertools.chain(self._listed(), self._compacted()):
            place = lineage.worker, lineage.sequence
            if place not in self._seen:
                self._seen.add(place)
                yield lineage

    def _list(self) -> None:
        """Notes the keys that are new, and where some are missing."""
        for worker in filter(keys.valid_name, self._bucket.list_prefixes(keys.LIVE_LINEAGE)):
            if worker != self._name:
                last = self._read.get(worker)
                found = self._bucket.list(f"{keys.LIVE_LINEAGE}{worker}/", after=last)
                # A foreign object would hide all numbers that sort before it.
                listed = [key for key in found if keys.lineage_of(key) is not None]
                if has_gap(listed, last):
                    self._note_gap(worker, last)
                self._unread.update(listed)
                if listed:
                    self._read[worker] = listed[-1]

    def _note_gap(self, worker: str, last: str | None) -> None:
        self._gaps.setdefault(worker, None if last is None else keys.trailing_number(last))

    def _listed(self) -> Iterator[Lineage]:
        """Yields the lineages at the keys that were listed."""
        for key in sorted(self._unread):
            place = keys.lineage_of(key)
            try:
                found = None if place is None else read_lineage(self._bucket, *place)
            except CorruptError:
                # It stays unread, and is read again at the next look. Until then its answers may be
                # taken twice here; the trainer refuses the second group.
                continue
            self._unread.discard(key)
            if found is not None:
                yield found

    def _compacted(self) -> Iterator[Lineage]:
        """Yields lineages that were compacted before they were listed: this learner stood still."""
        for worker, number in list(self._gaps.items()):
            found, whole = [], True
            for name in newer_than(self._bucket, "lineage", worker, number):
                try:
                    rows = read_compacted(self._bucket, name)
                    found += decode_lineages(rows or (), worker, run=self._bucket.url, key=name.key)
                except CorruptError:
                    # As above: it is read again, and the trainer refuses a second group.
                    rows = None
                whole = whole and rows is not None
            if whole:
                del self._gaps[worker]
            yield from found


def has_gap(listed: Sequence[str], last: str | None) -> bool:
    """Returns whether numbers are missing between the last object that was read, or the beginning,
    and those that are listed: they may be compacted."""
    numbers = [keys.trailing_number(key) for key in (*([last] if last else ()), *listed)]
    found = [number for number in numbers if number is not None]
    begins = bool(found) and last is None and found[0] > 0
    return begins or any(after != before + 1 for before, after in itertools.pairwise(found))
