"""Finds the forks of a run, which lie below it, and where they began."""

from __future__ import annotations

from deltawire.errors import CorruptError
from deltawire.launch.branches.fork_copy import KnownFork, children_from
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.first_version import origin_of
from deltawire.wire import keys


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
