"""Prints a run's status, once or until the run is over."""

from __future__ import annotations

import time

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deltawire.dashboard.status import RunStatus, Watch
from deltawire.dashboard.status_view import view
from deltawire.display import safe_json
from deltawire.errors import InputError, RetryError
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import without_retries

OVER = frozenset({"finished", "stopped"})


def show_status(
    location: str,
    *,
    watch: bool,
    every_s: float,
    window_s: float,
    as_json: bool,
    trust: ReaderTrust = ANY,
) -> None:
    """Prints a run's status; with ``watch`` again and again until the run is over."""
    for flag, value in (("--window", window_s), ("--every", every_s)):
        if not 0 < value <= 1e9:
            raise InputError(f"{flag} {value} is not a number of seconds above 0")
    bucket = open_trusted(location, trust)
    # A view that is renewed shows that the store does not answer instead of waiting for it.
    once = without_retries(bucket) if watch else bucket
    source = Watch(once, window_s=window_s, retrying=bucket if watch else None)
    console = Console()
    if not watch:
        _print(console, source.poll(), as_json=as_json)
    elif as_json or not console.is_terminal:
        _repeat(console, source, every_s, as_json=as_json)
    else:
        _screen(console, source, every_s)


def _print(console: Console, found: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(safe_json(found), flush=True)  # noqa: T201
    else:
        console.print(view(found))


def _repeat(console: Console, source: Watch, every_s: float, *, as_json: bool) -> None:
    found = source.poll()
    while True:
        _print(console, found, as_json=as_json)
        if found.phase in OVER:
            return
        time.sleep(every_s)
        found = _read_again(source, found)


def _screen(console: Console, source: Watch, every_s: float) -> None:
    found = source.poll()
    with Live(view(found), console=console, auto_refresh=False) as live:
        while found.phase not in OVER:
            time.sleep(every_s)
            try:
                found = source.poll()
                live.update(view(found), refresh=True)
            except RetryError as error:
                live.update(Text(f"{error}; trying again", "yellow"), refresh=True)


def _read_again(source: Watch, before: RunStatus) -> RunStatus:
    """Reads the status; while the store does not answer, returns the last one with the error."""
    try:
        return source.poll()
    except RetryError as error:
        return msgspec.structs.replace(before, problems=[*before.problems[-1:], str(error)])
