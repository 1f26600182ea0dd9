"""The world of credits: trainers that grant groups to a worker, which stores no others."""

from __future__ import annotations

from typing import Any

import ledgers
from exploring import FENCED, World
from ledgers import WORKER, Consumption, consumed_by
from stepping import Process, ScriptedBucket
from worlds import WRITER_KEYS, History, mirror_of, publisher_of, weights

from deltawire.config import parse_config
from deltawire.errors import FencedError
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.runtime.fleet import known_trainer
from deltawire.store import RetryingBucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.objects import read_manifest
from deltawire.sync.publish.commit import CommitStats
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import decode_json
from deltawire.wire.status import TrainerStatus

CONFIG = parse_config(
    {
        "name": "r",
        "model": {"build": {}},
        "train": {"groups_per_step": 1, "max_staleness": 0},
    },
    source="checker",
)
LIMIT = 1
"""The groups that may be outstanding: those of one step, (S + 1) · P."""


class Seen:
    """Counts the groups of a worker that a trainer has read; the buffer itself has threads."""

    def __init__(self, stored: int) -> None:
        self._stored = stored
        self.proven = {WORKER} if stored else set[str]()
        self.incidents = self

    def stored(self, worker: str) -> int:
        return self._stored if worker == WORKER else 0

    def dropping(self) -> dict[str, int]:
        return {}

    def listed(self) -> list[Any]:
        return []

    def self_attested(self) -> list[str]:
        return []


def worker(polls: int) -> Process:
    """Stores a group for each credit that it reads of."""

    def body(bucket: ScriptedBucket) -> None:
        stored = 0
        for _ in range(polls):
            status = known_trainer(bucket)
            if status is not None and stored < status.credits.get(WORKER, 0):
                bucket.create(keys.rollout(WORKER, stored), b"group")
                bucket.note("stored", stored)
                stored += 1

    return Process("worker", body, writes=(keys.ROLLOUTS,))


def trainer(name: str, history: History, steps: int, *, first: int, restarts: bool) -> Process:
    """Grants credits, and consumes a group for each version."""

    def body(bucket: ScriptedBucket) -> None:
        held, epoch = mirror_of(0, history.values[0]), 0
        if restarts:
            held = load_mirror(RetryingBucket(bucket), history.run, threads=1)
            head = read_manifest(bucket, history.run, held.version)
            epoch = 0 if head is None else head.epoch
        before = known_trainer(bucket)
        ledger = ledgers.ledger_of(bucket, history, held.version)
        issuer = CreditIssuer(
            bucket, CONFIG, ledger.copy(), epoch=epoch + 1,
            granted=dict(before.credits) if before is not None else {},
        )  # fmt: skip
        issuer.version = held.version

        def committed(stats: CommitStats) -> None:
            issuer.committed(stats.version, stats.digest)

        publisher = publisher_of(
            bucket, history.run, held, epoch=epoch + 1, anchor_every=1000, on_commit=committed
        )
        for step in range(steps):
            found = [keys.group_of(key) for key in bucket.list(keys.rollouts_of(WORKER))]
            issuer.observe(Seen(len(found)), {WORKER})  # type: ignore[arg-type]
            issuer.write("training")
            new = [group for group in found if group and not ledger.settled(*group)]
            if not new:
                continue
            metadata = CommitMetadata(step=step, consumed=new[:1])
            issuer.expect(publisher.next_version, metadata)
            try:
                publisher.publish(
                    weights(first + step), metadata={"by": name, **metadata.to_dict()}, wait=True
                )
            except FencedError:
                bucket.note(FENCED)
                return
            settle(ledger, metadata)

    return Process(name, body, writes=(*WRITER_KEYS, keys.COMPACTED, keys.TRAINER))


class Credits(Consumption):
    """Checks that no trainer grants more groups than the bound of staleness admits, beyond those
    that versions settle."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        data = objects.get(keys.TRAINER)
        if data is not None:
            status = decode_json(data, TrainerStatus, run="", key=keys.TRAINER)
            settled = sum(
                len(consumed_by(manifest).consumed) for manifest in self.manifests(objects).values()
            )
            granted = status.credits.get(WORKER, 0)
            if granted > settled + LIMIT:
                return f"{granted} groups are granted, and {settled} are settled"
        return super().invariant(objects, notes)


def granting(*, steps: int = 2, polls: int = 2) -> World:
    """A trainer, one that replaces it while it may still run, and a worker."""
    history = History([10])
    checks = Credits(history.run)
    processes = [
        worker(polls),
        trainer("old", history, steps, first=20, restarts=False),
        trainer("new", history, steps, first=40, restarts=True),
    ]
    return World(history.objects(), processes, checks.invariant, checks.may_write)
