"""``deltawire evaluator``: the evaluator process of a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_child_options, add_run_url


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("evaluator", help="measure a run's held-out accuracy")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_child_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate versions until the run ends."""
    from deltawire.launch.processes import ChildOptions, run_as_evaluator

    run_as_evaluator(arguments.run, options=ChildOptions(arguments.supervised, arguments.cpus))
    return 0
