"""Request ids: one for each request, in its answer, in the replica's request and in every log."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

HEADER = "X-Request-Id"
REQUEST_ID: ContextVar[str] = ContextVar("deltawire_request_id", default="")
"""The id of the request that is being answered; empty outside of one."""

_CLIENTS = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def name_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request the id that its client states, or a new one if that is none."""
    stated = request.headers.get(HEADER, "")
    REQUEST_ID.set(stated if _CLIENTS.match(stated) else secrets.token_hex(16))
    return await handler(request)


async def state_request_id(_: web.Request, answer: web.StreamResponse) -> None:
    """Puts the id into an answer's headers, in place of a replica's, by which a client could tell
    replicas, and so versions, apart."""
    answer.headers[HEADER] = REQUEST_ID.get()
