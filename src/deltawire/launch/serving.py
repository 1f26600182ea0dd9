"""Serves the hot-load contract in front of vLLM servers, until a signal comes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rich.console import Console

from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.launch.listening import check_port, listening, require_token, tls_context
from deltawire.launch.tokens import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.serving.contract import ReplicaSetState
from deltawire.serving.replica_set import ReplicaSet
from deltawire.store import Bucket
from deltawire.sync import require_run
from deltawire.wire.run import Run

REPLICA_KEY_VARIABLE = "DELTAWIRE_REPLICA_KEY"
REPORT_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, and how replicas change versions."""

    replicas: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8400
    token_file: str = ""
    admin_token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    transition: Literal["async", "sync"] = "async"
    drain_s: float = 90.0
    model: str = ""
    trust: ReaderTrust = ANY


def serve_run(location: str, options: ServeOptions) -> None:
    """Serves a run until a signal comes.

    Tokens that were not given are generated and printed, but only to a terminal: output that goes
    to a file must not contain them.
    """
    console = Console(stderr=True, highlight=False)
    for url in options.replicas:
        if not _is_http(url):
            raise InputError(f"--replica {url} is not an http:// or https:// URL")
        if "@" in urlsplit(url).netloc:
            raise InputError(
                f"--replica {urlsplit(url).hostname}: the URL contains credentials",
                hint=f"put the replicas' key into {REPLICA_KEY_VARIABLE}",
            )
    check_port(options.port)
    if options.drain_s <= 0:
        raise InputError("--drain must be above 0")
    bucket = open_trusted(location, options.trust)
    run = require_run(bucket)
    token = require_token(console, "token", options.token_file, TOKEN_VARIABLE)
    admin = require_token(console, "admin token", options.admin_token_file, ADMIN_TOKEN_VARIABLE)
    if token == admin:
        raise InputError(
            "the token and the admin token are equal",
            hint="clients that only sample must not be able to change the weights",
        )
    asyncio.run(_serve(options, bucket, run, (token, admin), console))


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


async def _serve(
    options: ServeOptions, bucket: Bucket, run: Run, tokens: tuple[str, str], console: Console
) -> None:
    import aiohttp

    from deltawire.serving.app import build_app, build_runner
    from deltawire.serving.vllm import VllmReplica

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    key = os.environ.get(REPLICA_KEY_VARIABLE, "")
    context = tls_context(options.tls_certificate, options.tls_key)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        replicas = ReplicaSet(
            bucket,
            run,
            [VllmReplica(url, session, key=key) for url in options.replicas],
            transition=options.transition,
            drain_s=options.drain_s,
        )
        app = build_app(
            replicas,
            session,
            token=tokens[0],
            admin_token=tokens[1],
            upstream_key=key,
            upstream_model=options.model,
        )
        runner = build_runner(app)
        async with listening(
            runner,
            host=options.host,
            port=options.port,
            context=context,
            console=console,
            name=run.name,
        ):
            await _report_changes(replicas, stopping, console)


async def _report_changes(replicas: ReplicaSet, stopping: asyncio.Event, console: Console) -> None:
    """Prints a line for each replica that changed, until ``stopping`` is set."""
    printed: dict[str, str] = {}
    while not stopping.is_set():
        for name, line in _lines(replicas.state()).items():
            if printed.get(name) != line:
                console.print(
                    safe_line(f"{name}: {line}"), soft_wrap=True, markup=False, emoji=False
                )
                printed[name] = line
        try:
            await asyncio.wait_for(stopping.wait(), REPORT_EVERY_S)
        except TimeoutError:
            continue
    print("stopped", file=sys.stderr)  # noqa: T201


def _lines(state: ReplicaSetState) -> dict[str, str]:
    lines = {}
    for replica in state.replicas:
        loading = replica.loading_state
        words = [replica.current_snapshot_identity or "no snapshot", loading.stage]
        if loading.stage == "loading" and loading.target_snapshot_identity:
            words.append(loading.target_snapshot_identity)
        lines[replica.name] = " ".join(words) + (f": {loading.message}" if loading.message else "")
    return lines
