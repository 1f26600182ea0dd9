"""Which versions there are and which digests they have, for whoever keeps no weights itself."""

from __future__ import annotations

import time

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import committed_versions, read_manifest
from deltawire.sync.follow.subscriber import LOOK_EVERY_POLLS, Update
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

LOOK_BACK = 64
"""So many of the newest manifests may be damaged before the rest is not looked at."""


class ManifestFollower:
    """Follows manifests and no payloads: what `Follower` takes in place of a `Subscriber` in a
    process beside which an engine fetches its weights itself. Its updates carry a version and a
    digest to hold that engine to, and no patches.

    ``version`` is the one reached, -1 before the first.
    """

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.bucket = bucket
        self.run = run
        self.version = -1
        self._polls = 0

    def prepare(self) -> Update | None:
        """The step to the newest version that can be read, None if there is no newer one.

        Raises `CorruptError` if all that there are newer are damaged, `RetryError` if the store
        does not answer.
        """
        began = time.perf_counter()
        manifest = self._newest()
        if manifest is None:
            return None
        spent_ms = (time.perf_counter() - began) * 1e3
        digest = Digest.from_hex(manifest.digest)
        return Update(self.version, manifest.version, digest, [], codec.ZERO, 0, spent_ms)

    def commit(self, update: Update) -> None:
        """The engine serves ``update``."""
        self.version = update.version

    def _newest(self) -> Manifest | None:
        following, damage = self._readable(self.version + 1)
        if following is None and damage is None:
            self._polls += 1
            if self._polls % LOOK_EVERY_POLLS != 1:
                return None
        elif following is not None and not self.bucket.exists(keys.manifest(self.version + 2)):
            return following
        newer = committed_versions(
            self.bucket, newer_than=self.version if self.version >= 0 else None
        )
        for version in sorted(newer, reverse=True)[:LOOK_BACK]:
            found, failure = self._readable(version)
            damage = damage or failure
            if found is not None:
                return found
        if following is None and damage is not None:
            raise damage
        return following

    def _readable(self, version: int) -> tuple[Manifest | None, CorruptError | None]:
        """The manifest of a version that is still served, or what is wrong with it."""
        try:
            manifest = read_manifest(self.bucket, self.run, version)
        except CorruptError as error:
            return None, error
        return (None if manifest is None or manifest.pruned else manifest), None
