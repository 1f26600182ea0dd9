"""Serves Tinker's SDK from a bucket, until a signal comes."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deltawire.errors import InputError
from deltawire.launch.listening import check_port, listening, require_token, tls_context
from deltawire.launch.tokens import TOKEN_VARIABLE
from deltawire.store import open_bucket

KEY_VARIABLE = "TINKER_API_KEY"
"""The variable that Tinker's client takes its key from."""
PACKAGES = {"google": "protobuf", "google.protobuf": "protobuf"}
"""The packages of modules that have another name."""


@dataclass(frozen=True, kw_only=True)
class TinkerLaunch:
    """Where to listen, and what to serve; see `deltawire.tinker.server.TinkerOptions`."""

    model: str
    names: tuple[str, ...] = ()
    parameters: str = "full"
    frozen_head: bool = False
    stable_reinforce: str = ""
    host: str = "127.0.0.1"
    port: int = 8600
    token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    models: int = 4
    samplers: int = 4
    slots: int = 64
    context: int = 2048
    checkpoint_every: int = 16
    ranks: int = 1


def serve_tinker(location: str, launch: TinkerLaunch) -> None:
    """Serves until a signal comes. Raises `InputError` for a bucket or a model that cannot be
    used.
    """
    try:
        import google.protobuf  # noqa: F401
        from aiohttp import web  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"deltawire tinker needs the package {PACKAGES.get(error.name or '', error.name)}",
            hint="pip install 'deltawire[tinker]'",
        ) from error
    from deltawire.tinker.app import TOKEN_STARTS, check_token

    console = Console(stderr=True, highlight=False)
    check_port(launch.port)
    token = require_token(
        console, "token", launch.token_file, TOKEN_VARIABLE, KEY_VARIABLE, prefix=TOKEN_STARTS[0]
    )
    check_token(token)
    if launch.frozen_head and launch.parameters != "lora":
        raise InputError("--frozen-head needs --parameters lora")
    if launch.parameters == "lora":  # Before a client creates a model.
        from deltawire.export.adapter import require_peft

        require_peft()
    asyncio.run(_serve(location, launch, token, console))


async def _serve(location: str, launch: TinkerLaunch, token: str, console: Console) -> None:
    from deltawire.serving.app import build_runner
    from deltawire.tinker.app import build_app
    from deltawire.tinker.samplers import SamplerOptions
    from deltawire.tinker.server import TinkerOptions, TinkerServer

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    context = tls_context(launch.tls_certificate, launch.tls_key)
    directory = Path(launch.model)
    options = TinkerOptions(
        directory=directory,
        names=launch.names,
        lora=launch.parameters == "lora",
        frozen_head=launch.frozen_head,
        stable_reinforce=launch.stable_reinforce,
        models=launch.models,
        checkpoint_every=launch.checkpoint_every,
        ranks=launch.ranks,
        sampling=SamplerOptions(
            engines=launch.samplers,
            slots=launch.slots,
            context=launch.context,
            stability_info=bool(launch.stable_reinforce),
        ),
    )
    server = TinkerServer(open_bucket(location, create=True), options)
    runner = build_runner(build_app(server, token=token))
    async with listening(
        runner,
        host=launch.host,
        port=launch.port,
        context=context,
        console=console,
        name=f"{server.names[0]} to Tinker clients",
    ):
        await stopping.wait()
    print("stopped", file=sys.stderr)  # noqa: T201
