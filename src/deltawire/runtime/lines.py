"""Further lines of versions of a run, each of which has all keys of a run."""

from __future__ import annotations

from deltawire.store import Bucket, open_bucket
from deltawire.wire import keys


def line_bucket(bucket: Bucket, name: str, *, create: bool = False) -> Bucket:
    """Opens the place of a run's line."""
    return open_bucket(f"{bucket.url.rstrip('/')}/{keys.line(name)}", create=create)


def run_of_line(bucket: Bucket, name: str) -> Bucket:
    """Opens the run that a line belongs to, from the line's place."""
    return open_bucket(bucket.url.rstrip("/").removesuffix(keys.line(name)))
