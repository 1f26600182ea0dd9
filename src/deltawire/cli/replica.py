"""``deltawire replica``: serves a run with the embedded engine, for a gateway."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import (
    add_address,
    add_precision,
    add_run_url,
    add_trust,
    location_of,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "replica", help="serve a run with the embedded engine, as a replica of a gateway"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_precision(parser)
    add_address(parser, port=8001)
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="holds the gateway's key for replicas (default: DELTAWIRE_REPLICA_KEY, or generated)",
    )
    parser.add_argument(
        "--hold",
        action="store_true",
        help="stay at the newest version of the start until a gateway asks for another",
    )
    parser.add_argument("--cpus", default="", help="run on these processors only, such as 0,1")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal comes."""
    from deltawire.launch.replica import ReplicaOptions, serve_replica

    trust = trust_of(arguments)
    options = ReplicaOptions(
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        hold=arguments.hold,
        cpus=arguments.cpus,
        trust=trust,
    )
    serve_replica(location_of(arguments.run, arguments.precision, trust), options)
    return 0
