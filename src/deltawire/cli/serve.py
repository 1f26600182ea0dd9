"""``deltawire serve``: the hot-load contract in front of vLLM servers."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from deltawire.errors import InputError
from deltawire.serving.contract import FleetState
from deltawire.serving.fleet import Fleet
from deltawire.store import Bucket, open_bucket
from deltawire.sync import require_run
from deltawire.wire.run import Run

TOKEN_VARIABLE = "DELTAWIRE_TOKEN"  # noqa: S105 - a variable's name
REPLICA_KEY_VARIABLE = "DELTAWIRE_REPLICA_KEY"
MAX_TOKEN_BYTES = 4096
SAY_EVERY_S = 1.0


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    console = Console(stderr=True, highlight=False)
    for url in arguments.replica:
        if not _is_http(url):
            raise InputError(f"--replica {url} is no http:// or https:// URL")
    if not 0 <= arguments.port <= 65535:
        raise InputError(f"--port {arguments.port} is no port")
    if arguments.drain <= 0:
        raise InputError("--drain must be above 0")
    bucket = open_bucket(arguments.run)
    run = require_run(bucket, public_key=arguments.public_key)
    token = read_token(arguments.token_file)
    if not token:
        token = secrets.token_urlsafe(24)
        console.print(f"token {token}", soft_wrap=True)
    asyncio.run(_serve(arguments, bucket, run, token, console))
    return 0


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def read_token(path: str) -> str:
    """The bearer token from a file or the environment, empty if there is none."""
    if not path:
        return os.environ.get(TOKEN_VARIABLE, "")
    try:
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(f"cannot read the token in {path}: {reason}") from error
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isprintable():
        raise InputError(f"{path} holds no token", hint="one line of printable characters")
    return token


async def _serve(
    arguments: argparse.Namespace, bucket: Bucket, run: Run, token: str, console: Console
) -> None:
    import aiohttp
    from aiohttp import web

    from deltawire.serving.app import build_app
    from deltawire.serving.vllm import VllmReplica

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    key = os.environ.get(REPLICA_KEY_VARIABLE, "")
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        replicas = [VllmReplica(url, session, key=key) for url in arguments.replica]
        fleet = Fleet(
            bucket,
            run,
            replicas,
            transition=arguments.transition,
            drain_s=arguments.drain,
        )
        app = build_app(
            fleet, session, token=token, upstream_key=key, upstream_model=arguments.model
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, arguments.host, arguments.port)
            try:
                await site.start()
            except OSError as error:
                raise InputError(
                    f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}",
                    hint="choose another --port, or --host",
                ) from error
            host, port = runner.addresses[0][:2]
            console.print(f"serving {run.name} on http://{host}:{port}", soft_wrap=True)
            await _say_changes(fleet, stopping, console)
        finally:
            await runner.cleanup()


async def _say_changes(fleet: Fleet, stopping: asyncio.Event, console: Console) -> None:
    """A line for each replica whenever it changes, until told to stop."""
    said: dict[str, str] = {}
    while not stopping.is_set():
        for name, line in _lines(fleet.state()).items():
            if said.get(name) != line:
                console.print(f"{name}: {line}", soft_wrap=True, markup=False)
                said[name] = line
        try:
            await asyncio.wait_for(stopping.wait(), SAY_EVERY_S)
        except TimeoutError:
            continue
    print("stopped", file=sys.stderr)  # noqa: T201


def _lines(state: FleetState) -> dict[str, str]:
    lines = {}
    for replica in state.replicas:
        loading = replica.loading_state
        words = [replica.current_snapshot_identity or "no snapshot", loading.stage]
        if loading.stage == "loading" and loading.target_snapshot_identity:
            words.append(loading.target_snapshot_identity)
        lines[replica.name] = " ".join(words) + (f": {loading.message}" if loading.message else "")
    return lines
