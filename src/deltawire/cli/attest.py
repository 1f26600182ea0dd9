"""``deltawire attest``: whether weights are those of a reference, and why not."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_trust, trust_of
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("attest", help="compare weights with a reference by digests")
    parser.set_defaults(call=run)
    parser.add_argument(
        "found", metavar="DIR|FILE", help="a folder of safetensors files, or digests.json"
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
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; 5 if a tensor differs, 11 if none does and some are not readable."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.attest import attest, print_report

    report = attest(arguments.found, arguments.against, arguments.also, trust_of(arguments))
    if arguments.json:
        print(safe_json(report))  # noqa: T201
    else:
        print_report(report, Console(highlight=False, soft_wrap=True))
    if report.differs:
        return DIFFERENT
    return 0 if report.equal else UNDECIDED
