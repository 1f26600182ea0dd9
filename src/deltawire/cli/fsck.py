"""``deltawire fsck``: whether every version of a run can be read."""

from __future__ import annotations

import argparse
import dataclasses
import json

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
    from deltawire.launch.progress import counting
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync.maintain.fsck import check_run

    bucket = open_trusted(arguments.run, trust_of(arguments))
    with counting(hidden=arguments.json) as show:
        found = check_run(
            bucket,
            deep=not arguments.quick,
            progress=lambda what, done, total: show(f"checking {what}", done, total),
        )
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(found), "whole": found.whole}))  # noqa: T201
    else:
        print_check(found, Console(highlight=False, soft_wrap=True))
    return 0 if found.whole else DAMAGED
