"""Compares what workers attest with what the trainer published."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deltawire.errors import (
    InputError,
    RetryError,
)
from deltawire.runtime.fleet import (
    HEARTBEAT_TIMEOUT_S,
    check_heartbeat,
    read_heartbeat,
    read_trainer,
)
from deltawire.runtime.object_cache import Roster
from deltawire.store import Bucket
from deltawire.sync.chain.objects import with_retries
from deltawire.wire import keys
from deltawire.wire.status import Heartbeat, TrainerStatus

AUDIT_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Verdict:
    """What the audit found of one worker: does it serve the final version, to the bit?"""

    worker: str
    version: int
    identical: bool
    supervised: bool
    groups: int


def heartbeats(bucket: Bucket) -> list[Heartbeat]:
    """Every worker's heartbeat that can be read."""
    found = []
    for key in bucket.list(keys.FLEET):
        worker = keys.worker_of(key)
        beat = read_heartbeat(bucket, key) if worker else None
        if beat is not None and beat.worker == worker:
            found.append(beat)
    return found


def wait_for_workers(
    bucket: Bucket, status: TrainerStatus, tick: Callable[[], None]
) -> list[Verdict]:
    """Once the trainer has finished, wait for every live worker to attest the last version.

    A worker that never does so, while its heartbeat goes on, is judged as it is after
    `AUDIT_PATIENCE_S`; one whose heartbeat stops is no longer live.
    """
    deadline = time.monotonic() + AUDIT_PATIENCE_S
    seen: dict[str, tuple[float, float]] = {}
    roster = Roster(bucket, keys.FLEET, keys.worker_of, lambda key: check_heartbeat(bucket, key))
    while True:
        now = time.monotonic()
        try:
            roster.look()
            beats = [
                beat
                for name, beat in roster.values.items()
                if beat.worker == name and _may_be_live(beat, status)
            ]
        except RetryError:
            if now > deadline:
                raise
            tick()
            continue
        pending = []
        for beat in beats:
            stamp, since = seen.get(beat.worker, (0.0, now))
            seen[beat.worker] = (beat.at, now if beat.at != stamp else since)
            quiet = now - seen[beat.worker][1] > HEARTBEAT_TIMEOUT_S
            if beat.phase != "finished" and not quiet:
                pending.append(beat)
        if not pending or now > deadline:
            live = [beat for beat in beats if beat.phase == "finished" or beat in pending]
            return [judge(beat, status) for beat in sorted(live, key=lambda b: b.worker)]
        tick()


def _may_be_live(beat: Heartbeat, status: TrainerStatus) -> bool:
    """Not stopped, and not finished with an earlier end of this run."""
    return beat.phase != "stopped" and (beat.phase != "finished" or beat.version == status.version)


def attested(bucket: Bucket, status: TrainerStatus) -> list[Verdict]:
    """What the workers attested that saw this end of the run. Who finished with an earlier one, and
    was gone when the run went on, holds what it held and is not asked."""
    beats = [beat for beat in heartbeats(bucket) if beat.phase == "finished"]
    return [judge(beat, status) for beat in beats if _may_be_live(beat, status)]


def judge(beat: Heartbeat, status: TrainerStatus) -> Verdict:
    """Compare what a worker attested with what the trainer holds."""
    identical = beat.attested and beat.version == status.version and beat.digest == status.digest
    return Verdict(beat.worker, beat.version, identical, beat.supervised, beat.stored)


def last_status(bucket: Bucket) -> TrainerStatus:
    """``trainer.json``; raises `InputError` if there is none."""
    status = with_retries(lambda: read_trainer(bucket))
    if status is None:
        raise InputError("the run has no trainer.json", run=bucket.url)
    return status
