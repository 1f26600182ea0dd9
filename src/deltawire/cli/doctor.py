"""``deltawire doctor``: what this machine and a store can do, and how to fix what is missing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deltawire.cli.arguments import BUCKET, add_json
from deltawire.cli.exit_codes import UNFIT

if TYPE_CHECKING:
    from rich.console import Console

    from deltawire.launch.doctor import Examination, Finding


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "doctor",
        help="examine this machine, its packages and a store, and say how to fix what is missing",
        description=f"The exit code is {UNFIT} if anything is found that will fail, otherwise 0.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("url", nargs="?", default="", metavar="URL", help=f"a bucket: {BUCKET}")
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="run the store suite at URL too, in a scratch prefix that is deleted afterwards",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine, print the findings, and return 0 if there is no problem among them."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.errors import InputError
    from deltawire.launch.doctor import Examination
    from deltawire.store.opening import refuse_credentials

    if arguments.conformance and not arguments.url:
        raise InputError("--conformance needs a URL", hint="name a bucket, or a folder for a try")
    refuse_credentials(arguments.url)
    console = Console(stderr=arguments.json)
    findings = _examine(arguments, console)
    examination = Examination.of(findings, url=arguments.url)
    if arguments.json:
        print(safe_json(examination))  # noqa: T201
    else:
        _show(console, examination)
    return UNFIT if examination.problems else 0


def _examine(arguments: argparse.Namespace, console: Console) -> list[Finding]:
    from deltawire.launch.doctor import (
        examine_conformance,
        examine_machine,
        examine_packages,
        examine_store,
    )

    with console.status("examining this machine") as status:
        findings = [*examine_machine(), *examine_packages()]
        if arguments.url:
            status.update("trying the store")
            findings += examine_store(arguments.url)
        if arguments.conformance:
            findings += examine_conformance(
                arguments.url, lambda name: status.update(name.replace("_", " "))
            )
    return findings


def _show(console: Console, examination: Examination) -> None:
    """Prints a table for each area, then what to do, problems first."""
    from rich.table import Table
    from rich.text import Text

    from deltawire.display import safe_line

    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("PROBLEM", "bold red")}
    for area in dict.fromkeys(one.area for one in examination.findings):
        table = Table("", area, "found", title_justify="left", pad_edge=False)
        for one in examination.findings:
            if one.area == area:
                table.add_row(Text(*marks[one.status]), Text(one.name), Text(safe_line(one.found)))
        console.print(table)
    to_do = [one for one in examination.findings if one.fix]
    for one in sorted(to_do, key=lambda one: one.status != "problem"):
        line = Text.assemble(marks[one.status], f"  {one.name}: {safe_line(one.fix)}")
        console.print(line, soft_wrap=True)
    problems, notes = examination.problems, examination.notes
    console.print(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")
