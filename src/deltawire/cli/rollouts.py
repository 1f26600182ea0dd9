"""``deltawire rollouts``: samples of what a run was trained on, or one group in full."""

from __future__ import annotations

import argparse
import math

from deltawire.cli.arguments import (
    add_json,
    add_run_url,
    add_trust,
    at_least,
    split_version,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("rollouts", help="print samples of what a run was trained on")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--version",
        type=at_least(1),
        metavar="N",
        help="only samples that this version was trained on (default: all, newest first)",
    )
    parser.add_argument(
        "--task", default="", metavar="TEXT", help="only tasks whose identity contains this text"
    )
    parser.add_argument("--family", default="", metavar="NAME", help="only this family of tasks")
    parser.add_argument("--worker", default="", metavar="NAME", help="only samples of this worker")
    parser.add_argument(
        "--min-reward",
        type=float,
        default=-math.inf,
        metavar="R",
        help="only samples with at least this reward",
    )
    parser.add_argument(
        "--max-reward",
        type=float,
        default=math.inf,
        metavar="R",
        help="only samples with at most this reward",
    )
    parser.add_argument(
        "--search", default="", metavar="TEXT", help="whose prompt or answer contains this text"
    )
    parser.add_argument(
        "--group",
        default="",
        metavar="WORKER/NUMBER",
        help="show this group in full instead: each answer as messages",
    )
    parser.add_argument("--failed", action="store_true", help="only episodes that failed")
    parser.add_argument(
        "--cause",
        default="",
        metavar="TEXT",
        help="only episodes that failed for a reason that contains this text",
    )
    parser.add_argument(
        "--count", type=at_least(1), default=5, metavar="N", help="how many (default: 5)"
    )
    add_trust(parser)
    add_json(parser, "print one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples that match."""
    from deltawire.launch.processes import stay_off_the_hub
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run

    stay_off_the_hub()
    from deltawire.launch.rollouts import print_group, print_samples
    from deltawire.rl.evaluate.samples import SampleFilter

    split_version(arguments)
    bucket = open_trusted(arguments.run, trust_of(arguments))
    if arguments.group:
        print_group(bucket, read_run(bucket), arguments.group, as_json=arguments.json)
        return 0
    wanted = SampleFilter(
        version=arguments.version,
        task=arguments.task,
        family=arguments.family,
        worker=arguments.worker,
        reward_min=arguments.min_reward,
        reward_max=arguments.max_reward,
        failed=arguments.failed,
        cause=arguments.cause,
    )
    print_samples(
        bucket,
        read_run(bucket),
        wanted,
        count=arguments.count,
        search=arguments.search,
        as_json=arguments.json,
    )
    return 0
