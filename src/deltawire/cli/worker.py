"""``deltawire worker``: one rollout worker of a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_process_options, add_run_url, child_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("worker", help="join a run as a rollout worker")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("--id", default="", help="the worker's name (default: a generated one)")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="wait this long for a trainer (default: 600)",
    )
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Samples until the run ends."""
    from deltawire.launch.processes import join_as_worker

    join_as_worker(
        arguments.run,
        name=arguments.id,
        patience_s=arguments.patience,
        options=child_options(arguments),
    )
    return 0
