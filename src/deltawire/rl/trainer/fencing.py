"""Translates errors of a trainer's commits to the supervisor's next action."""

from __future__ import annotations

from deltawire.errors import DeltawireError, FencedError, InputError, ResyncError
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire import keys
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


def restartable(error: InputError) -> DeltawireError:
    """Translate an error: `ResyncError` if an object that is no manifest has a version's name.

    Any writer to the bucket can put one there, and the number is then skipped. The step that was to
    get it is computed again under the next number, because its random numbers depend on that.
    """
    if not error.key.startswith(keys.MANIFESTS):
        return error
    return ResyncError(
        error.message,
        hint="restart: the step gets the next free number",
        run=error.run,
        version=error.version,
        key=error.key,
    )
