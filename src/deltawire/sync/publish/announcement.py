"""Names the version that a publisher was given last, for the start after a crash.

Concurrency::

    publishing thread                     announcing thread
      announcing: begin ─────────────────▶  put the announcement, once, without retries
      copy the weights
      wait, at most WAIT_S ◀─────────────  done

A process that is killed, or ends by ``os._exit``, can say nothing any more. The next publisher
compares the announcement with the newest version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from typing import Any

from deltawire.errors import CorruptError, DeltawireError
from deltawire.store import Bucket, without_retries
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import check_signed
from deltawire.sync.publish.commit import STEP_RECORD
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_ANNOUNCEMENT_BYTES, Announcement, decode_announcement
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

logger = logging.getLogger(__name__)

WAIT_S = 0.25
"""The trainer waits at most this long for an announcement after its weights are copied."""

MAX_STEP = (1 << 53) - 1


class Announcer:
    """Announces the versions of one publisher. A version that has no announcement goes on without.

    Example::

        announcer = Announcer(bucket, run, epoch=1)
        with announcing(announcer, 7, {"global_step": 70}):
            copy(weights)
    """

    def __init__(self, bucket: Bucket, run: Run, epoch: int, signer: Signer | None = None) -> None:
        self._bucket = without_retries(bucket)
        self._run = run
        self._epoch = epoch
        self._signer = signer
        self._pool = WorkerThreads(1, thread_name_prefix="announcer")
        self._running: Future[None] | None = None

    def begin(self, version: int, metadata: Mapping[str, Any]) -> None:
        """Stores the announcement in the background, unless the one before is still under way."""
        if self._running is not None and not self._running.done():
            return
        step = metadata.get(STEP_RECORD)
        found = Announcement(
            run=self._run.id,
            version=version,
            epoch=self._epoch,
            step=step if isinstance(step, int) and 0 <= step <= MAX_STEP else None,
        )
        self._running = self._pool.submit(self._put, found)

    def wait(self) -> None:
        """Waits until the announcement is stored, or cannot be, at most `WAIT_S` seconds."""
        if self._running is not None:
            wait_for([self._running], WAIT_S)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()

    def _put(self, found: Announcement) -> None:
        with suppress(DeltawireError):
            data = seal(found, key=keys.ANNOUNCEMENT, signer=self._signer)
            self._bucket.put(keys.ANNOUNCEMENT, data)


@contextmanager
def announcing(
    announcer: Announcer | None, version: int, metadata: Mapping[str, Any]
) -> Iterator[None]:
    """Announces ``version`` while the caller copies its weights."""
    if announcer is None:
        yield
        return
    announcer.begin(version, metadata)
    yield
    announcer.wait()


def warn_of_uncommitted(bucket: Bucket, run: Run, newest: int) -> int | None:
    """Logs a warning if an earlier publisher was given a version after ``newest``, the run's newest
    one, and did not commit it; returns its number.
    """
    try:
        data = bucket.get(keys.ANNOUNCEMENT, limit=MAX_ANNOUNCEMENT_BYTES)
        if data is None:
            return None
        check_signed(bucket, run, data, keys.ANNOUNCEMENT)
        found = decode_announcement(data, table=run, run=bucket.url, key=keys.ANNOUNCEMENT)
    except CorruptError:  # A damaged hint is no reason not to start.
        return None
    if found.version <= newest:
        return None
    step = "" if found.step is None else f" ({STEP_RECORD} {found.step})"
    logger.warning(
        "version %d%s of %s was not committed: the process that published it ended before; the "
        "newest version is %d",
        found.version,
        step,
        bucket.url,
        newest,
    )
    return found.version
