"""Tracks which workers are alive, from their heartbeats."""

from __future__ import annotations

import time

from deltawire.errors import CorruptError
from deltawire.runtime.object_cache import Roster
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import decode_json
from deltawire.wire.status import MAX_STATUS_BYTES, Heartbeat, TrainerStatus

HEARTBEAT_TIMEOUT_S = 15.0


FLEET_POLL_S = 0.5
READS = 3
"""A network may cut an answer short and call it whole."""


class Fleet:
    """The workers' heartbeats, looked at now and then.

    A worker is alive while its heartbeat changes; the trainer's own clock measures how long ago
    that was, so that no two machines' clocks are compared.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._roster = Roster(
            bucket,
            keys.FLEET,
            keys.worker_of,
            lambda key: check_heartbeat(bucket, key),
            clock=time.monotonic,
        )
        self._seen: dict[str, tuple[float, float]] = {}
        self._lively: set[str] = set()
        self._looked_at = float("-inf")
        self.alive: set[str] = set()
        self.known: set[str] = set()
        """All that have a heartbeat, the dead ones too: what they stored is there to be trained
        on."""

    def look(self) -> set[str]:
        """Names of the living workers, at most `FLEET_POLL_S` old."""
        now = time.monotonic()
        if now - self._looked_at < FLEET_POLL_S:
            return self.alive
        self._looked_at = now
        for worker, beat in self._roster.look().items():
            stamp, since = self._seen.get(worker, (0.0, now))
            self._seen[worker] = (beat.at, now if beat.at != stamp else since)
            # A stuck one's heartbeat goes on; what it was granted will not come.
            gone = beat.phase in ("stopped", "finished") or beat.stuck
            (self._lively.discard if gone else self._lively.add)(worker)
        self.known |= self._roster.names
        self._lively = {
            worker for worker in self._lively if now - self._seen[worker][1] < HEARTBEAT_TIMEOUT_S
        }
        self.alive = set(self._lively)
        return self.alive


def check_heartbeat(bucket: Bucket, key: str) -> Heartbeat | None:
    """A heartbeat, None if it is missing; raises `CorruptError`."""
    data = bucket.get(key, limit=MAX_STATUS_BYTES)
    return None if data is None else decode_json(data, Heartbeat, run=bucket.url, key=key)


def read_heartbeat(bucket: Bucket, key: str) -> Heartbeat | None:
    """A heartbeat, None if it is missing or not readable."""
    try:
        return check_heartbeat(bucket, key)
    except CorruptError:
        return None


def read_trainer(bucket: Bucket) -> TrainerStatus | None:
    """``trainer.json``, None if there is none yet.

    Raises `CorruptError` if it is damaged each time it is read: a network may cut an answer short
    and call it whole, and who reads this every second would die of that.
    """
    for attempt in range(READS):
        data = bucket.get(keys.TRAINER, limit=MAX_STATUS_BYTES)
        if data is None:
            return None
        try:
            return decode_json(data, TrainerStatus, run=bucket.url, key=keys.TRAINER)
        except CorruptError:
            if attempt == READS - 1:
                raise
    return None
