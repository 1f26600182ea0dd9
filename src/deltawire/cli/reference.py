"""``deltawire reference``: the reference process of a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_process_options, add_run_url, child_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "reference", help="score a run's groups with its reference, or a teacher"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Scores groups until the run ends."""
    from deltawire.launch.processes import run_as_reference

    run_as_reference(arguments.run, options=child_options(arguments))
    return 0
