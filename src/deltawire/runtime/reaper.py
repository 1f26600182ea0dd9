"""Replaces the heartbeats and leases of workers that are gone with tombstones.

Workers come and go under ever new names, and every reader of a run reads every heartbeat. The
trainer, the only process that knows when a worker's groups are settled, therefore removes what the
worker left. A tombstone is the worker's last heartbeat; only a worker that returns under the same
name reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat

REAP_AFTER_S = 600.0
MAX_REAPED = 128
"""The most workers whose objects one round removes; the trainer waits for it."""
REAPERS = 16


class Reaper:
    """Removes the objects of workers that ended or were silent for ``after_s``, except their
    tombstones.

    Example::

        for worker in reaper.run(fleet, is_settled):
            credits.forget(worker)
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        after_s: float = REAP_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._after_s = after_s
        self._clock = clock
        self._gone_at: dict[str, float] = {}

    def run(self, fleet: Fleet, is_settled: Callable[[str], bool]) -> list[str]:
        """Removes the objects of at most `MAX_REAPED` workers that are due; returns these. Raises
        `RetryError`.

        A worker for which ``is_settled`` is false has groups that are still needed, and stays. A
        worker that returned after the fleet was polled loses one heartbeat and writes the next.
        """
        now = self._clock()
        gone = {
            name
            for name, state in fleet.states.items()
            if state in ("ended", "silent") and fleet.heartbeats[name].role == "worker"
        }
        self._gone_at = {name: self._gone_at.get(name, now) for name in gone}
        due = [
            name
            for name, since in self._gone_at.items()
            if now - since >= self._after_s and is_settled(name)
        ][:MAX_REAPED]
        if due:
            with ThreadPoolExecutor(min(REAPERS, len(due)), "reaper") as threads:
                list(threads.map(self._remove, [fleet.heartbeats[name] for name in due]))
        for name in due:
            fleet.forget(name)
        return due

    def _remove(self, last: Heartbeat) -> None:
        """Stores the tombstone, then deletes the heartbeat and the leases up to its own."""
        name = last.process
        self._bucket.put(keys.tombstone(name), encode_json(last))
        self._bucket.delete(keys.heartbeat(name))
        for key in self._bucket.list(keys.leases_of(name)):
            number = keys.trailing_number(key)
            if number is not None and number <= last.lease and key == keys.lease(name, number):
                self._bucket.delete(key)
