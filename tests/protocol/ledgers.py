"""The world of consumption: trainers that consume a worker's groups, by the manifests' metadata."""

from __future__ import annotations

from typing import Any

from exploring import FENCED, World
from stepping import Process, ScriptedBucket
from worlds import WRITER_KEYS, Commits, History, mirror_of, publisher_of, weights

from deltawire.errors import FencedError
from deltawire.rl.control.credits import settle
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.store import RetryingBucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.history import read_history
from deltawire.sync.chain.objects import read_manifest
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.manifest import Manifest

WORKER = "w"


def ledger_of(bucket: Any, history: History, version: int) -> Ledger:
    """Reads which groups the versions up to this one settled, as a trainer that starts does."""
    ledger = Ledger()
    for manifest in read_history(bucket, history.run, to=version):
        settle(ledger, consumed_by(manifest))
    return ledger


def consumed_by(manifest: Manifest) -> CommitMetadata:
    """The groups that a version consumed."""
    return CommitMetadata.of(manifest.metadata, run="", version=manifest.version)


def worker(groups: int) -> Process:
    """Stores finished groups; a repeated create finds its own."""

    def body(bucket: ScriptedBucket) -> None:
        for number in range(groups):
            bucket.create(keys.rollout(WORKER, number), b"group")
            bucket.note("stored", number)

    return Process("worker", body, writes=(keys.ROLLOUTS,))


def trainer(
    name: str,
    history: History,
    steps: int,
    *,
    first: int,
    restarts: bool,
    trims: bool = False,
    hasty: bool = False,
) -> Process:
    """Makes steps of one group each; ``restarts``: it loads the newest version first.

    With ``trims`` it deletes the groups of all versions but its newest after each step. A ``hasty``
    one deletes what it is about to consume.
    """

    def body(bucket: ScriptedBucket) -> None:
        held: Mirror = mirror_of(0, history.values[0])
        epoch = 0
        if restarts:
            held = load_mirror(RetryingBucket(bucket), history.run, threads=1)
            head = read_manifest(bucket, history.run, held.version)
            epoch = 0 if head is None else head.epoch
        ledger = ledger_of(bucket, history, held.version)
        publisher = publisher_of(bucket, history.run, held, epoch=epoch + 1, anchor_every=1000)
        retention = RolloutRetention(bucket, history.run, keep=1)
        for step in range(steps):
            found = [keys.group_of(key) for key in bucket.list(keys.rollouts_of(WORKER))]
            new = [group for group in found if group and not ledger.settled(*group)]
            if not new:
                return
            metadata = CommitMetadata(step=step, consumed=new[:1])
            if hasty:
                bucket.delete(keys.rollout(*new[0]))
            try:
                version = publisher.publish(
                    weights(first + step), metadata={"by": name, **metadata.to_dict()}, wait=True
                )
            except FencedError:
                bucket.note(FENCED)
                return
            settle(ledger, metadata)
            bucket.note("committed", version, name)
            if trims:
                retention.trim(newest=version, oldest_checkpoint=version)

    written = (
        *WRITER_KEYS,
        keys.COMPACTED,
        *((keys.ROLLOUTS, keys.REFERENCES, keys.RETAINED) * (trims or hasty)),
    )
    return Process(name, body, writes=written)


class Consumption(Commits):
    """Checks that each group is consumed once, or is still there."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        consumed: list[tuple[str, int]] = []
        for manifest in self.manifests(objects).values():
            consumed += consumed_by(manifest).consumed
        for group in consumed:
            if consumed.count(group) > 1:
                return f"group {group[1]} was consumed twice"
        for note in notes.get("worker", ()):
            group = (WORKER, note[1])
            if (
                note[0] == "stored"
                and group not in consumed
                and keys.rollout(*group) not in objects
            ):
                return f"group {note[1]} was stored and is lost"
        return super().invariant(objects, notes)


def consumption(*, groups: int = 2, steps: int = 2, **options: bool) -> World:
    """A trainer, one that replaces it while it may still run, and a worker."""
    history = History([10])
    checks = Consumption(history.run)
    processes = [
        worker(groups),
        trainer("old", history, steps, first=20, restarts=False, **options),
        trainer("new", history, steps, first=40, restarts=True, **options),
    ]
    return World(history.objects(), processes, checks.invariant, checks.may_write)
