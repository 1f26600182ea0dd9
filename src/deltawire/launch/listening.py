"""Shared by the commands that serve HTTP: tokens, TLS, and the address to listen on."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.launch.tokens import read_token

if TYPE_CHECKING:
    from aiohttp import web


def require_token(console: Console, name: str, path: str, *variables: str, prefix: str = "") -> str:
    """Returns the token in a file or an environment variable, or else a generated one.

    A generated token begins with ``prefix`` and is printed, but only to a terminal: output that
    goes to a file must not contain it. Raises `InputError` if there is no terminal to print it to.
    """
    token = read_token(path, variables[0])
    for variable in variables[1:]:
        token = token or read_token("", variable)
    if not token:
        if not console.is_terminal:
            raise InputError(
                f"there is no {name}, and a generated one would be written to a log",
                hint=f"give --{name.replace(' ', '-')}-file, or set {' or '.join(variables)}",
            )
        token = prefix + secrets.token_urlsafe(24)
        console.print(f"{name} {token}", soft_wrap=True, markup=False, emoji=False)
    return token


def tls_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """Returns a TLS context for a PEM certificate, None without one; raises `InputError`."""
    if not certificate:
        if key:
            raise InputError("--tls-key needs --tls-cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key or None)
    except OSError as error:  # `ssl.SSLError` is one.
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"cannot use --tls-cert {certificate}: {reason}",
            hint="give PEM files: a certificate chain, and its key with --tls-key",
        ) from error
    return context


def check_port(port: int) -> None:
    """Raises `InputError` for a number that is not a port."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is not a port", hint="use 0 to 65535")


@asynccontextmanager
async def listening(
    runner: web.AppRunner,
    *,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    console: Console,
    name: str,
) -> AsyncIterator[str]:
    """Serves an application while the body runs; prints and yields its URL."""
    from aiohttp import web

    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="choose another --port, or --host",
            ) from error
        at, number = runner.addresses[0][:2]
        url = f"{'http' if context is None else 'https'}://{at}:{number}"
        line = safe_line(f"serving {name} on {url}")
        console.print(line, soft_wrap=True, markup=False, emoji=False)
        yield url
    finally:
        await runner.cleanup()
