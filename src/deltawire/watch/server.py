"""Serves the page on this machine: static files to anyone, figures only with the token.

The token is generated at each start and given to the browser in the fragment of the URL, which
browsers do not send. The page keeps it in the storage of its origin, which includes the port, and
sends it as a bearer token; a cookie would be sent to every port of this machine. Requests with
another ``Host`` than this machine's loopback names are refused, so that no foreign name can be
pointed here. The page runs no script and loads nothing but the files of ``static/``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from deltawire.bearer import bears
from deltawire.errors import InputError
from deltawire.serving.errors import answer_errors, error_answer
from deltawire.watch.api import RUNS, Handler, WatchedRuns, add_routes

STATIC: Final = Path(__file__).with_name("static")
HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
    "Server": "deltawire",
}
KEEPALIVE_S = 60.0
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_FILES = web.AppKey("files", dict[str, tuple[bytes, str]])


def build_app(runs: WatchedRuns, *, token: str) -> web.Application:
    """Builds the application; it starts and closes ``runs``."""
    app = web.Application(middlewares=[_own_host, answer_errors, _bearer(token)], client_max_size=0)
    app.on_response_prepare.append(_set_headers)
    app[RUNS] = runs
    app[_FILES] = _read_static()
    add_routes(app.router)
    app.router.add_get("/static/{name:[A-Za-z0-9._/-]+}", _static)
    app.router.add_get("/{path:(?!api/|static/).*}", _page)

    async def life(_: web.Application) -> Any:
        runs.start()
        yield
        await asyncio.get_running_loop().run_in_executor(None, runs.close)

    app.cleanup_ctx.append(life)
    return app


def build_watch_runner(app: web.Application) -> web.AppRunner:
    """Returns a runner that logs no requests."""
    return web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=2.0)


def _read_static() -> dict[str, tuple[bytes, str]]:
    return {
        path.relative_to(STATIC).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
        for path in STATIC.rglob("*")
        if path.is_file() and path.suffix in _TYPES
    }


async def _set_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


@web.middleware
async def _own_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests made to another host name that points here. Ports may differ: a tunnel from
    another machine has its own."""
    name = request.headers.get("Host", "").lower()
    if name.rsplit(":", 1)[0] not in HOSTS and name not in HOSTS:
        return error_answer(421, InputError("this server answers on loopback names only"))
    return await handler(request)


def _bearer(token: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if request.path.startswith("/api/") and not bears(given, token):
            return error_answer(
                401,
                InputError(
                    "this page was opened without the token of the server",
                    hint="open the link that deltawire watch printed",
                ),
            )
        return await handler(request)

    return check


async def _static(request: web.Request) -> web.Response:
    return _file(request, request.match_info["name"])


async def _page(request: web.Request) -> web.Response:
    return _file(request, "index.html")


def _file(request: web.Request, name: str) -> web.Response:
    found = request.app[_FILES].get(name)
    if found is None:
        raise web.HTTPNotFound(reason="there is no such file")
    return web.Response(body=found[0], content_type=found[1], charset="utf-8")
