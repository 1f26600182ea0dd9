"""Worker guard: decides which workers' groups the trainer reads, and reports what it refuses.

Concurrency::

    trainer's main thread                      rescoring thread
      names: allow-list, quarantine              score and compute again
      arrived: draws a share of groups ────────▶   one group at a time
      poll: verdicts ◀──────────────────────────   a queue, never waited for
        └─▶ quarantine

Everything here runs in the trainer's main thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from deltawire.config import RunConfig
from deltawire.config.machine import machine_policy
from deltawire.events import Event
from deltawire.rl.control.challenges import Challenges
from deltawire.rl.control.incidents import Incidents
from deltawire.rl.control.quota import Quota
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.store import Bucket
from deltawire.store.parallel import in_parallel
from deltawire.wire import keys
from deltawire.wire.status import Incident

DOUBTS = 3
"""Disagreements that an honest worker can have by accident, such as a scorer that ran out of time,
after which it is quarantined all the same."""
POLL_EVERY_S = 30.0
MOST_LISTED = 64
"""The most workers whose numbers beyond their grants one poll looks for; those that were listed
longest ago come first."""


def _unpredictable() -> float:
    return secrets.SystemRandom().random()


@dataclass(frozen=True)
class Verdict:
    """The result of computing a group again. ``kind`` is empty if everything agrees or could not be
    judged, else what disagrees, with a ``detail``; ``certain`` if no honest worker does that."""

    worker: str
    sequence: int
    kind: str = ""
    detail: str = ""
    certain: bool = True


class Rescorer(Protocol):
    """Computes groups again elsewhere (`deltawire.rl.evaluate.rescoring`)."""

    @property
    def unjudged(self) -> list[str]:
        """The parts that it cannot recompute, with the reason if known."""
        ...

    def submit(self, buffered: BufferedGroup, lease: int, number: int, secret: str) -> bool:
        """Queues a group; False if too many wait."""
        ...

    def verdicts(self) -> list[Verdict]:
        """The verdicts since the last call."""
        ...


class WorkerGuard:
    """The allow-list, the challenges, the sample of groups that are computed again, and quarantine.

    Example::

        guard = WorkerGuard(bucket, config, record=events.record, known=status.incidents)
        buffer = RolloutBuffer(bucket, ledger, limit=12, guard=guard)
        guard.poll(fleet.known_workers, credits.granted())
    """

    def __init__(
        self,
        bucket: Bucket,
        config: RunConfig,
        *,
        record: Callable[[Event], None] = lambda _: None,
        known: Sequence[Incident] = (),
        rescorer: Rescorer | None = None,
        draw: Callable[[], float] = _unpredictable,
    ) -> None:
        self.incidents = Incidents(record, known=known)
        self.challenges = Challenges(bucket)
        self.quota = Quota(config.workers.share)
        self.rescored: Counter[str] = Counter()
        """By worker, the groups whose verdict arrived."""
        self.rescorer = rescorer
        self._bucket = bucket
        self._allow = config.workers.allow
        self._machine = machine_policy().workers
        self._share = config.trust.rescore_share
        self._draw = draw
        self._granted: Mapping[str, int] = {}
        self._doubts: Counter[str] = Counter()
        self._polled: dict[str, float] = {}
        self._beyond: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._unlisted: set[str] = set()
        self._readable: set[str] = set()
        self._failing: set[str] = set()

    def allowed(self, workers: Collection[str]) -> set[str]:
        """Returns the workers that may take part; report each of the others once."""
        found = {name for name in workers if self._allows(name)}
        for name in sorted(set(workers) - found - self._unlisted):
            self.incidents.report(name, "not allowed", "its name is not in workers.allow")
            self._unlisted.add(name)
        return found

    def _allows(self, name: str) -> bool:
        lists = (self._allow or None, self._machine)
        return all(one is None or any(fnmatchcase(name, a) for a in one) for one in lists)

    def self_attested(self) -> list[str]:
        """The parts of the groups that are trusted without recomputing them."""
        if self.rescorer is None or not self._share:
            return ["rewards", "log-probabilities", "probes", "expert choices"]
        return [*self.rescorer.unjudged, "probes", "expert choices"]

    def check_nonce(self, worker: str, nonce: str) -> str:
        """Why a group with this nonce was not granted to the worker; empty if it was."""
        return self.challenges.fault(worker, nonce, granted=self._granted.get(worker, 0))

    def arrived(self, buffered: BufferedGroup) -> None:
        """Decides at random if a group is recomputed, in a way that no worker can predict."""
        if self.rescorer is None or self._draw() >= self._share:
            return
        nonce = self.challenges.numbers(buffered.group.nonce)
        secret = self.challenges.secret_of(buffered.worker)
        if not self.rescorer.submit(buffered, *nonce, secret):
            self.incidents.report(buffered.worker, "not rescored", "too many groups wait for it")

    def blames_all(self, failing: Collection[str]) -> bool:
        """Returns whether failures of these workers' groups are the run's, not one worker's. If
        only one of several workers fails, the worker is reported.
        """
        if len(self._readable) <= 1 or len(failing) > 1:
            return True
        for worker in set(failing) - self._failing:
            self.incidents.report(worker, "failing", "only groups of this worker fail")
            self._failing.add(worker)
        return False

    def poll(
        self, workers: Collection[str], granted: Mapping[str, int], alive: Collection[str] = ()
    ) -> set[str]:
        """Takes verdicts, looks for groups beyond the grants, and gives secrets to new workers.

        ``alive`` names those from which groups may come, now or once they have loaded. Returns
        the workers whose groups may be read. Raises `RetryError`.
        """
        allowed = self.allowed(workers)
        self._granted = dict(granted)
        left_out = self.challenges.ensure(allowed, first=alive)
        for name in sorted(left_out - self._left_out)[:1]:
            detail = f"{len(left_out)} of {len(allowed)} names get no credit"
            self.incidents.report(name, "too many workers", detail, count=len(left_out))
        self._left_out = left_out
        self.quota.expect(allowed & set(alive) - self.incidents.quarantined.keys())
        if self.rescorer is not None:
            for verdict in self.rescorer.verdicts():
                self._take(verdict)
        self._poll_beyond(allowed)
        self._readable = allowed - self.incidents.quarantined.keys() - left_out
        return self._readable

    def _take(self, verdict: Verdict) -> None:
        self.rescored[verdict.worker] += 1
        if not verdict.kind:
            return
        detail = f"group {verdict.sequence}: {verdict.detail}"
        self._doubts[verdict.worker] += not verdict.certain
        if verdict.certain or self._doubts[verdict.worker] >= DOUBTS:
            self.incidents.quarantine(verdict.worker, verdict.kind, detail)
        else:
            self.incidents.report(verdict.worker, verdict.kind, detail)

    def _poll_beyond(self, workers: Collection[str]) -> None:
        """Reports groups with numbers that were not granted: a page of keys of each worker now and
        then, of `MOST_LISTED` workers at a time."""
        now = time.monotonic()
        last = {name: self._polled.get(name, float("-inf")) for name in workers}
        due = sorted(name for name, at in last.items() if now - at >= POLL_EVERY_S)
        turn = sorted(due, key=lambda name: last[name])[:MOST_LISTED]
        self._polled |= dict.fromkeys(turn, now)
        for worker, found in zip(
            turn, in_parallel(self._bucket, self._list_beyond, turn), strict=True
        ):
            if found:
                self._beyond[worker] = found[-1]
                granted = self._granted.get(worker, 0)
                detail = f"{found[0]} is beyond the {granted} groups that were granted"
                self.incidents.report(worker, "not granted", detail, count=len(found))

    def _list_beyond(self, worker: str) -> Sequence[str]:
        """Lists the keys of a worker's groups after its grants and those reported before."""
        granted, last = self._granted.get(worker, 0), self._beyond.get(worker, "")
        after = max(last, keys.rollout(worker, granted - 1) if granted else "")
        return self._bucket.list(keys.rollouts_of(worker), after=after or None)

    def forget(self, worker: str) -> None:
        """Forgets a worker that has left; its quarantine stays."""
        self.challenges.forget(worker, granted=self._granted.get(worker, 0))
        self.quota.forget(worker)
        for table in (self._polled, self._beyond, self._doubts, self.rescored):
            table.pop(worker, None)
        self._unlisted.discard(worker)
        self._failing.discard(worker)
