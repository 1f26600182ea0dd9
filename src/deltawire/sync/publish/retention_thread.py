"""Prunes old versions in the background, after a publisher's anchors.

Concurrency::

    anchor thread ── wake(version) ──▶ retention thread: prune (see `retention`), one at a time
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

from deltawire.errors import DeltawireError, InputError
from deltawire.store import Bucket
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.retention import GRACE_S, prune
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

logger = logging.getLogger(__name__)


class RetentionThread:
    """Keeps the newest ``retain`` versions of a run readable, and prunes older ones as `prune`
    does; 0 keeps all. Versions that cannot be pruned now are pruned after a later anchor.

    Example::

        retention = RetentionThread(bucket, run, retain=100)
        retention.wake(250)
        retention.close()
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        retain: int,
        grace_s: float = GRACE_S,
        signer: Signer | None = None,
    ) -> None:
        if retain < 0 or grace_s < 0:
            raise InputError(f"retain={retain}, grace_s={grace_s}", hint="give 0 or more")
        self._bucket = bucket
        self._run = run
        self._retain = retain
        self._grace_s = grace_s
        self._signer = signer
        self._pool = WorkerThreads(1, thread_name_prefix="retention")
        self._running: Future[None] | None = None

    def wake(self, version: int) -> None:
        """Begins to prune what readers of the newest versions up to ``version`` do not need."""
        if self._retain and (self._running is None or self._running.done()):
            self._running = self._pool.submit(self._prune, version)

    def close(self) -> None:
        """Waits for the pruning in progress and ends the thread."""
        self._pool.shutdown()

    def _prune(self, version: int) -> None:
        try:
            prune(
                self._bucket,
                self._run,
                cutoff=version - self._retain + 1,
                grace_s=self._grace_s,
                signer=self._signer,
            )
        except DeltawireError as error:
            logger.warning("older versions were not pruned: %s", error)
