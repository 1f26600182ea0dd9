"""The region of a simulated run: a relay copies its versions there, and what must hold of them.

The relay's code is the project's own; readers of the region are those of the run.
"""

from __future__ import annotations

from collections import Counter

from simulated_store import ReadOnly, Store
from simulated_time import scheduler, sleep
from simulated_workers import BrokenError

from deltawire.store import Bucket
from deltawire.sync.chain.payloads import all_blobs, read_blobs, table_blobs
from deltawire.sync.maintain.relay import Relay
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest, decode_manifest
from deltawire.wire.run import Run

REGION_URL = "simulated-region"


class Region:
    """The region's store, and its versions: each has the source's bytes and, until it is closed,
    all of its blobs."""

    def __init__(
        self,
        source: Store,
        run: Run,
        url: str,
        counts: Counter[str],
        *,
        local: bool,
        grace_s: float,
    ) -> None:
        self.store = Store(digest=source.digest, history=source.history)
        self.store.watch = self._changed
        self.url = url.replace("simulated", REGION_URL)
        self.plain: Bucket = ReadOnly(self.store, self.url, local=local)
        self._source = source
        self._run = run
        self._counts = counts
        self._grace_s = grace_s
        self._blobs: dict[int, set[str]] = {}
        """By version that the relay takes for copied, its blobs."""

    def relay(self, source: Bucket, region: Bucket, *, strides: tuple[int, ...], name: str) -> None:
        """Copies versions until an error ends the relay."""
        relay = Relay(source, region, strides=strides, threads=1, grace_s=self._grace_s)
        try:
            while True:
                done = relay.step()
                if done is None:
                    relay.prune()
                    sleep(5.0)
                elif done.kind == "version" and not done.pruned:
                    self._copied(done.version, name)
        finally:
            relay.close()

    def _copied(self, version: int, by: str) -> None:
        """The relay says that a version is in the region: it is, with all its blobs."""
        self._counts["relayed"] += 1
        held = self.store.objects.get(keys.manifest(version))
        if held is None:
            raise BrokenError(f"{by} copied version {version}, and the region does not have it")
        manifest = self._decode(held.data, version)
        if manifest.pruned:
            return
        if manifest.delta is None:
            refs = all_blobs(self.plain, self._run, manifest)
        else:
            refs = table_blobs([manifest.delta])
            refs += read_blobs(self.plain, self._run, manifest.delta)
        self._blobs[version] = {keys.blob(ref.hash) for ref in refs}
        for key in sorted(self._blobs[version]):
            if key not in self.store.objects:
                raise BrokenError(f"{by} copied version {version} without a blob")

    def _decode(self, data: bytes, version: int) -> Manifest:
        key = keys.manifest(version)
        return decode_manifest(data, version=version, table=self._run, run="", key=key)

    def _changed(self, key: str, before: bytes | None, after: bytes | None, by: str) -> None:
        version = keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None
        if version is not None and before != after:
            self._manifest_changed(version, before, after, by)
        if key.startswith(keys.BLOBS) and after is None:
            for copied, blobs in self._blobs.items():
                if key in blobs and not self._is_closed(copied):
                    raise BrokenError(f"{by} deleted a blob of version {copied} in the region")

    def _manifest_changed(
        self, version: int, before: bytes | None, after: bytes | None, by: str
    ) -> None:
        if after is None:
            raise BrokenError(f"{by} deleted the manifest of version {version} in the region")
        source = self._source.objects.get(keys.manifest(version))
        if source is None or after not in (source.data, source.before):
            raise BrokenError(f"the region has another manifest of version {version}")
        if before is None:
            return
        if not self._decode(after, version).pruned:
            raise BrokenError(f"{by} replaced the manifest of version {version} in the region")
        floors = [
            held.stored_at
            for key, held in self.store.objects.items()
            if key.startswith(keys.RETENTION_FLOORS) and (keys.trailing_number(key) or 0) > version
        ]
        if not any(scheduler().now - at >= self._grace_s for at in floors):
            raise BrokenError(f"{by} closed version {version} in the region within the grace")

    def _is_closed(self, version: int) -> bool:
        held = self.store.objects.get(keys.manifest(version))
        return held is None or self._decode(held.data, version).pruned
