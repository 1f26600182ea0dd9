"""``deltawire bisect``: the version of a run that broke a test."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import (
    add_count,
    add_json,
    add_run_url,
    add_trust,
    fraction,
    trust_of,
)
from deltawire.cli.exit_codes import UNDECIDED
from deltawire.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from deltawire.launch.branches.bisect import Bisected


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "bisect",
        help="find the version that broke a test",
        description="COMMAND gets a directory of a version as its last argument, or in place of "
        "{}. It ends with 0 for a good version, 125 to skip it, 1 to 127 else for a bad one; any "
        "other status stops the search. The same command continues one that was interrupted.",
        usage="deltawire bisect RUN_URL --good N --bad N [options] -- COMMAND …",
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    for option, said in (("--good", "a version that passes"), ("--bad", "a later one that fails")):
        parser.add_argument(
            option, required=True, metavar="N|TAG", help=f"{said}: its number, or its tag"
        )
    parser.add_argument(
        "--noisy", action="store_true", help="the test passes by chance: ask as often as needed"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="give COMMAND the URL of an OpenAI endpoint in place of a directory; its key is "
        "OPENAI_API_KEY",
    )
    parser.add_argument(
        "--error",
        type=fraction,
        default=0.05,
        help="with --noisy: the chance of a wrong culprit to accept (default: 0.05)",
    )
    add_count(parser, "--questions", 2000, "with --noisy: ask at most this often")
    parser.add_argument(
        "--state",
        default="",
        metavar="DIR",
        help="the folder of the journal and the version's files (default: bisect-NAME)",
    )
    add_trust(parser)
    add_json(parser)
    parser.add_argument("words", nargs="+", metavar="COMMAND", help="the test, after --")


def run(arguments: argparse.Namespace) -> int:
    """Searches; 0 if the culprit is found, 11 if there is none that is certain enough."""
    from rich.console import Console

    from deltawire.display import legible, safe_json
    from deltawire.launch.branches.bisect import bisect_run
    from deltawire.launch.branches.journal import BisectSettings
    from deltawire.launch.branches.version_names import version_of
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run

    if not 0 < arguments.error < 0.5:
        raise InputError("--error is a chance above 0 and below 0.5")
    bucket = open_trusted(arguments.run, trust_of(arguments))
    run = read_run(bucket)
    good, bad = (version_of(bucket, run, text) for text in (arguments.good, arguments.bad))
    if good >= bad:
        raise InputError(
            f"--good {good} is not below --bad {bad}", hint="the good version comes first"
        )
    settings = BisectSettings(
        run.id,
        good,
        bad,
        arguments.noisy,
        arguments.words,
        serve=arguments.serve,
    )
    folder = Path(arguments.state or f"bisect-{legible(run.name, 40).replace('/', '-')}")
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    found = bisect_run(
        bucket,
        run,
        settings,
        folder,
        error=arguments.error,
        most=arguments.questions,
        report=lambda answer, count: console.print(
            f"{count}: version {answer.version} ended with {answer.status}"
            + (f" ({answer.error})" if answer.error else "")
        ),
    )
    sys.stderr.flush()
    if arguments.json:
        print(safe_json(found))  # noqa: T201
    else:
        _print(found, Console(highlight=False, soft_wrap=True, markup=False))
    return 0 if found.culprit is not None else UNDECIDED


def _print(found: Bisected, console: Console) -> None:
    if found.culprit is not None:
        console.print(f"version {found.culprit} is the first bad one")
    else:
        console.print(f"no version is certain to be the culprit: {found.reason}")
    if found.rates is not None:
        weight = found.candidates.get(found.culprit or -1)
        certain = "" if weight is None else f"posterior {weight:.3f}; "
        console.print(
            f"{certain}no single culprit {found.no_single:.3f}; pass rate "
            f"{found.rates[0]:.2f} before, {found.rates[1]:.2f} from it on"
        )
    if found.culprit is None and found.candidates:
        likely = ", ".join(
            str(version) + (f" ({weight:.2f})" if found.rates else "")
            for version, weight in list(found.candidates.items())[:10]
        )
        console.print(f"candidates: {likely}")
    console.print(f"{found.questions} questions")
