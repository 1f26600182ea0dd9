"""The world of restores: a decision rolls a run back, and trainers that follow it."""

from __future__ import annotations

from typing import Any

import ledgers
from exploring import FENCED, World
from ledgers import Consumption, consumed_by, worker
from stepping import Process, ScriptedBucket
from worlds import WRITER_KEYS, History, mirror_of, publisher_of, weights

from deltawire.errors import FencedError
from deltawire.rl.control.credits import settle
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import RetryingBucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.objects import read_manifest
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json

SERVED, REJECTED = 0, 1
"""The version that serves again, and the one that is withdrawn."""


def _decision(history: History, number: int, verdict: Any, **more: Any) -> Decision:
    digest = mirror_of(SERVED, history.values[SERVED]).digest.hex()
    return Decision(
        number=number, run=history.run.id, verdict=verdict, serving=ServedVersion(SERVED, digest),
        at=1.0, by="person", **more,
    )  # fmt: skip


def decider(history: History) -> Process:
    """Rolls the run back, once."""
    digest = mirror_of(REJECTED, history.values[REJECTED]).digest.hex()
    rejected = ServedVersion(REJECTED, digest)

    def body(bucket: ScriptedBucket) -> None:
        log = DecisionLog(bucket, history.run.id)
        log.poll()
        log.append(_decision(history, 1, "rollback", candidate=rejected))

    return Process("decider", body, writes=(keys.LIVE_DECISIONS,))


def trainer(name: str, history: History, steps: int, *, first: int, restarts: bool) -> Process:
    """Restores what a decision asks for, else makes a step of one group."""

    def body(bucket: ScriptedBucket) -> None:
        held, epoch = mirror_of(REJECTED, history.values[REJECTED]), 0
        if restarts:
            held = load_mirror(RetryingBucket(bucket), history.run, threads=1)
            head = read_manifest(bucket, history.run, held.version)
            epoch = 0 if head is None else head.epoch
        version = held.version
        ledger = ledgers.ledger_of(bucket, history, version)
        publisher = publisher_of(bucket, history.run, held, epoch=epoch + 1, anchor_every=1000)
        for step in range(steps):
            watch = RollbackWatch(bucket, history.run, checkpoints=1)
            decision = watch.poll(version=version)
            metadata, stated, value = CommitMetadata(step=step), {"by": name}, first + step
            if decision is not None:
                value = history.values[decision.serving.version]
                stated |= watch.record(decision, version=version).to_dict()
            else:
                found = [
                    keys.group_of(key) for key in bucket.list(keys.rollouts_of(ledgers.WORKER))
                ]
                new = [group for group in found if group and not ledger.settled(*group)]
                metadata = CommitMetadata(step=step, consumed=new[:1])
            try:
                version = publisher.publish(
                    weights(value), metadata={**stated, **metadata.to_dict()}, wait=True
                )
            except FencedError:
                bucket.note(FENCED)
                return
            settle(ledger, metadata)
            bucket.note("committed", version, name)

    return Process(name, body, writes=(*WRITER_KEYS, keys.COMPACTED, keys.CHECKPOINTS))


class Restores(Consumption):
    """Checks that a decision is followed once, by a version that equals what it restores and
    consumes nothing, and that groups of withdrawn versions stay consumed."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        followed: list[int] = []
        for version, manifest in self.manifests(objects).items():
            record = RestoreRecord.of(manifest.metadata, run="", version=version)
            if record is None:
                continue
            if record.decision in followed:
                return f"decision {record.decision} was followed twice"
            followed.append(record.decision)
            if manifest.digest != record.restored.digest:
                return f"version {version} is not what it restores"
            if consumed_by(manifest).consumed:
                return f"version {version} restores another, and consumes groups"
        return super().invariant(objects, notes)


def restores(*, steps: int = 2, groups: int = 1, alone: bool = False) -> World:
    """A run whose version 1 is withdrawn at any moment, its trainer, and unless it is ``alone`` one
    that replaces it while it may still run."""
    history = History([10, 11])
    checks = Restores(history.run)
    processes = [
        decider(history),
        worker(groups),
        trainer("old", history, steps, first=20, restarts=False),
    ]
    if not alone:
        processes.append(trainer("new", history, steps, first=40, restarts=True))
    began = encode_json(_decision(history, 0, "serve"))
    objects = {**history.objects(), keys.live_decision(0): began}
    return World(objects, processes, checks.invariant, checks.may_write)
