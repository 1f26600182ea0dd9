"""``deltawire replay``: a run's training, repeated and compared bit by bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.cli.exit_codes import DIFFERENT
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("replay", help="repeat a run's training and compare the bits")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    parser.add_argument(
        "--from",
        type=int,
        default=1,
        dest="first",
        metavar="N",
        help="the first version to compare (default: 1)",
    )
    parser.add_argument(
        "--to", type=int, metavar="N", help="the last version to compare (default: the newest)"
    )
    parser.add_argument(
        "--dump", type=int, metavar="N", help="write everything about this version's step to --out"
    )
    parser.add_argument("--out", default="", metavar="DIR", help="the new folder for --dump")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Repeats the steps; 0 if every version has the published bits, 5 if not."""
    from rich.console import Console

    from deltawire.dashboard.verification import print_verification
    from deltawire.launch.progress import counting
    from deltawire.rl.trainer.verify_training import Dump, verify_training
    from deltawire.runtime.trusted import open_trusted

    bucket = open_trusted(arguments.run, trust_of(arguments))
    if (arguments.dump is None) != (not arguments.out):
        raise InputError("--dump and --out go together", hint="give both, or neither")
    dump = None if arguments.dump is None else Dump(arguments.dump, Path(arguments.out))
    with counting(hidden=arguments.json) as show:
        found = verify_training(
            bucket,
            first=arguments.first,
            last=arguments.to,
            dump=dump,
            progress=lambda done, total: show("repeating steps", done, total),
            expect=_print_expectation,
        )
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(found), "exact": found.exact}))  # noqa: T201
    else:
        print_verification(found, Console(highlight=False, soft_wrap=True))
    return 0 if found.exact else DIFFERENT


def _print_expectation(doubts: list[str]) -> None:
    """Says on standard error, before the first step, whether the bits can be expected to agree."""
    from deltawire.display import safe_line

    lines = [f"exactness cannot be expected: {one}" for one in doubts]
    for line in lines or ["exactness is expected: the same library, kernels and threads"]:
        print(safe_line(line), file=sys.stderr)  # noqa: T201
