"""Tells a trainer that was replaced from one whose predecessor committed a version late."""

from __future__ import annotations

from deltawire.errors import DeltawireError, FencedError, ResyncError
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire.run import Run


def unfenced(bucket: Bucket, run: Run, epoch: int, error: FencedError) -> DeltawireError:
    """Translate a fencing error of the trainer of ``epoch``.

    `ResyncError`, to restart from the newest version, if the previous trainer's last commit
    arrived late; else the error itself.
    """
    if error.version is None:
        return error
    manifest = read_manifest(bucket, run, error.version)
    if manifest is None or manifest.epoch >= epoch:
        return error
    return ResyncError(
        "the previous trainer committed a version late",
        hint="restart from that version",
        run=bucket.url,
        version=error.version,
    )
