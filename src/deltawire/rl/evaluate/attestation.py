"""Attestation: compares the weights that workers attest with those that the trainer published."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_field

from deltawire.config import RunConfig
from deltawire.config.served import served_exporter
from deltawire.errors import InputError, RetryError
from deltawire.runtime.fleet import Fleet, read_trainer
from deltawire.runtime.lines import publication_bucket
from deltawire.store import Bucket
from deltawire.sync import read_manifest, read_run
from deltawire.wire.status import Heartbeat, TrainerStatus

AUDIT_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Attestation:
    """One worker's statement, at the end of a run, that it holds the final version bit for bit."""

    worker: str
    version: int
    identical: bool
    supervised: bool
    groups: int


def wait_for_workers(
    bucket: Bucket, status: TrainerStatus, tick: Callable[[], None], *, silence_s: float
) -> list[Attestation]:
    """Waits until every live worker attests the final version, once the trainer has finished.

    Calls ``tick`` between polls. A worker that has not attested after `AUDIT_PATIENCE_S` while its
    heartbeats continue is judged by its last heartbeat; a silent one is left out.
    """
    deadline = time.monotonic() + AUDIT_PATIENCE_S
    fleet = Fleet(bucket, silence_s=silence_s)
    while True:
        try:
            fleet.poll()
        except RetryError:
            if time.monotonic() > deadline:
                raise
            tick()
            continue
        live = [one for one in fleet.heartbeats.values() if _attests(one, status)]
        pending = [
            one
            for one in live
            if not _is_finished(one) and fleet.states[one.process] in ("alive", "stalled")
        ]
        if not pending or time.monotonic() > deadline:
            return _compare([one for one in live if _is_finished(one) or one in pending], status)
        tick()


def of_line(name: str, found: Iterable[Attestation]) -> list[Attestation]:
    """Names the workers of a line of versions with the line."""
    return [replace(one, worker=f"{name}/{one.worker}") for one in found]


def attested(bucket: Bucket, status: TrainerStatus) -> list[Attestation]:
    """Compares the workers that finished together with this end of the run, without waiting."""
    fleet = Fleet(bucket, silence_s=0.0)
    fleet.poll()
    found = (one for one in fleet.heartbeats.values() if _is_finished(one))
    return _compare((one for one in found if _attests(one, status)), status)


def _is_finished(heartbeat: Heartbeat) -> bool:
    return heartbeat.worker is not None and heartbeat.worker.phase == "finished"


def _attests(heartbeat: Heartbeat, status: TrainerStatus) -> bool:
    """Returns whether a worker must attest: it neither stopped nor finished at an earlier end.

    A worker that finished earlier, and was gone when the run continued, holds an older version.
    One that is still starting has no status yet.
    """
    worker = heartbeat.worker
    if worker is None or worker.phase not in ("stopped", "finished"):
        return heartbeat.role == "worker"
    return worker.phase == "finished" and worker.version == status.version


def _compare(heartbeats: Iterable[Heartbeat], status: TrainerStatus) -> list[Attestation]:
    found = []
    for one in sorted(heartbeats, key=lambda heartbeat: heartbeat.process):
        worker = one.worker
        if worker is not None:
            identical = (
                worker.attested
                and worker.version == status.version
                and worker.digest == status.digest
            )
            found.append(
                Attestation(one.process, worker.version, identical, one.supervised, worker.stored)
            )
    return found


def served_status(bucket: Bucket, config: RunConfig, status: TrainerStatus) -> TrainerStatus:
    """Returns the status with the digest of the weights that workers serve, where these are of a
    line of the run; raises `InputError` if the line lacks that version."""
    if served_exporter(config) == config.train.exporter:
        return status
    place = publication_bucket(bucket, served_exporter(config))
    manifest = read_manifest(place, read_run(place), status.version)
    if manifest is None:
        raise InputError(
            f"the line {served_exporter(config)} lacks version {status.version}",
            hint="continue the run: its trainer publishes the version",
            run=place.url,
            version=status.version,
        )
    return replace_field(status, digest=manifest.digest)


def last_status(bucket: Bucket) -> TrainerStatus:
    """Reads ``trainer.json``; raises `InputError` if there is none."""
    status = read_trainer(bucket)
    if status is None:
        raise InputError("the run has no trainer.json", run=bucket.url)
    return status
