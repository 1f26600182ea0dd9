"""``deltawire attest``: whether weights are those of a reference, and why not."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deltawire.cli.arguments import (
    add_json,
    add_report,
    add_trust,
    report_place,
    seconds,
    trust_of,
)
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED

if TYPE_CHECKING:
    from rich.console import Console

    from deltawire.attest.verdicts import WeightReport
    from deltawire.launch.black_box.judging import BlackBoxReport
    from deltawire.runtime.trusted import ReaderTrust

ERROR = 0.01


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
        help=f"with --black-box: the probability of a wrong verdict of one look ({ERROR})",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="with --black-box: the served model, such as an adapter (default: the first one)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="with --black-box: one sequence a line, text or token ids (default: random tokens)",
    )
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="holds the server's bearer token (default: $DELTAWIRE_TOKEN)",
    )
    parser.add_argument(
        "--prometheus",
        metavar="FILE",
        help="after each look, write what was found into FILE, in the text format of Prometheus",
    )
    add_report(parser, "--watch", "what it finds")
    add_trust(parser)
    add_json(parser)


@dataclass(frozen=True)
class Check:
    """One report: its exit code, what is compared to tell whether it is news, and its printer.

    ``version`` is the reference's in its run; None if it is no version of a run.
    """

    report: WeightReport | BlackBoxReport
    code: int
    stated: object
    show: Callable[[Console], None]
    version: int | None


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; 5 if a tensor differs, 11 if none does and some are not readable. With
    ``--black-box`` 5 stands for different, 11 for cannot tell. With ``--watch`` the code is that of
    the last report, and a look that fails after the first report prints its error."""
    with _announcing(arguments) as announce:
        return _repeat(arguments, announce)


@contextmanager
def _announcing(arguments: argparse.Namespace) -> Iterator[Callable[[Check], None]]:
    """Yields what is told of each look: the run's page, and the file for Prometheus."""
    from deltawire.launch.attest import note_found, write_metrics
    from deltawire.launch.branches.version_names import VersionName
    from deltawire.launch.pull import reporting
    from deltawire.store import open_bucket

    location = VersionName.parse(arguments.against).location
    place = report_place(arguments, location) if arguments.watch is not None else ""
    reporter, stack = None, ExitStack()

    def announce(check: Check) -> None:
        nonlocal reporter
        if place and check.version is not None:
            if reporter is None:
                bucket = open_bucket(location)
                reporter = stack.enter_context(reporting(bucket, place, "attest"))
            note_found(reporter, check.report, check.version)
        if arguments.prometheus:
            write_metrics(arguments.prometheus, check.report)

    with stack:
        yield announce


def _repeat(arguments: argparse.Namespace, announce: Callable[[Check], None]) -> int:
    from deltawire.errors import CorruptError, DeltawireError, RetryError

    last: Check | None = None
    check = checks_of(arguments)
    try:
        while True:
            try:
                latest = check()
            except (RetryError, CorruptError) as error:
                if last is None:
                    raise
                print(error, file=sys.stderr, flush=True)  # noqa: T201
            else:
                if last is None or latest.stated != last.stated:
                    show(latest, as_json=arguments.json)
                first, last = last is None, latest
                try:
                    announce(latest)
                except DeltawireError as error:
                    if first:
                        raise
                    print(error, file=sys.stderr, flush=True)  # noqa: T201
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        if last is None:
            raise
    return last.code


def checks_of(arguments: argparse.Namespace) -> Callable[[], Check]:
    """Returns what looks once; raises `InputError` for options that do not go together."""
    from deltawire.errors import InputError
    from deltawire.launch.tokens import read_token

    trust = trust_of(arguments)
    if arguments.black_box:
        return _black_box(arguments, trust, read_token(arguments.token_file))
    for option in ("error", "model", "prompts"):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option} needs --black-box", hint="give both, or neither")

    from deltawire.launch.attest import KeptReference, attest, print_report

    token, reference = read_token(arguments.token_file), KeptReference(arguments.against, trust)

    def check() -> Check:
        report = attest(arguments.found, reference, arguments.also, trust, token=token)
        code = DIFFERENT if report.differs else 0 if report.equal else UNDECIDED
        return Check(report, code, report, partial(print_report, report), reference.version)

    return check


def _black_box(
    arguments: argparse.Namespace, trust: ReaderTrust, token: str
) -> Callable[[], Check]:
    from deltawire.launch.black_box.checking import BlackBox, BlackBoxOptions, print_black_box

    options = BlackBoxOptions(
        url=arguments.found,
        against=arguments.against,
        also=arguments.also,
        model=arguments.model or "",
        prompts=arguments.prompts or "",
        error=ERROR if arguments.error is None else arguments.error,
        token=token,
    )
    box = BlackBox(options, trust)
    codes = {"same": 0, "different": DIFFERENT, "cannot tell": UNDECIDED}

    def check() -> Check:
        report = box.check()
        # The figures are new at each look, and no news.
        stated = report.reference, report.verdict, report.fits, report.cause
        show = partial(print_black_box, report)
        return Check(report, codes[report.verdict], stated, show, box.version)

    return check


def show(check: Check, *, as_json: bool) -> None:
    """Prints a report."""
    from rich.console import Console

    from deltawire.display import safe_json

    if as_json:
        print(safe_json(check.report), flush=True)  # noqa: T201
    else:
        check.show(Console(highlight=False, soft_wrap=True))
