"""Finds the forks of a run, which lie below it, and where they began."""

from __future__ import annotations

import msgspec

from deltawire.errors import CorruptError
from deltawire.launch.branches.fork_copy import KnownFork, children_from
from deltawire.store import Bucket, open_bucket
from deltawire.sync import committed_versions, find_run, read_manifest
from deltawire.wire import keys
from deltawire.wire.ledger import FORK_RECORD, ForkRecord


def fork_names(bucket: Bucket) -> list[str]:
    """Lists the names of a run's forks, those included that are not finished: what one of two
    listings shows, because one may come back short."""
    listed = {name for _ in range(2) for name in bucket.list_prefixes(keys.FORKS)}
    return sorted(filter(keys.valid_name, listed))


def direct_forks(bucket: Bucket) -> list[str]:
    """Returns the URLs of a run's own forks, those in other buckets included."""
    here = [open_fork(bucket, name).url for name in fork_names(bucket)]
    return sorted({*here, *(one.url for one in children_from(bucket, 0))})


def open_fork(bucket: Bucket, name: str) -> Bucket:
    """Opens the bucket of a fork."""
    return open_bucket(f"{bucket.url.rstrip('/')}/{keys.fork(name)}")


def origin_of(fork: Bucket) -> int | None:
    """Returns the parent's version that a fork began with, None if it states none.

    Raises `CorruptError` if that cannot be read.
    """
    run = find_run(fork)
    if run is None:
        return None
    for version in committed_versions(fork):
        manifest = read_manifest(fork, run, version)
        if manifest is not None and FORK_RECORD in manifest.metadata:
            try:
                return msgspec.convert(manifest.metadata[FORK_RECORD], ForkRecord).version
            except msgspec.ValidationError as error:
                raise CorruptError(f"metadata: {error}", run=fork.url, version=version) from error
    return None


def forks_from(bucket: Bucket, version: int) -> list[KnownFork]:
    """Returns the forks, and their forks, that began with ``version`` or a later
    one, also in other buckets. One whose origin is unknown, or was deleted by its retention, counts
    as one of them.
    """
    found = children_from(bucket, version)
    for name in fork_names(bucket):
        fork = open_fork(bucket, name)
        try:
            origin = origin_of(fork)
        except CorruptError:
            origin = None
        if origin is None or origin >= version:
            found += [KnownFork(fork.url), *forks_from(fork, 0)]
    return found
