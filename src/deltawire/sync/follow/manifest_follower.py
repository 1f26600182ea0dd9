"""Follows manifests without payloads, for a process that keeps no weights itself."""

from __future__ import annotations

import time

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.version_poller import VersionPoller
from deltawire.sync.follow.subscriber import Update
from deltawire.wire.run import Run


class ManifestFollower:
    """Follows manifests but not payloads; `Follower` accepts it in place of a `Subscriber`.

    It serves a process next to an engine that fetches its own weights. Its updates carry a version
    and a digest to compare with that engine, but no patches. ``version`` is the version reached, -1
    before the first.

    Example::

        steps = ManifestFollower(bucket, run)
        if (update := steps.prepare()) is not None:
            engine.load(update.version)
            steps.commit(update)
    """

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.bucket = bucket
        self.run = run
        self.version = -1
        self._poller = VersionPoller(bucket, run)

    @property
    def pause_s(self) -> float:
        """Returns how long to sleep before the next `prepare`."""
        return self._poller.pause_s

    @property
    def alarm(self) -> CorruptError | None:
        """The reason why a newer manifest could not be read, None if all could."""
        return self._poller.alarm

    def prepare(self) -> Update | None:
        """Returns the step to the newest version that can be read, None if there is no newer one.

        Raises `ResyncError` if the run was deleted, replaced or set back, `RetryError` if the store
        does not answer.
        """
        began = time.perf_counter()
        manifest = self._poller.newer(self.version)
        if manifest is None:
            return None
        spent_ms = (time.perf_counter() - began) * 1e3
        digest = Digest.from_hex(manifest.digest)
        return Update(self.version, manifest.version, digest, [], codec.ZERO, 0, spent_ms)

    def commit(self, update: Update) -> None:
        """Records that the engine serves ``update``."""
        self.version = update.version
