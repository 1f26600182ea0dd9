"""Reads the committed versions of a run one after another, across numbers that were skipped.

A publisher skips numbers that unreadable objects occupy, so a version may build on one more than
one number below it. Numbers between a version and its base belong to no version. A base that cannot
be read does belong to a version, and breaks the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Evidence, Sound, Unknown, evidence_of, unreadable
from deltawire.sync.chain.objects import committed_versions, read_manifest
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

T = TypeVar("T")

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


def is_skipped(bucket: Bucket, run: Run, number: int) -> bool:
    """Returns whether ``number`` belongs to no version: the next version that can be read builds on
    an earlier one, so its publisher found the number occupied and skipped it.

    Only a later version that is sound says so. Raises `RetryError` if the store does not answer.
    """
    for version in committed_versions(bucket, newer_than=number):
        read = partial(read_manifest, bucket, run, version)
        found = evidence_of(bucket, keys.manifest(version), read)
        if isinstance(found, Sound):
            return found.value.base is not None and found.value.base < number
    return False


def evidence_of_version(
    bucket: Bucket,
    run: Run,
    version: int,
    read: Callable[[], T | None],
    *,
    so: str = "nothing was deleted",
) -> Evidence[T]:
    """Returns what is known of a version that ``read`` reads; `Unknown` only for a number that
    belongs to no version (see `is_skipped`).

    Raises `UnreadableError` if it may belong to one; ``so`` tells what was not done.
    """
    found = evidence_of(bucket, keys.manifest(version), read)
    if isinstance(found, Unknown) and not is_skipped(bucket, run, version):
        raise unreadable(bucket, keys.manifest(version), found.error, so=so)
    return found
