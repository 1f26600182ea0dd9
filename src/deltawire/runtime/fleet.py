"""Fleet: the heartbeats of all processes of a run, and which of the processes are alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from deltawire.errors import CorruptError, SignatureError
from deltawire.runtime.heartbeat import check_heartbeat
from deltawire.runtime.liveness import Liveliness, Liveness
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire import keys
from deltawire.wire.objects import decode_json
from deltawire.wire.run import Run
from deltawire.wire.status import MAX_STATUS_BYTES, Heartbeat, TrainerStatus

POLL_S = 1.0
"""Half of the heartbeats' period: polling more often would find nothing new."""
READERS = 64
MOST_READ = 512
"""The most heartbeats that one poll of a bounded fleet reads again: at 20 ms a request, a sixth of
`POLL_S` with `READERS` requests at once."""
READS = 3
"""A network may truncate a response and still report it as complete."""


class Fleet:
    """Reads the heartbeats of a run periodically.

    Each poll is one listing and one request per heartbeat, `READERS` at a time. Heartbeats of
    processes that are gone are removed by the trainer (`deltawire.runtime.reaper`), so a poll costs
    what the living processes cost. Raises `RetryError` if the store does not answer; the time until
    the next successful poll then does not count as silence.

    With ``most_read`` a poll reads the heartbeats of new processes, and of the others at most so
    many: first those that were replaced since they were read, the oldest first. The listing
    shows when each was stored, so a process whose heartbeat waits to be read again is not silent;
    that it stalled or ended is noticed once it is read.

    Example::

        fleet = Fleet(bucket, silence_s=config.faults.silence_s)
        fleet.poll()
        print(fleet.workers)          # names of the workers that are alive
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        silence_s: float,
        most_read: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.heartbeats: dict[str, Heartbeat] = {}
        self.states: dict[str, Liveliness] = {}
        self.errors: list[CorruptError] = []
        """One for each heartbeat that cannot be read."""
        self._bucket = bucket
        self._silence_s = silence_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._judges: dict[str, Liveness] = {}
        self._most_read = most_read
        self._read_of: dict[str, tuple[float, datetime]] = {}
        """By process, when its heartbeat was read, and when the one that was read was stored."""
        self._stored: dict[str, datetime] = {}
        """By process, when its heartbeat was stored, as listed last."""
        self._polled_at = float("-inf")

    def poll(self, *, every_s: float = 0.0) -> None:
        """Reads all heartbeats, unless they were read less than ``every_s`` ago."""
        now = self._clock()
        elapsed_s = now - self._polled_at
        if elapsed_s < every_s:
            return
        self._polled_at = now  # Also if reading fails: silence could not have been noticed then.
        listed = {
            name: entry.modified
            for entry in self._bucket.list_objects(keys.HEARTBEATS)
            if (name := keys.process_of(entry.key)) is not None
        }
        names = self._due(listed)
        with ThreadPoolExecutor(min(READERS, max(1, len(names)))) as readers:
            found = list(readers.map(self._read, names))
        self._read_of |= {name: (now, listed[name]) for name in names}
        self._read_of = {name: self._read_of[name] for name in listed if name in self._read_of}
        self.errors = [one for one in found if isinstance(one, CorruptError)]
        heartbeats = {one.process: one for one in found if isinstance(one, Heartbeat)}
        # One damaged heartbeat is no evidence: the previous one remains valid.
        kept = {name: self.heartbeats[name] for name in listed if name in self.heartbeats}
        self.heartbeats = {**kept, **heartbeats}
        self._observe(set(names), listed, elapsed_s)

    def _due(self, listed: Mapping[str, datetime]) -> Sequence[str]:
        """Returns the processes whose heartbeats this poll reads."""
        new = [name for name in listed if name not in self._read_of]
        if self._most_read is None or len(listed) - len(new) <= self._most_read:
            return list(listed)

        def order(name: str) -> tuple[bool, float]:
            at, stored = self._read_of[name]
            return stored == listed[name], at

        return new + sorted(listed.keys() & self._read_of.keys(), key=order)[: self._most_read]

    def _observe(
        self, read: Container[str], listed: Mapping[str, datetime], elapsed_s: float
    ) -> None:
        """Decides which processes are alive, by what was read and listed."""
        self._judges = {
            name: self._judges.get(name) or Liveness(silence_s=self._silence_s)
            for name in self.heartbeats
        }
        wall = self._wall_clock()
        self.states = {
            name: self._judges[name].observe(
                one,
                elapsed_s,
                age_s=wall - one.at,
                replaced=name not in read and listed[name] != self._stored.get(name),
            )
            for name, one in self.heartbeats.items()
        }
        self._stored = dict(listed)

    def _read(self, name: str) -> Heartbeat | CorruptError | None:
        try:
            return check_heartbeat(self._bucket, keys.heartbeat(name), name)
        except CorruptError as error:
            return error  # The heartbeat before remains valid: see `poll`.

    def forget(self, name: str) -> None:
        """Drops a process whose heartbeat was removed."""
        for table in (self.heartbeats, self.states, self._judges, self._read_of, self._stored):
            table.pop(name, None)

    @property
    def clock_offsets(self) -> dict[str, float]:
        """By living process, the seconds by which its clock is ahead of the store's.

        Each heartbeat states when it was written by the process's own clock, and the store when it
        arrived. One that was replaced between its listing and its read counts up to a period of
        heartbeats too much.
        """
        return {
            name: one.at - self._read_of[name][1].timestamp()
            for name, one in self.heartbeats.items()
            if name in self._read_of and self.states[name] in ("alive", "stalled")
        }

    @property
    def streams(self) -> set[str]:
        """Names of the event streams of all processes that have a heartbeat."""
        return {f"{one.process}-{one.nonce}" for one in self.heartbeats.values()}

    @property
    def workers(self) -> set[str]:
        """Names of the workers that are alive and sample; a stalled one finishes nothing."""
        return {
            name
            for name, heartbeat in self.heartbeats.items()
            if heartbeat.worker is not None
            and heartbeat.worker.phase == "sampling"
            and self.states[name] == "alive"
        }

    @property
    def expected_workers(self) -> set[str]:
        """Names of the workers that are alive and sample, or will once they have loaded."""
        return {
            name
            for name, heartbeat in self.heartbeats.items()
            if heartbeat.worker is not None
            and heartbeat.worker.phase in ("starting", "sampling")
            and self.states[name] == "alive"
        }

    @property
    def begun(self) -> dict[str, tuple[int, int]]:
        """By worker, its lease and the sequence number of its first group under it."""
        return {
            name: (one.lease, one.worker.first)
            for name, one in self.heartbeats.items()
            if one.worker is not None and one.worker.first is not None
        }

    @property
    def known_workers(self) -> set[str]:
        """Names of all workers that have a heartbeat, alive or not: their groups can be used."""
        return {name for name, one in self.heartbeats.items() if one.worker is not None}


def known_trainer(bucket: Bucket) -> TrainerStatus | None:
    """As `read_trainer`, but None also for an object that the trainer of a signed run did not
    write: for callers that continue until it is replaced."""
    try:
        return read_trainer(bucket)
    except SignatureError:
        return None  # Its callers ask again, and create what they may not replace.


def next_epoch(bucket: Bucket, run: Run, version: int) -> int:
    """Returns the epoch of a trainer that continues a run at ``version``.

    It exceeds the epoch of the version and that of the previous trainer, which may have published
    nothing, so that the new trainer's credits and versions are distinct from both.
    """
    manifest = read_manifest(bucket, run, version)
    trainer = known_trainer(bucket)
    return 1 + max(manifest.epoch if manifest else 0, trainer.epoch if trainer else 0)


def read_trainer(bucket: Bucket) -> TrainerStatus | None:
    """Reads ``trainer.json``, None if there is none yet.

    Raises `CorruptError` if it is damaged at every attempt: a network may truncate a response,
    which must not stop a caller that reads this every second.
    """
    for attempt in range(READS):
        data = bucket.get(keys.TRAINER, limit=MAX_STATUS_BYTES)
        if data is None:
            return None
        try:
            return decode_json(data, TrainerStatus, run=bucket.url, key=keys.TRAINER)
        except CorruptError:  # Only the answer may be damaged: it is asked for again.
            if attempt == READS - 1:
                raise
    return None
