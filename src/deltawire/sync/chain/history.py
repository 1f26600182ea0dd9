"""Reads the committed versions of a run one after another, across numbers that were skipped.

A publisher skips numbers that unreadable objects occupy, so a version may build on one more than
one number below it. Numbers between a version and its base belong to no version. A base that cannot
be read does belong to a version, and breaks the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import committed_versions, read_manifest
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

WINDOW = 256
"""Manifests read at a time."""


def read_history(
    bucket: Bucket, run: Run, *, after: int = 0, readers: int = 1
) -> Iterator[Manifest]:
    """Yields the manifests of the versions above ``after`` in order, pruned ones included.

    Unreadable objects above the newest readable version are ignored, as readers do. Raises
    `CorruptError` where a version builds on one that is missing or damaged.

    Example::

        for manifest in read_history(bucket, run, readers=16):
            print(manifest.version, manifest.base)
    """
    versions = committed_versions(bucket, newer_than=after)
    window = WINDOW if readers > 1 else 1
    before = after
    read = partial(_read, bucket, run)
    damaged: dict[int, CorruptError] = {}
    with ThreadPoolExecutor(readers, "history") as threads:
        for first in range(0, len(versions), window):
            part = versions[first : first + window]
            for version, found in zip(part, threads.map(read, part), strict=True):
                if isinstance(found, CorruptError):
                    damaged[version] = found
                    continue
                if found is None:
                    continue  # Deleted after the listing.
                base = found.base
                if base is not None and base > before:
                    raise damaged.get(base) or CorruptError(
                        f"a manifest is missing: version {version} builds on it",
                        run=bucket.url,
                        version=base,
                    )
                damaged.clear()
                before = version
                yield found


def _read(bucket: Bucket, run: Run, version: int) -> Manifest | CorruptError | None:
    try:
        return read_manifest(bucket, run, version)
    except CorruptError as error:
        return error
