"""``deltawire evaluator``: the evaluator process of a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_process_options, add_run_url, child_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("evaluator", help="measure a run's held-out accuracy")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates versions until the run ends."""
    from deltawire.launch.processes import run_as_evaluator

    run_as_evaluator(arguments.run, options=child_options(arguments))
    return 0
