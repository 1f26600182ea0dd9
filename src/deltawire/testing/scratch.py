"""Opens a fresh, empty prefix of a store, and deletes everything in it at the end."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from deltawire.store import Bucket, FolderBucket, open_bare_bucket
from deltawire.store.probe import PROBES

DELETES_AT_ONCE = 16


@contextmanager
def scratch_bucket(url: str, **options: Any) -> Iterator[Bucket]:
    """Yields a bucket at a new prefix below ``store-probes/`` of ``url``.

    ``options`` are those of `deltawire.store.open_bucket`. Deleting goes on after an error in the
    block; an error while deleting is raised.

    Example::

        with scratch_bucket("s3://bucket/run") as bucket:
            bucket.put("a", b"1")
    """
    place = f"{url.rstrip('/')}/{PROBES}{secrets.token_hex(16)}"
    bucket = open_bare_bucket(place, create=True, **options)
    try:
        yield bucket
    finally:
        empty(bucket)


def empty(bucket: Bucket) -> None:
    """Deletes every object of a bucket, and a folder that it lies in."""
    if isinstance(bucket, FolderBucket):
        shutil.rmtree(bucket.folder, ignore_errors=True)
        if not any(bucket.folder.parent.iterdir()):
            bucket.folder.parent.rmdir()
        return
    keys = bucket.list("")
    with ThreadPoolExecutor(DELETES_AT_ONCE) as pool:
        list(pool.map(bucket.delete, keys))
