"""Serves a run with the embedded engine, as a replica of a gateway, until a signal comes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from rich.console import Console

from deltawire.launch.gateway import REPLICA_KEY_VARIABLE
from deltawire.launch.listening import check_port, listening, require_token
from deltawire.launch.processes import pin, stay_off_the_hub
from deltawire.runtime.imports import importing
from deltawire.runtime.process import Process
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Where to listen, what to trust, and whether to stay at the version of the start."""

    host: str = "127.0.0.1"
    port: int = 8001
    token_file: str = ""
    hold: bool = False
    cpus: str = ""
    trust: ReaderTrust = ANY


def serve_replica(location: str, options: ReplicaOptions) -> None:
    """Serves until a signal comes. Raises `InputError` for a run that cannot be served."""
    console = Console(stderr=True, highlight=False)
    check_port(options.port)
    token = require_token(console, "token", options.token_file, REPLICA_KEY_VARIABLE)
    stay_off_the_hub()
    pin(options.cpus)
    bucket = open_trusted(location, options.trust)
    # It holds no lease and writes nothing: any number of replicas may have this name.
    process = Process(bucket, "replica", "worker", supervised=False)
    with process.handling_signals():
        asyncio.run(_serve(process, options, token, console))


async def _serve(process: Process, options: ReplicaOptions, token: str, console: Console) -> None:
    with importing():
        from deltawire.live.gateway.embedded_replica import open_replica
        from deltawire.serving.app import build_runner

    replica = await asyncio.to_thread(open_replica, process, token=token, hold=options.hold)
    async with listening(
        build_runner(replica.app()),
        host=options.host,
        port=options.port,
        context=None,
        console=console,
        name=process.bucket.url,
    ):
        await replica.serve()
    print("stopped", file=sys.stderr)  # noqa: T201
