"""``deltawire fsck``: whether every version of a run can be read."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.cli.exit_codes import DAMAGED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("fsck", help="check every object and every version of a run")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("--quick", action="store_true", help="check names and sizes, not contents")
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks a run; 0 if every version can be read, 3 if not."""
    from rich.console import Console

    from deltawire.dashboard.versions import print_check
    from deltawire.launch.fsck import check_published
    from deltawire.launch.progress import counting
    from deltawire.runtime.trusted import open_trusted

    bucket = open_trusted(arguments.run, trust_of(arguments))
    with counting(hidden=arguments.json) as show:
        found, lines = check_published(
            bucket,
            deep=not arguments.quick,
            progress=lambda what, done, total: show(f"checking {what}", done, total),
        )
    whole = found.whole and all(one.whole for one in lines.values())
    if arguments.json:
        stated = {name: {**asdict(one), "whole": one.whole} for name, one in lines.items()}
        print(json.dumps({**asdict(found), "lines": stated, "whole": whole}))  # noqa: T201
    else:
        console = Console(highlight=False, soft_wrap=True)
        print_check(found, console)
        for name, one in lines.items():
            console.print(f"line {name}:")
            print_check(one, console)
    return 0 if whole else DAMAGED
