"""Further lines of versions of a run, each of which has all keys of a run."""

from __future__ import annotations

from deltawire.config import run_config
from deltawire.config.served import published
from deltawire.errors import InputError
from deltawire.store import Bucket, RetryingBucket, open_bucket
from deltawire.sync.chain.objects import require_run
from deltawire.wire import keys


def line_bucket(bucket: Bucket, name: str, *, create: bool = False) -> Bucket:
    """Opens the place of a run's line."""
    return open_bucket(f"{bucket.url.rstrip('/')}/{keys.line(name)}", create=create)


def publication_bucket(bucket: Bucket, exporter: str) -> Bucket:
    """Opens the place where a run publishes its versions by ``exporter``: its own, or a line's.

    Raises `InputError`, which names those of the run, for any other exporter.
    """
    run = require_run(RetryingBucket.over(bucket))
    config = run_config(run.config, url=bucket.url) if run.config else None
    names = published(config.train) if config else []
    if exporter not in names:
        raise InputError(
            f"the run does not publish {exporter[:80]}",
            hint=f"it publishes {', '.join(names)}" if names else "it states no precision",
            run=bucket.url,
        )
    return bucket if exporter == names[0] else line_bucket(bucket, exporter)


def run_of_line(bucket: Bucket, name: str) -> Bucket:
    """Opens the run that a line belongs to, from the line's place."""
    return open_bucket(bucket.url.rstrip("/").removesuffix(keys.line(name)))
