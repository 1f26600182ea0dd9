"""``deltawire relay``: a copy of a run in another bucket."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import (
    BUCKET,
    add_json,
    add_key,
    add_precision,
    add_report,
    add_retention,
    add_threads,
    add_trust,
    at_least,
    location_of,
    report_place,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("relay", help="keep a copy of a run in another bucket current")
    parser.set_defaults(call=run)
    parser.add_argument("source", metavar="SRC_URL", help=BUCKET)
    parser.add_argument("destination", metavar="DST_URL", help=BUCKET)
    parser.add_argument("--follow", action="store_true", help="continue until interrupted")
    parser.add_argument(
        "--start",
        type=at_least(0),
        metavar="N",
        help="begin at the newest anchor up to version N (default: the newest of all)",
    )
    parser.add_argument(
        "--keep-all", action="store_true", help="keep the versions that the source has pruned"
    )
    add_precision(parser)
    add_report(parser)
    add_retention(parser)
    add_key(parser)
    add_trust(parser)
    add_threads(parser)
    add_json(parser, "print a JSON object for each version")


def run(arguments: argparse.Namespace) -> int:
    """Copies the versions that exist, and with ``--follow`` those that come."""
    from deltawire.launch.progress import parse_strides
    from deltawire.launch.relay import RelayOptions, relay_run
    from deltawire.launch.role_keys import read_signer

    options = RelayOptions(
        start=arguments.start,
        trust=trust_of(arguments),
        signer=read_signer(arguments.key),
        strides=parse_strides(arguments.compaction_strides),
        threads=arguments.threads,
        prune=not arguments.keep_all,
        grace_s=arguments.grace * 3600,
    )
    relay_run(
        location_of(arguments.source, arguments.precision, trust_of(arguments)),
        arguments.destination,
        options,
        follow=arguments.follow,
        as_json=arguments.json,
        report_to=report_place(arguments, arguments.source),
    )
    return 0
