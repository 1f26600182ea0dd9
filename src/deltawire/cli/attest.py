"""``deltawire attest``: whether weights are those of a reference, and why not."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_trust, seconds, trust_of
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED

if TYPE_CHECKING:
    from deltawire.attest.verdicts import WeightReport


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("attest", help="compare weights with a reference by digests")
    parser.set_defaults(call=run)
    parser.add_argument(
        "found",
        metavar="DIR|FILE|URL",
        help="a folder of safetensors files, digests.json, or the URL of a vLLM server",
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
        "--token-file",
        default="",
        metavar="FILE",
        help="holds the server's bearer token (default: $DELTAWIRE_TOKEN)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; 5 if a tensor differs, 11 if none does and some are not readable. With
    ``--watch`` the code is that of the last report, and a look that fails after the first report
    prints its error."""
    from deltawire.errors import CorruptError, RetryError
    from deltawire.launch.attest import KeptReference, attest
    from deltawire.launch.tokens import read_token

    last: WeightReport | None = None
    trust, token = trust_of(arguments), read_token(arguments.token_file)
    try:
        reference = KeptReference(arguments.against, trust)
        while True:
            try:
                report = attest(arguments.found, reference, arguments.also, trust, token=token)
            except (RetryError, CorruptError) as error:
                if last is None:
                    raise
                print(error, file=sys.stderr, flush=True)  # noqa: T201
            else:
                if report != last:
                    show(report, as_json=arguments.json)
                last = report
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        if last is None:
            raise
    if last.differs:
        return DIFFERENT
    return 0 if last.equal else UNDECIDED


def show(report: WeightReport, *, as_json: bool) -> None:
    """Prints a report."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.attest import print_report

    if as_json:
        print(safe_json(report), flush=True)  # noqa: T201
    else:
        print_report(report, Console(highlight=False, soft_wrap=True))
