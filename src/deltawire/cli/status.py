"""``deltawire status``: how a run stands, from its bucket only."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, add_window, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("status", help="show a run's status, read from its bucket only")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until the run is over")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two reads (default: 2)",
    )
    add_window(parser)
    add_json(parser, "print one JSON object each time")


def run(arguments: argparse.Namespace) -> int:
    """Shows a run once, or with ``--watch`` until it is over."""
    from deltawire.launch.status import show_status

    show_status(
        arguments.run,
        trust=trust_of(arguments),
        watch=arguments.watch,
        every_s=arguments.every,
        window_s=arguments.window,
        as_json=arguments.json,
    )
    return 0
