"""Intake: everything that the trainer reads of its workers between two steps.

Concurrency::

    trainer's main thread     poll: heartbeats ─▶ gone workers ─▶ verdicts, grants ─▶ groups
                                      │              │                │                │
    threads of each           requests, up to 64 at once

Cost. With N workers a poll makes N/1000 requests for a listing, and at most a fixed number of
others: heartbeats to read again, listings of what was not granted, and groups that may not be there
yet wait for a later poll, those that waited longest first. New workers and new groups are read at
once. So the requests of a poll do not grow with N, but for the listing, and the time until a worker
is asked again does.
"""

from __future__ import annotations

from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.runtime.fleet import POLL_S, Fleet
from deltawire.runtime.reaper import Reaper
from deltawire.wire.ledger import Ledger


class Intake:
    """Polls a fleet and fetches what its workers stored.

    ``ledger`` is the trainer's: it counts what steps have consumed, committed or not.

    Example::

        intake = Intake(fleet, reaper, issuer, guard, buffer, ledger)
        alive = intake.poll()
        batch = buffer.next_batch(issuer.staleness, version=version, alive=alive)
    """

    def __init__(
        self,
        fleet: Fleet,
        reaper: Reaper,
        issuer: CreditIssuer,
        guard: WorkerGuard,
        buffer: RolloutBuffer,
        ledger: Ledger,
    ) -> None:
        self._fleet = fleet
        self._reaper = reaper
        self._credits = issuer
        self._guard = guard
        self._buffer = buffer
        self._ledger = ledger

    def poll(self, *, every_s: float = POLL_S) -> set[str]:
        """Reads heartbeats and new groups; returns the workers that are alive and may deliver.

        Heartbeats are read at most every ``every_s`` seconds. Raises `RetryError`.
        """
        fleet = self._fleet
        fleet.poll(every_s=every_s)
        for worker in self._reaper.run(fleet, self.is_settled):
            self._credits.forget(worker)
            self._buffer.forget(worker)
            self._guard.forget(worker)
        granted = self._credits.granted()
        readable = self._guard.poll(fleet.known_workers, granted, fleet.expected_workers)
        self._buffer.poll(readable, granted)
        return fleet.workers & readable - self._buffer.quarantined.keys()

    def is_settled(self, worker: str) -> bool:
        """Returns whether no step needs a group of this worker any more."""
        if worker in self._buffer.quarantined:
            return True
        heartbeat = self._fleet.heartbeats[worker]
        stored = heartbeat.worker.stored if heartbeat.worker else 0
        granted = self._credits.granted_to(worker)
        return self._credits.is_settled(worker) and self._ledger.count(worker) >= min(
            stored, granted
        )
