"""``deltawire completion``: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
FOLDERS = {
    "bash": "~/.local/share/bash-completion/completions/deltawire",
    "zsh": "a folder of $fpath, as _deltawire",
    "fish": "~/.config/fish/completions/deltawire.fish",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    places = "; ".join(f"{shell}: {place}" for shell, place in FOLDERS.items())
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description=f"Write it to where the shell looks for it. {places}.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script, made from the parser itself."""
    import shtab

    from deltawire.cli.main import build_parser

    parser = build_parser()
    commands = next(a.choices for a in parser._actions if isinstance(a.choices, dict))
    for command in commands.values():
        for action in command._actions:
            named = action.metavar if isinstance(action.metavar, str) else ""
            if named.endswith(("FILE", ".toml", ".json")):
                action.complete = shtab.FILE
            elif named in ("DIR", "FOLDER", "URL") or named.endswith("_URL"):
                action.complete = shtab.DIRECTORY
    print(shtab.complete(parser, shell=arguments.shell))  # noqa: T201
    return 0
