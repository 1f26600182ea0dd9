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

from deltawire.errors import CorruptError, DeltawireError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Evidence, Sound, Unknown, evidence_of, unreadable
from deltawire.sync.chain.objects import committed_versions, read_manifest
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

T = TypeVar("T")

WINDOW = 256
"""Manifests read at a time."""

SO = "nothing was decided"
"""The act that is left out if a version cannot be read."""


def read_history(
    bucket: Bucket,
    run: Run,
    *,
    after: int = 0,
    to: int | None = None,
    complete: bool = True,
    readers: int = 1,
) -> Iterator[Manifest]:
    """Yields the manifests of the versions above ``after`` in order, pruned ones included; with
    ``to``, none above that.

    Numbers that belong to no version are skipped, as by readers. Raises `UnreadableError` where a
    version may be that cannot be read, also if it would be the newest: its manifest may say what it
    consumed or restored. Without ``complete``, what cannot be read above the newest readable
    version is left out, for a caller that asks again and does nothing for its absence. Raises
    `CorruptError` where a version builds on one that is missing.

    Example::

        for manifest in read_history(bucket, run, readers=16):
            print(manifest.version, manifest.base)
    """
    versions = [v for v in _listed(bucket, after, complete=complete) if to is None or v <= to]
    window = WINDOW if readers > 1 else 1
    before = after
    read = partial(_evidence, bucket, run)
    unknown: dict[int, CorruptError] = {}
    with ThreadPoolExecutor(readers, "history") as threads:
        for first in range(0, len(versions), window):
            part = versions[first : first + window]
            for version, found in zip(part, threads.map(read, part), strict=True):
                if isinstance(found, Unknown):
                    unknown[version] = found.error
                if not isinstance(found, Sound):
                    continue
                base = found.value.base
                if base is not None and base > before:
                    raise _missing(bucket, run, base, version, unknown.get(base))
                unknown.clear()
                before = version
                yield found.value
    if unknown and complete:
        number, error = next(iter(unknown.items()))
        raise unreadable(bucket, keys.manifest(number), error, so=SO)


def _listed(bucket: Bucket, after: int, *, complete: bool) -> list[int]:
    """Lists versions; twice if none may be left out."""
    found = committed_versions(bucket, newer_than=after)
    if complete:
        found = sorted({*found, *committed_versions(bucket, newer_than=after)})
    return found


def _evidence(bucket: Bucket, run: Run, version: int) -> Evidence[Manifest]:
    read = partial(read_manifest, bucket, run, version)
    return evidence_of(bucket, keys.manifest(version), read)


def _missing(
    bucket: Bucket, run: Run, base: int, version: int, error: CorruptError | None
) -> DeltawireError:
    """Makes the error of a version whose base was not read; ``error`` says why, None if no listing
    showed it."""
    found = Unknown(error) if error is not None else _evidence(bucket, run, base)
    if isinstance(found, Unknown):
        return unreadable(bucket, keys.manifest(base), found.error, so=SO)
    if isinstance(found, Sound):
        short = CorruptError("two listings left a version out", run=bucket.url, version=base)
        return unreadable(bucket, keys.manifest(base), short, so=SO)
    return CorruptError(
        f"a manifest is missing: version {version} builds on it", run=bucket.url, version=base
    )


def is_skipped(bucket: Bucket, run: Run, number: int) -> bool:
    """Returns whether ``number`` belongs to no version: the next version that can be read builds on
    an earlier one, so its publisher found the number occupied and skipped it.

    Only a later version that is sound says so. Raises `RetryError` if the store does not answer.
    """
    for version in committed_versions(bucket, newer_than=number):
        found = _evidence(bucket, run, version)
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
