"""``deltawire attest``: whether weights are those of a reference, and why not."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deltawire.cli.arguments import add_json, add_trust, seconds, trust_of
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED

if TYPE_CHECKING:
    from deltawire.attest.verdicts import WeightReport
    from deltawire.launch.black_box.judging import BlackBoxReport


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("attest", help="compare weights with a reference by digests")
    parser.set_defaults(call=run)
    parser.add_argument(
        "found",
        metavar="DIR|FILE|URL",
        help="a folder of safetensors files, digests.json, or the URL of a server",
    )
    parser.add_argument(
        "--against",
        required=True,
        metavar="DIR|FILE|RUN@V",
        help="the reference: a folder, digests.json, or a version of a run",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="DIR|FILE|RUN@V",
        help="other weights that may explain a difference, such as the base; may be repeated",
    )
    parser.add_argument(
        "--watch",
        type=seconds,
        metavar="S",
        help="look again every S seconds, until interrupted; print a report when it changes",
    )
    parser.add_argument(
        "--black-box",
        action="store_true",
        help="ask an endpoint for log-probabilities only, and compare them with the reference's, "
        "computed here from a model directory or a version of a run",
    )
    parser.add_argument(
        "--error",
        type=float,
        default=0.01,
        help="with --black-box: the probability of a wrong verdict of one look (%(default)s)",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="with --black-box: the served model, such as an adapter (default: the first one)",
    )
    parser.add_argument(
        "--prompts",
        default="",
        metavar="FILE",
        help="with --black-box: one sequence a line, text or token ids (default: random tokens)",
    )
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="holds the server's bearer token (default: $DELTAWIRE_TOKEN)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; 5 if a tensor differs, 11 if none does and some are not readable. With
    ``--black-box`` 5 stands for different, 11 for cannot tell. With ``--watch`` the code is that of
    the last report, and a look that fails after the first report prints its error."""
    from deltawire.errors import CorruptError, RetryError

    last: tuple[Any, int] | None = None
    check = checks_of(arguments)
    try:
        while True:
            try:
                report, code = check()
            except (RetryError, CorruptError) as error:
                if last is None:
                    raise
                print(error, file=sys.stderr, flush=True)  # noqa: T201
            else:
                if last is None or _stated(report) != _stated(last[0]):
                    show(report, as_json=arguments.json)
                last = report, code
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        if last is None:
            raise
    return last[1]


def checks_of(arguments: argparse.Namespace) -> Callable[[], tuple[Any, int]]:
    """Returns what looks once, and gives the report and the exit code."""
    from deltawire.launch.tokens import read_token

    trust, token = trust_of(arguments), read_token(arguments.token_file)
    if arguments.black_box:
        from deltawire.launch.black_box.checking import BlackBox, BlackBoxOptions

        box = BlackBox(
            BlackBoxOptions(
                url=arguments.found,
                against=arguments.against,
                also=arguments.also,
                model=arguments.model,
                prompts=arguments.prompts,
                error=arguments.error,
                token=token,
            ),
            trust,
        )
        codes = {"same": 0, "different": DIFFERENT, "cannot tell": UNDECIDED}

        def check_box() -> tuple[BlackBoxReport, int]:
            report = box.check()
            return report, codes[report.verdict]

        return check_box

    from deltawire.launch.attest import KeptReference, attest

    reference = KeptReference(arguments.against, trust)

    def check() -> tuple[WeightReport, int]:
        report = attest(arguments.found, reference, arguments.also, trust, token=token)
        return report, DIFFERENT if report.differs else 0 if report.equal else UNDECIDED

    return check


def _stated(report: Any) -> Any:
    """Returns what makes a report another one: not the figures of a black box, which are new at
    each look."""
    if hasattr(report, "verdict"):
        return report.reference, report.verdict, report.fits, report.cause
    return report


def show(report: Any, *, as_json: bool) -> None:
    """Prints a report."""
    from rich.console import Console

    from deltawire.display import safe_json

    if as_json:
        print(safe_json(report), flush=True)  # noqa: T201
        return
    console = Console(highlight=False, soft_wrap=True)
    if hasattr(report, "verdict"):
        from deltawire.launch.black_box.checking import print_black_box

        print_black_box(report, console)
    else:
        from deltawire.launch.attest import print_report

        print_report(report, console)
