"""``deltawire rescore``: trains a fork on stored trajectories with new rewards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deltawire.cli.arguments import add_json, add_run_url, add_trust, at_least, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("rescore", help="train a fork on stored answers with new rewards")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--reward",
        required=True,
        metavar="FILE",
        help="a Python file of yours: def reward(completion, row) -> float",
    )
    parser.add_argument(
        "--from", type=at_least(1), required=True, dest="first", metavar="N", help="first version"
    )
    parser.add_argument(
        "--to", type=at_least(1), required=True, dest="last", metavar="N", help="last version"
    )
    parser.add_argument(
        "--to-run", required=True, metavar="NAME", help="the fork is RUN_URL/forks/NAME"
    )
    add_trust(parser)
    add_json(parser, "print a JSON object for each version")


def run(arguments: argparse.Namespace) -> int:
    """Scores and trains; says on standard error where answers do not fit the policy any more."""
    import dataclasses

    from deltawire.display import safe_json
    from deltawire.launch.branches.rescoring import RescoredStep, load_reward, rescore_run
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run

    def report(step: RescoredStep) -> None:
        if arguments.json:
            print(safe_json(dataclasses.asdict(step)))  # noqa: T201
        else:
            print(  # noqa: T201
                f"version {step.version}: mean reward {step.after:.3f}, was {step.before:.3f}; "
                f"{step.without_weight:.0%} of the tokens without weight"
            )
        if step.unfit:
            print(  # noqa: T201
                f"warning: the answers of version {step.origin} no longer fit the policy",
                file=sys.stderr,
            )

    bucket = open_trusted(arguments.run, trust_of(arguments))
    made = rescore_run(
        bucket,
        read_run(bucket),
        arguments.to_run,
        load_reward(Path(arguments.reward)),
        first=arguments.first,
        last=arguments.last,
        report=report,
    )
    if not arguments.json:
        print(f"the fork is {made.url}")  # noqa: T201
    return 0
