"""``deltawire learner``: makes groups of answers that live users were served."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_process_options, add_run_url, child_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("learner", help="train a run on answers that users were served")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("--id", default="live", help="the learner's name (default: live)")
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Learn until the run ends."""
    from deltawire.launch.processes import join_as_learner

    join_as_learner(arguments.run, name=arguments.id, options=child_options(arguments))
    return 0
