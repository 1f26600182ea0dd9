"""Writes the page of all commands, from the parser itself."""

from __future__ import annotations

import argparse
import re

from deltawire.cli.bench import benchmark_commands
from deltawire.cli.main import build_parser

OPENING = """# Command line

Every command with its arguments. Tables have `--json` for programs. Errors are one line on standard
error: what happened, where, and what to do.
"""
EXITS = """
## Exit codes

[What each means](TROUBLESHOOTING.md#exit-codes).
"""


def commands_page() -> str:
    """The page, in Markdown."""
    parts = [OPENING]
    for name, parser in commands_of(build_parser()).items():
        parts.append(_section(f"deltawire {name}", parser))
        if name == "bench":
            parts += _benches()
    return "".join([*parts, EXITS])


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _benches() -> list[str]:
    """The benchmarks, which a checkout has."""
    parser = argparse.ArgumentParser(prog="deltawire bench")
    benchmark_commands().add_parsers(parser.add_subparsers())
    return [_section(f"deltawire bench {name}", one) for name, one in commands_of(parser).items()]


def _section(title: str, parser: argparse.ArgumentParser) -> str:
    level = "###" if title.count(" ") > 1 else "##"
    shown = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    lines = [f"\n{level} `{title}`\n", f"\n{_text(parser.description)}\n", f"\n```\n{shown}\n```\n"]
    rows = [_row(one) for one in parser._actions if one.help != argparse.SUPPRESS]
    rows = [row for row in rows if row is not None]
    if rows:
        lines.append("\n| argument | |\n|---|---|\n")
        lines += [f"| {name} | {text} |\n" for name, text in rows]
    return "".join(lines)


def _row(action: argparse.Action) -> tuple[str, str] | None:
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return None
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        metavar = ",".join(map(str, action.choices))
    takes = f" {metavar}" if action.nargs != 0 else ""
    name = ", ".join(f"{option}{takes}" for option in action.option_strings) or metavar
    return f"`{name}`".replace("|", "\\|"), _text(action.help).replace("|", "\\|")


def _text(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split()).replace("<", "&lt;")
