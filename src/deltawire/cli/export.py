"""``deltawire export``: a version as a snapshot in a hosted provider's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import (
    add_json,
    add_run_url,
    add_trust,
    at_least,
    split_version,
    trust_of,
)
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("export", help="write a version for a hosted provider to hot-load")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("directory", metavar="DIR", help="the snapshot's new folder")
    parser.add_argument(
        "--version",
        type=at_least(0),
        metavar="N",
        help="the version to write (default: the newest)",
    )
    parser.add_argument(
        "--base", type=at_least(0), metavar="N", help="write an arc_v2 delta to this version"
    )
    add_trust(parser)
    add_json(parser, "print only the request's body, without progress")


def run(arguments: argparse.Namespace) -> int:
    """Writes a snapshot; print the body of the hot-load request for it."""
    import msgspec

    from deltawire.display import safe_json
    from deltawire.export.snapshots import export_snapshot
    from deltawire.launch.progress import bars
    from deltawire.runtime.trusted import open_trusted
    from deltawire.store import MeteredBucket
    from deltawire.sync import newest_version, read_run

    split_version(arguments)
    with bars(hidden=arguments.json) as bar:
        bucket = MeteredBucket(
            open_trusted(arguments.run, trust_of(arguments)), lambda read, _: bar.advance(read)
        )
        run = read_run(bucket)
        version = newest_version(bucket) if arguments.version is None else arguments.version
        if version is None:
            raise InputError("the run has no version yet", hint="wait for one", run=bucket.url)
        made = export_snapshot(
            bucket, run, version, Path(arguments.directory), base=arguments.base, log=bar.begin
        )
    body = msgspec.to_builtins(made)
    print(safe_json({k: v for k, v in body.items() if v}))  # noqa: T201
    return 0
