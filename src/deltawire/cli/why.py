"""``deltawire why``: the steps and groups that moved a behavior."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_trust, at_least, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("why", help="say which steps, and which groups, moved a behavior")
    parser.set_defaults(call=run)
    parser.add_argument(
        "run", metavar="RUN_URL[@A..B]", help="a range of versions (default: all of the run)"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--on",
        default="",
        metavar="FILE",
        help='how likely answers are: rows of JSON with "prompt", "answer", and perhaps "instead"',
    )
    asked.add_argument(
        "--probe", default="", metavar="NAME", help="the mean of a probe, or of the reward: reward"
    )
    asked.add_argument(
        "--layer",
        default="",
        metavar="N|NAME",
        help="the weights of a layer, or of tensors with this in their names",
    )
    parser.add_argument(
        "--every",
        type=at_least(1),
        default=1,
        metavar="N",
        help="take gradients at every N-th version (default: 1)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(0),
        default=3,
        metavar="N",
        help="examine the groups of the N steps with the largest new contribution (default: 3)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explains the change."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.branches.printed_explanation import print_explanation
    from deltawire.launch.branches.why import Question, explain, parse_range
    from deltawire.launch.progress import counting

    bucket, first, last = parse_range(arguments.run, trust_of(arguments))
    question = Question(arguments.on, arguments.probe, arguments.layer)
    with counting(hidden=arguments.json) as show:
        found = explain(
            bucket,
            first,
            last,
            question,
            every=arguments.every,
            steps=arguments.steps,
            progress=show,
        )
    if arguments.json:
        print(safe_json(found))  # noqa: T201
    else:
        print_explanation(found, Console(highlight=False, soft_wrap=True))
    return 0
