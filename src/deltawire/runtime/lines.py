"""Further lines of versions of a run, each of which has all keys of a run."""

from __future__ import annotations

from deltawire.config.served import published
from deltawire.errors import InputError
from deltawire.runtime.needs import config_of
from deltawire.runtime.signed_bucket import signing
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import read_run
from deltawire.wire import keys


def line_bucket(bucket: Bucket, name: str, *, create: bool = False) -> Bucket:
    """Opens the place of a run's line, with the trust and the key that the run was opened with."""
    place = open_bucket(f"{bucket.url.rstrip('/')}/{keys.line(name)}", create=create)
    signed = signing(bucket)
    return place if signed is None else signed.line(place, name)


def publication_bucket(bucket: Bucket, exporter: str) -> Bucket:
    """Opens the place where a run publishes its versions by ``exporter``: its own, or a line's.

    Raises `InputError`, which names those of the run, for any other exporter.
    """
    run = read_run(bucket)
    config = config_of(run, url=bucket.url) if run.config else None
    names = published(config.train) if config else []
    if exporter not in names:
        raise InputError(
            f"the run does not publish {exporter[:80]}",
            hint=f"it publishes {', '.join(names)}" if names else "it states no precision",
            run=bucket.url,
        )
    return bucket if exporter == names[0] else line_bucket(bucket, exporter)


def run_of_line(bucket: Bucket, name: str) -> Bucket:
    """Opens the run that a line belongs to, from the line's place, with the trust that the line was
    opened from."""
    place = open_bucket(bucket.url.rstrip("/").removesuffix(keys.line(name)))
    signed = signing(bucket)
    return place if signed is None or signed.upper is None else signed.upper.with_inner(place)
