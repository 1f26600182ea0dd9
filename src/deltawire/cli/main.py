"""The ``deltawire`` command: its parser, and how its errors end."""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO

from deltawire.builds import build_name
from deltawire.cli import COMMANDS, GROUPS
from deltawire.cli.exit_codes import INTERRUPTED, IO_FAILED, NOT_READ
from deltawire.display import safe_line
from deltawire.errors import DeltawireError
from deltawire.runtime.memory import explaining_memory

_EXTRA_OF = {
    "aiohttp": "serve",
    "cryptography": "sign",
    "in_toto": "prove",
    "prometheus_client": "metrics",
    "pyarrow": "data",
    "tensorboardX": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The extra that brings a module; all others come with ``rl``."""


class _CommandParser(argparse.ArgumentParser):
    """A parser whose errors repeat neither control sequences nor credentials."""

    def error(self, message: str) -> NoReturn:
        super().error(safe_line(message))


class _GroupedParser(_CommandParser):
    """The parser of all commands, whose help lists them by `GROUPS`."""

    def format_help(self) -> str:
        listed = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        shown = {_command_name(one.dest): one for one in listed._choices_actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, names in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments(
                shown[one] for name in names if (one := _command_name(name)) in shown
            )
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(self._optionals._group_actions)
        formatter.end_section()
        return formatter.format_help()


def _command_name(module: str) -> str:
    """Returns the name of the command that a module of this package declares."""
    return module.strip("_").replace("_", "-")


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Builds the parser of all commands, or only of ``command`` if there is one of that name.

    One command's parser is built in a third of the time. A test freezes all options.
    """
    parser = _GroupedParser(
        prog="deltawire",
        description="Reinforcement learning of language models over an object-store bucket.",
    )
    parser.add_argument("--version", action="version", version=f"deltawire {build_name()}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    names = [name for name in COMMANDS if command == _command_name(name)]
    for name in names or COMMANDS:
        import_module(f"deltawire.cli.{name}").add_parser(commands)
    for action in commands._choices_actions:  # repeated in the command's own --help
        parser_of_command = commands.choices[action.dest]
        parser_of_command.description = " ".join(
            filter(None, (_sentence(action.help), parser_of_command.description))
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. An error ends as one line on standard error."""
    supervised = False
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        arguments = build_parser(words[0] if words else "").parse_args(words)
        arguments.argv = words
        supervised = getattr(arguments, "supervised", False)
        name = str(getattr(arguments, "id", "") or arguments.command)
        with explaining_memory(name, arguments.command):
            code = int(arguments.call(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except DeltawireError as error:
        return _end(f"error: {error}", error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "deltawire":
            raise
        extra = _EXTRA_OF.get((error.name or "").split(".")[0], "rl")
        return _end(f"error: this command needs {error.name}; install deltawire[{extra}]", 2)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _unread():
            _into_nothing(sys.stdout)
            return NOT_READ
        _give_up_output()
        if supervised:  # It will be restarted, and its log should show the cause.
            raise
        return _end(f"error: {_refusal(error)}", IO_FAILED)


def _refusal(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{place}{error.strerror or error}{hint}"


def _unread() -> bool:
    """Returns whether the reader of standard output has closed it."""
    if sys.stdout is None or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _give_up_output() -> None:
    """Drops what standard output did not accept, so that its end raises no second error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _into_nothing(sys.stdout)


def _end(line: str, code: int) -> int:
    """Prints a last line if possible, and returns the code in any case: a supervisor relies on it,
    even one whose disk is full."""
    try:
        print(safe_line(line), file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        _into_nothing(sys.stderr)
    return code


def _into_nothing(stream: TextIO) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, stream.fileno())
    finally:
        os.close(nothing)
