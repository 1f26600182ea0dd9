"""``deltawire compare``: whether versions are better than a baseline, or chance explains it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_trust, at_least, fraction, trust_of
from deltawire.errors import InputError

if TYPE_CHECKING:
    from deltawire.store import Bucket


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("compare", help="judge versions by their held-out results")
    parser.set_defaults(call=run)
    parser.add_argument("baseline", metavar="BASELINE[@V]", help="the run to compare with")
    parser.add_argument("candidates", metavar="RUN_URL[@V]", nargs="+", help="runs to judge")
    parser.add_argument(
        "--error", type=fraction, default=0.05, help="the chance of any wrong verdict (%(default)s)"
    )
    parser.add_argument(
        "--among",
        type=at_least(1),
        metavar="N",
        help="how many candidates this baseline is compared with in all (default: those named, "
        "and all forks of its run)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judges each candidate; 0 if one is better, 11 if none is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from deltawire.cli.exit_codes import UNDECIDED
    from deltawire.display import legible, safe_json
    from deltawire.launch.branches.comparison import (
        Scored,
        best_of,
        compare_scores,
        count_tries,
        scored_version,
    )
    from deltawire.launch.branches.version_names import VersionName

    if not 0 < arguments.error < 1:
        raise InputError("--error is a chance above 0 and below 1")

    def scored(text: str) -> tuple[Bucket, Scored]:
        bucket, run, version = VersionName.parse(text).open(trust_of(arguments))
        return bucket, scored_version(bucket, run, version)

    against, baseline = scored(arguments.baseline)
    judged = [(text, *scored(text)) for text in arguments.candidates]
    known = count_tries(against, [bucket.url for _, bucket, _ in judged])
    among = arguments.among or known
    if among < known:
        raise InputError(
            f"--among {among} is below the {known} that are named or are forks of the baseline's "
            "run",
            hint="a fork that was looked at counts, although it is not named now",
        )
    verdicts = [
        compare_scores(baseline, scores, text, error=arguments.error, among=among)
        for text, _, scores in judged
    ]
    best = best_of(verdicts)
    if arguments.json:
        chosen = None if best is None else best.candidate
        print(safe_json({"best": chosen, "among": among, "verdicts": verdicts}))  # noqa: T201
        return 0 if best else UNDECIDED
    table = Table("candidate", "version", "verdict", "difference", "interval", "problems")
    for one in verdicts:
        words: str = one.verdict
        if one.answers_needed is not None:
            words += f", needs about {one.answers_needed} more answers"
        table.add_row(
            Text(legible(one.candidate, 100)),
            str(one.version),
            words,
            f"{one.difference:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}",
            str(one.problems),
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"the error of {arguments.error:g} is divided among {among} candidates")
    return 0 if best else UNDECIDED
