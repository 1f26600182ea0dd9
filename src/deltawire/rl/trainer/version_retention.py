"""Version retention: prunes old versions of a run in a thread, after checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from deltawire.errors import DeltawireError, UnreadableError
from deltawire.store import Bucket
from deltawire.sync import prune
from deltawire.sync.chain.retention import GRACE_S
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


class VersionRetention:
    """Keeps the newest ``keep`` versions of a run and of its ``lines``, those from the oldest
    checkpoint on, and those from the one that serves users on; 0 keeps all.

    One call of `deltawire.sync.prune` runs at a time. Nothing depends on it: an error goes to
    ``report``, and the next checkpoint starts another call, which continues where it ended. An
    object that cannot be read is also the ``alarm``, until a call ends without one.

    Example::

        retention = VersionRetention(bucket, run, keep=1000, report=print)
        retention.start(newest=5000)
        retention.close()
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        keep: int,
        report: Callable[[str], None],
        grace_s: float = GRACE_S,
        signer: Signer | None = None,
        lines: Sequence[tuple[Bucket, Run]] = (),
    ) -> None:
        self.alarm = ""
        self._signer = signer
        self._places = [(bucket, run), *lines]
        self._keep = keep
        self._report = report
        self._grace_s = grace_s
        self._thread = ThreadPoolExecutor(1, "version-retention")
        self._pending: Future[None] | None = None

    def start(self, *, newest: int, served: int | None = None) -> bool:
        """Start to prune, unless nothing is due or the last call still runs; returns whether it
        started. ``served`` is the oldest version that a decision may still bring to users."""
        if self._pending is not None and not self._pending.done():
            return False
        self._finish()
        cutoff = newest - self._keep + 1
        cutoff = cutoff if served is None else min(cutoff, served)
        if not self._keep or cutoff < 1:
            return False
        self._pending = self._thread.submit(self._prune, cutoff)
        return True

    def _prune(self, cutoff: int) -> None:
        try:
            for bucket, run in self._places:
                prune(bucket, run, cutoff=cutoff, grace_s=self._grace_s, signer=self._signer)
            self.alarm = ""
        except UnreadableError as error:
            self.alarm = str(error)
            raise

    def close(self) -> None:
        """Wait for the call that runs, and end the thread."""
        self._thread.shutdown()
        self._finish()

    def _finish(self) -> None:
        """Report the error of the last call."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except DeltawireError as error:
            self._report(f"old versions could not be deleted: {error}")
