"""Credit issuer: grants groups to workers by what is settled, and writes ``trainer.json``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from deltawire.config import RunConfig
from deltawire.estimates import BudgetSetting
from deltawire.rl.allocation.allocator import Allocator, OpenParts
from deltawire.rl.control.admission import WorkerLoad
from deltawire.rl.control.challenges import Challenges
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.control.rollout_buffer import BufferedGroup, RolloutBuffer
from deltawire.rl.control.staleness import policy_of
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Incident, Phase, TrainerStatus

REWRITE_S = 5.0


class CreditIssuer:
    """The ledger, the credits and ``trainer.json``, shared by trainer and publisher threads.

    ``confirm`` raises an error if another trainer has replaced this one. ``settings`` are those
    that differ from ``run.json``.

    Example::

        issuer.observe(buffer, fleet.workers)
        issuer.write("training")
    """

    def __init__(
        self,
        bucket: Bucket,
        config: RunConfig,
        ledger: Ledger,
        *,
        epoch: int,
        granted: dict[str, int],
        confirm: Callable[[], object] = lambda: None,
        settings: Mapping[str, Any] | None = None,
        draws: DrawBook | None = None,
        allocator: Allocator[BufferedGroup] | None = None,
    ) -> None:
        self.draws = draws or DrawBook()
        self.allocator = self.draws.source = allocator
        self._without: set[tuple[str, int]] = set()
        self._begun: dict[str, tuple[int, int]] = {}
        self._confirm = confirm
        self._settings = dict(settings or {})
        self.ledger = ledger
        self.version = 0
        self.budget: BudgetSetting | None = None
        """The controller's setting of groups that start from the next write on."""
        self.digest = ""
        self.alive: set[str] = set()
        self._bucket = bucket
        self._epoch = epoch
        self._credits = granted
        self.staleness = policy_of(config.train)
        self.staleness.share_credits(config.workers.share)
        if allocator is not None:
            self.staleness.hold_parts(allocator.parts_limit)
        self._metadata: dict[int, CommitMetadata] = {}
        self._stored: dict[str, int] = {}
        self._progress: dict[str, tuple[int, float]] = {}
        self._deliver_s = config.faults.long_s
        self._starve_s = config.faults.stall_s
        self._starving: dict[str, float] = {}
        self._dropping: Mapping[str, int] = {}
        self._proven: set[str] = {name for name in ledger.below if ledger.count(name)}
        self._incidents: list[Incident] = []
        self._self_attested: list[str] = []
        self._phase: Phase = "starting"
        self._written: TrainerStatus | None = None
        self._written_at = float("-inf")
        self._lock = threading.Lock()

    def expect(self, version: int, metadata: CommitMetadata) -> None:
        """Remembers what ``version`` settles once it is committed."""
        with self._lock:
            self._metadata[version] = metadata

    def committed(self, version: int, digest: str) -> None:
        """Settles the groups of a committed version, and writes the status at once."""
        with self._lock:
            metadata = self._metadata.pop(version, CommitMetadata())
            settle(self.ledger, metadata)
            for worker, sequence in metadata.settled_groups():
                self.draws.settle(worker, sequence)
            self.version, self.digest = version, digest
        self.write()

    def follow(self, setting: BudgetSetting | None) -> None:
        """Starts groups with a setting of the controller, from the next write on."""
        with self._lock:
            self.budget = setting
            self.draws.completions = setting.completions if setting is not None else 0

    def observe(
        self,
        buffer: RolloutBuffer,
        alive: set[str],
        begun: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Updates the state of workers and groups from the main thread.

        ``begun`` are, by worker, its lease and the number of its first group under it.
        """
        with self._lock:
            self._begun = dict(begun or {})
            names = self._credits.keys() | alive
            self._stored = {name: buffer.stored(name) for name in names}
            self._dropping = buffer.dropping()
            self._without = buffer.without_credit() if self.allocator else set()
            self._proven |= buffer.proven
            self._incidents = buffer.incidents.listed()
            self._self_attested = buffer.self_attested()
            self.alive = {name for name in alive if self._delivers(name)}

    def _on_trial(self, worker: str) -> bool:
        """Returns whether a worker that never delivered had no credit for ``faults.stall_s``."""
        if worker in self._proven or self._credits.get(worker, 0) > self._stored.get(worker, 0):
            self._starving.pop(worker, None)
            return False
        now = time.monotonic()
        return now - self._starving.setdefault(worker, now) >= self._starve_s

    def _delivers(self, worker: str) -> bool:
        """Returns whether a worker stored a group after its last grant, or may still be sampling.

        A worker that holds credits for ``faults.long_s`` and stores nothing loses its claim on
        them, like a dead one, until it stores a group.
        """
        now, stored = time.monotonic(), self._stored[worker]
        before = self._progress.get(worker)
        if before is None or before[0] != stored or self._credits.get(worker, 0) <= stored:
            self._progress[worker] = (stored, now)
            return True
        return now - before[1] < self._deliver_s

    def granted(self) -> dict[str, int]:
        """Every worker's credits; its groups with lower sequence numbers may be read.

        The settled groups make up for the credits of a lost ``trainer.json``.
        """
        with self._lock:
            names = self._credits.keys() | self.ledger.below.keys()
            return {
                name: max(self._credits.get(name, 0), self.ledger.below.get(name, 0))
                for name in names
            }

    def granted_to(self, worker: str) -> int:
        """One worker's credits, as `granted` counts them."""
        with self._lock:
            return max(self._credits.get(worker, 0), self.ledger.below.get(worker, 0))

    def is_settled(self, worker: str) -> bool:
        """Returns whether every group that the worker stored is settled."""
        with self._lock:
            settled = self.ledger.count(worker) + self._dropping.get(worker, 0)
            return self._stored.get(worker, 0) <= settled

    def forget(self, worker: str) -> None:
        """Forgets a worker that has left and whose groups are settled.

        It has no claim on groups that it never stored. If it returns, it is granted credits on top
        of what it has stored, like a new worker.
        """
        with self._lock:
            for table in (
                self._credits,
                self._stored,
                self._progress,
                self._starving,
            ):
                table.pop(worker, None)
            self._proven.discard(worker)
            self.draws.forget(worker)
            self.staleness.forget(worker)

    def write(self, phase: Phase | None = None) -> None:
        """Grants new credits, and writes ``trainer.json`` if anything changed.

        It is written every `REWRITE_S` in any case: a late request of the previous trainer may
        have overwritten it.
        """
        with self._lock:
            self._phase = phase or self._phase
            if self._phase == "training":
                self._credits = self.staleness.admit(
                    self._loads(), version=self.version, free=self._free()
                )
                self._cover()
            status = TrainerStatus(
                phase=self._phase,
                version=self.version,
                digest=self.digest,
                epoch=self._epoch,
                credits=dict(self._credits),
                at=0.0,
                incidents=self._incidents,
                self_attested=self._self_attested,
                settings=self._settings,
                draws=self.draws.listed(),
                next_draw=self.draws.next_position,
                returned=self.draws.returned,
                budget=self.budget,
            )
            now = time.monotonic()
            if status != self._written or now - self._written_at >= REWRITE_S:
                stamped = msgspec.structs.replace(status, at=time.time())
                self._confirm()
                self._bucket.put(keys.TRAINER, encode_json(stamped))
                self._written, self._written_at = status, now

    def _free(self) -> int | None:
        """The number of groups that allocation lets be granted; None without it.

        A credit that has no draw yet, because its worker has not begun, counts as the largest
        prompt.
        """
        if self.allocator is None:
            return None
        unstored = self._unstored()
        prompts, completions = self.draws.outstanding(unstored, without=self._without)
        for worker, count in unstored.items():
            undrawn = max(0, count - self.draws.missing(worker, count))
            prompts, completions = prompts + undrawn, completions + undrawn * self.allocator.most
        idle = not any(unstored.values())
        return self.allocator.room(prompts=prompts, completions=completions, idle=idle)

    def owed(self) -> OpenParts:
        """The parts of prompts that workers which are alive still owe."""
        with self._lock:
            return self.draws.owed(self._unstored())

    def _unstored(self) -> dict[str, int]:
        """By worker that is alive, the granted groups that it has not stored."""
        return {
            name: max(0, self._credits.get(name, 0) - self._stored.get(name, 0))
            for name in self.alive
        }

    def _cover(self) -> None:
        """Gives every granted group of a worker that is alive a task."""
        for worker, (lease, first) in self._begun.items():
            if worker in self.alive:
                read = self._stored.get(worker, 0) >= first
                count = max(0, self._credits.get(worker, 0) - first)
                self.draws.cover(worker, lease, count, complete=read)

    def drawn(self, buffered: BufferedGroup) -> int | None:
        """Notes that a group was stored; returns what `DrawBook.arrive` does."""
        with self._lock:
            lease, number = Challenges.numbers(buffered.group.nonce)
            buffered.part = self.draws.part(buffered.worker, lease, number)
            return self.draws.arrive(buffered.worker, buffered.sequence, lease, number)

    def _loads(self) -> dict[str, WorkerLoad]:
        return {
            name: WorkerLoad(
                granted=max(self._credits.get(name, 0), self._stored.get(name, 0)),
                stored=self._stored.get(name, 0),
                settled=self.ledger.count(name) + self._dropping.get(name, 0),
                alive=name in self.alive,
                proven=name in self._proven,
                trial=name in self.alive and self._on_trial(name),
            )
            for name in self._credits.keys() | self.alive
        }


def settle(ledger: Ledger, metadata: CommitMetadata) -> None:
    """Counts a version's groups as settled."""
    for worker, sequence in metadata.settled_groups():
        ledger.settle(worker, sequence)
