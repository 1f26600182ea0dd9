"""``deltawire export`` and ``import``: snapshots in the hosted providers' layout."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from deltawire.cli.transfer import bars
from deltawire.errors import InputError
from deltawire.export.snapshots import export_snapshot, import_snapshot
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync import newest_version, require_run


def export(arguments: argparse.Namespace) -> int:
    """Write a snapshot; print the hot-load request's body that goes with it."""
    with bars(arguments) as bar:
        bucket = MeteredBucket(open_bucket(arguments.run), lambda read, _: bar.more(read))
        run = require_run(bucket, public_key=arguments.public_key)
        version = newest_version(bucket) if arguments.version is None else arguments.version
        if version is None:
            raise InputError("the run has no version yet", run=bucket.url)
        made = export_snapshot(
            bucket, run, version, Path(arguments.directory), base=arguments.base, tell=bar.begin
        )
    body = msgspec.to_builtins(made)
    print(msgspec.json.encode({k: v for k, v in body.items() if v}).decode())  # noqa: T201
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Write the whole directory that a snapshot and its base make."""
    folders = (arguments.snapshot, arguments.base, arguments.directory)
    import_snapshot(*(Path(folder) for folder in folders))
    return 0
