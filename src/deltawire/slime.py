"""Publishes the weights that slime writes to disk, from its own hook.

::

    export DELTAWIRE_RUN=s3://bucket/run
    train.py --update-weight-mode full --update-weight-transport disk \\
        --update-weight-disk-dir DIR --custom-update-weight-post-write-path deltawire.slime.publish

slime calls the hook on every rank after a version's directory is complete and before engines read
it. It removes the directory afterwards, so the hook returns when the version is committed. If the
store does not answer, the hook keeps the directory under another name, without a copy, and
returns: the next version supersedes it, and the last one is tried again at the end of the process.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import open_bucket
from deltawire.sync import CheckpointPublisher
from deltawire.sync.huggingface.publish_dirs import DirectoryResult
from deltawire.sync.publish import interpreter_exit
from deltawire.sync.publish.commit_thread import RANKS_WAIT_S
from deltawire.sync.publish.outage import FIRST_PAUSE_S, Outage

RUN = "DELTAWIRE_RUN"
"""The environment variable that names the run's location."""

MAX_OUTAGE = "DELTAWIRE_MAX_OUTAGE"
"""The environment variable that limits how many seconds without the store training goes on for."""

KEPT = ".deltawire-uncommitted"
"""The folder next to slime's directories that keeps the one that could not be committed."""

MAX_NAMES = 8

logger = logging.getLogger(__name__)


class _Unwaited(Outage):
    """An outage whose next attempt is slime's next call."""

    def wait(self, seconds: float) -> None:
        del seconds


class _Hook:
    """Publishes the directories of one process to the run at ``url``."""

    def __init__(self, url: str) -> None:
        limit = os.environ.get(MAX_OUTAGE, "")
        try:
            self.outage = _Unwaited(url, float(limit) if limit else None)
        except ValueError as error:
            raise InputError(f"{MAX_OUTAGE} is {limit[:40]!r}", hint="give seconds") from error
        self.url = url
        self._publisher = CheckpointPublisher(open_bucket(url, create=True))
        self._kept: Path | None = None

    def publish(self, path: Path) -> DirectoryResult | None:
        """Publishes a directory; returns None if it is kept because the store is away."""
        if self._kept is None:
            _warn_of_kept(path.parent / KEPT)
        _drop(path.parent / KEPT)
        interpreter_exit.committed(self)
        superseded, self._kept = self._kept is not None, None
        self.outage.superseded += superseded
        try:
            done = self._publisher.publish(path, in_call_order=True)
        except RetryError as error:
            self._kept = _keep(path)
            interpreter_exit.staged(self)
            self.outage.pause(error, self.version + 1)
            return None
        self.outage.end()
        return done

    @property
    def version(self) -> int:
        """The newest version that this process knows of, -1 before the first."""
        return self._publisher.newest

    def finish(self, limit_s: float | None) -> None:
        """Tries the directory that is kept once more, at the end of the process."""
        kept, wait_s = self._kept, RANKS_WAIT_S if limit_s is None else min(limit_s, RANKS_WAIT_S)
        deadline = time.monotonic() + wait_s
        reason = ""
        try:
            while kept is not None:
                try:
                    self._publisher.publish(kept, in_call_order=True)
                    break
                except RetryError as error:
                    if time.monotonic() + FIRST_PAUSE_S > deadline:
                        reason = str(error)
                        break
                    time.sleep(FIRST_PAUSE_S)
        except KeyboardInterrupt:
            reason = "interrupted"
        except DeltawireError as error:
            reason = str(error)
        if reason and kept is not None:
            interpreter_exit.report(f"{kept.name} of {self.url} was not committed: {reason}")
        elif kept is not None:
            _drop(kept.parent)
        self._kept = None
        interpreter_exit.committed(self)

    def close(self) -> None:
        """Publishes what is kept, and ends the publisher's threads."""
        self.finish(None)
        self._publisher.close()


_HOOKS: dict[str, _Hook] = {}


def publish(args: Any, version_dir: str | Path, rollout_engines: Any) -> DirectoryResult | None:
    """Publishes the directory ``version_dir`` from rank 0, as the newest version whatever its name:
    a restarted slime counts from 1 again. Other ranks return None at once.

    ``args`` and ``rollout_engines`` are slime's and not used. If the store does not answer, returns
    None too, and keeps the weights until the next call; `RetryError` ends that once the store was
    away for the seconds in ``DELTAWIRE_MAX_OUTAGE``, without which there is no limit. Raises
    `InputError` without the variable ``DELTAWIRE_RUN``, and for a directory that is not a complete
    model or another one than the run's.
    """
    del args, rollout_engines
    if _rank() != 0:
        return None
    url = os.environ.get(RUN, "")
    if not url:
        raise InputError(
            f"{RUN} is not set", hint=f"export {RUN}=s3://bucket/run for the trainer's processes"
        )
    if url not in _HOOKS:
        _HOOKS[url] = _Hook(url)
    return _HOOKS[url].publish(Path(version_dir))


def close() -> None:
    """Closes the publishers of this process; the next `publish` opens them again."""
    hooks = list(_HOOKS.values())
    _HOOKS.clear()
    for hook in hooks:
        hook.close()


def _keep(path: Path) -> Path:
    """Gives a directory's files a second name, which stays when slime removes the first."""
    kept = path.parent / KEPT / path.name
    kept.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        if file.is_file():
            try:
                os.link(file, kept / file.name)
            except OSError:  # A file system without links.
                shutil.copy2(file, kept / file.name)
    return kept


def _warn_of_kept(folder: Path) -> None:
    """Logs what an earlier process kept, could not commit before it was killed, and left."""
    if folder.is_dir():
        names = ", ".join(sorted(one.name for one in folder.iterdir())[:MAX_NAMES])
        logger.warning("%s was not committed: the process that kept it ended before", names)


def _drop(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _rank() -> int:
    """Returns this process's rank in torch's process group, 0 without one."""
    dist = sys.modules.get("torch.distributed")
    return int(dist.get_rank()) if dist and dist.is_available() and dist.is_initialized() else 0
