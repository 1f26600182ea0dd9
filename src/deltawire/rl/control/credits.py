"""The trainer's desk: who is alive, what is settled, and the credits that follow from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from deltawire.config import RunConfig
from deltawire.rl.control.admission import WorkerLoad
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import policy_of
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Phase, TrainerStatus

FORGET_S = 3600.0
REWRITE_S = 5.0


class CreditIssuer:
    """What trainer and publisher threads both write: the ledger, the credits, ``trainer.json``."""

    def __init__(
        self,
        bucket: Bucket,
        config: RunConfig,
        ledger: Ledger,
        *,
        epoch: int,
        granted: dict[str, int],
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        self._confirm = confirm
        self.ledger = ledger
        self.version = 0
        self.digest = ""
        self.alive: set[str] = set()
        self._bucket = bucket
        self._epoch = epoch
        self._credits = granted
        self.staleness = policy_of(config.train)
        self._metadata: dict[int, CommitMetadata] = {}
        self._stored: dict[str, int] = {}
        self._dropping: dict[str, int] = {}
        self._gone_at: dict[str, float] = {}
        self._phase: Phase = "starting"
        self._written: TrainerStatus | None = None
        self._written_at = float("-inf")
        self._lock = threading.Lock()

    def expect(self, version: int, metadata: CommitMetadata) -> None:
        """What the coming version will have settled."""
        with self._lock:
            self._metadata[version] = metadata

    def committed(self, version: int, digest: str) -> None:
        """A version is committed: settle its groups and say so at once."""
        with self._lock:
            metadata = self._metadata.pop(version, CommitMetadata())
            settle(self.ledger, metadata)
            self.version, self.digest = version, digest
        self.write()

    def observe(self, pool: RolloutBuffer, alive: set[str]) -> None:
        """Take over what the main thread saw of workers and groups."""
        with self._lock:
            self.alive = alive
            names = self._credits.keys() | alive
            self._stored = {name: pool.stored(name) for name in names}
            self._dropping = {name: pool.dropping(name) for name in names}
            self._forget()

    def _forget(self) -> None:
        """Name no longer, in ``trainer.json`` and elsewhere, workers that have been gone for
        `FORGET_S` and left nothing unsettled: of those there are ever more.

        They hold no claim on what they never stored, so nothing is given away. One that does come
        back is alive, and is granted credits on top of what it has stored, like a new one.
        """
        now = time.monotonic()
        absent = self._credits.keys() - self.alive
        self._gone_at = {name: self._gone_at.get(name, now) for name in absent}
        for name, since in list(self._gone_at.items()):
            settled = self.ledger.count(name) + self._dropping[name]
            if now - since >= FORGET_S and self._stored[name] <= settled:
                for table in (self._credits, self._stored, self._dropping, self._gone_at):
                    table.pop(name, None)
                self.staleness.forget(name)

    def write(self, phase: Phase | None = None) -> None:
        """Grant what may be granted, and replace ``trainer.json`` if anything changed.

        It is written anew every `REWRITE_S` all the same: a put of the trainer before, late on
        its way, may lie over it, and who reads it wants to see that the trainer lives.
        """
        with self._lock:
            self._phase = phase or self._phase
            if self._phase == "training":
                self._credits = self.staleness.admit(self._loads(), version=self.version)
            status = TrainerStatus(
                phase=self._phase,
                version=self.version,
                digest=self.digest,
                epoch=self._epoch,
                credits=dict(self._credits),
                at=0.0,
            )
            now = time.monotonic()
            if status != self._written or now - self._written_at >= REWRITE_S:
                stamped = msgspec.structs.replace(status, at=time.time())
                self._confirm()
                self._bucket.put(keys.TRAINER, encode_json(stamped))
                self._written, self._written_at = status, now

    def _loads(self) -> dict[str, WorkerLoad]:
        return {
            name: WorkerLoad(
                granted=max(self._credits.get(name, 0), self._stored.get(name, 0)),
                stored=self._stored.get(name, 0),
                settled=self.ledger.count(name) + self._dropping.get(name, 0),
                alive=name in self.alive,
            )
            for name in self._credits.keys() | self.alive
        }


def settle(ledger: Ledger, metadata: CommitMetadata) -> None:
    """Count commit metadata's groups as settled."""
    for worker, sequence in (*metadata.consumed, *metadata.dropped):
        ledger.settle(worker, sequence)
