"""``deltawire status``: how a run stands, from its bucket alone."""

from __future__ import annotations

import argparse
import time

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deltawire.dashboard.status import RunStatus, Watch
from deltawire.dashboard.status_view import view
from deltawire.errors import InputError, RetryError
from deltawire.store import open_bucket

OVER = frozenset({"finished", "stopped"})


def status(arguments: argparse.Namespace) -> int:
    """Show a run once, or with ``--watch`` until it is over or somebody interrupts."""
    for flag, value in (("--window", arguments.window), ("--every", arguments.every)):
        if not 0 < value <= 1e9:
            raise InputError(f"{flag} {value} is not a number of seconds")
    watch = Watch(open_bucket(arguments.run), window_s=arguments.window)
    console = Console()
    if not arguments.watch:
        _print(console, watch.look(), as_json=arguments.json)
        return 0
    if arguments.json or not console.is_terminal:
        _repeat(console, watch, arguments.every, as_json=arguments.json)
    else:
        _screen(console, watch, arguments.every)
    return 0


def _print(console: Console, found: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(found).decode(), flush=True)  # noqa: T201
    else:
        console.print(view(found))


def _repeat(console: Console, watch: Watch, every_s: float, *, as_json: bool) -> None:
    found = watch.look()
    while True:
        _print(console, found, as_json=as_json)
        if found.phase in OVER:
            return
        time.sleep(every_s)
        found = _look_again(watch, found)


def _screen(console: Console, watch: Watch, every_s: float) -> None:
    found = watch.look()
    with Live(view(found), console=console, auto_refresh=False) as live:
        while found.phase not in OVER:
            time.sleep(every_s)
            try:
                found = watch.look()
                live.update(view(found), refresh=True)
            except RetryError as error:
                live.update(Text(f"{error}; trying again", "yellow"), refresh=True)


def _look_again(watch: Watch, before: RunStatus) -> RunStatus:
    """The next look; while the store does not answer, the one before, which says so."""
    try:
        return watch.look()
    except RetryError as error:
        return msgspec.structs.replace(before, problems=[*before.problems[-1:], str(error)])
