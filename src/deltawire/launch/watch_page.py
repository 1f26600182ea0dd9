"""Serves the page of ``deltawire watch`` on a loopback port, until a signal comes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted

LOOPBACK = "127.0.0.1"
MAX_RUNS = 32


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where to listen, whether to open a browser, and the folder of the indexes (empty: the
    user's cache)."""

    port: int = 0
    browser: bool = True
    cache: str = ""
    trust: ReaderTrust = ANY


def cache_folder(given: str = "") -> Path:
    """Returns the folder of the indexes of groups."""
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "deltawire" / "watch"


def show_page(locations: Sequence[str], options: PageOptions) -> None:
    """Serves the page of these runs until interrupted, and opens it in a browser.

    The link contains the token of this start. It is printed to standard output, like the page's
    content, for the user who started the command.
    """
    if not 0 <= options.port <= 65535:
        raise InputError(f"--port {options.port} is not a port", hint="use 0 to 65535")
    if len(locations) > MAX_RUNS:
        raise InputError(f"a page shows at most {MAX_RUNS} runs, not {len(locations)}")
    asyncio.run(serve_page(locations, options, _announce(options)))


def _announce(options: PageOptions) -> Callable[[str], None]:
    def announce(link: str) -> None:
        console = Console(highlight=False, soft_wrap=True)
        console.print(link, markup=False, emoji=False)
        if options.browser and sys.stdout.isatty():
            webbrowser.open(link)

    return announce


async def serve_page(
    locations: Sequence[str],
    options: PageOptions,
    announce: Callable[[str], None],
    stopping: asyncio.Event | None = None,
) -> None:
    """Serves until ``stopping`` is set, or without it until a signal comes; ``announce`` gets the
    link.
    """
    from aiohttp import web

    from deltawire.watch.api import WatchedRuns
    from deltawire.watch.run_reader import RunReader
    from deltawire.watch.server import build_app, build_watch_runner

    if stopping is None:
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    folder = cache_folder(options.cache)
    readers = [RunReader(open_trusted(one, options.trust), folder) for one in locations]
    token = secrets.token_urlsafe(24)
    runner = build_watch_runner(build_app(WatchedRuns(readers), token=token))
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, options.port)
        try:
            await site.start()
        except OSError as error:
            raise InputError(
                safe_line(f"cannot listen on port {options.port}: {error.strerror or error}"),
                hint="choose another --port, or 0 for any",
            ) from error
        port = runner.addresses[0][1]
        announce(f"http://{LOOPBACK}:{port}/#token={token}")
        await stopping.wait()
    finally:
        await runner.cleanup()
