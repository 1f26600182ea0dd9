"""Reads the bodies of requests: each within a limit, in time, and all together within a budget.

A body counts from its first byte until its request has been answered, because a replica that is
lost makes room for another one that gets the same body. So does what it becomes: a JSON value of
two bytes takes `VALUE_BYTES` once it is decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

from deltawire.errors import InputError, RetryError

MAX_BODY_BYTES = 64 << 20
BODIES_BYTES = 512 << 20
"""The budget of all clients with a token together."""
BODY_WITHIN_S = 60.0
VALUE_BYTES = 64
"""Memory of a small JSON value: an empty dict of Python."""


class BodyBudget:
    """The bytes that the bodies of all requests may take together.

    Example::

        app[BODIES] = BodyBudget(512 << 20)
        body = await read_body(request)
    """

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit

    def take(self, count: int) -> None:
        """Counts bytes for the request that is handled now, until it has been answered; raises
        `RetryError` if others hold too many, and `InputError` if even an idle server could not hold
        them."""
        taken = _TAKEN.get()
        if taken.get(self, 0) + count > self._limit:
            raise InputError("the request's body takes too much memory", hint="send less of it")
        if self.held + count > self._limit:
            raise RetryError("too many request bodies are under way", hint="try again shortly")
        self.held += count
        taken[self] = taken.get(self, 0) + count


_TAKEN: ContextVar[dict[BodyBudget, int]] = ContextVar("taken")
"""The bytes that the request that is handled now has taken of each budget."""
BODIES = web.AppKey("bodies", BodyBudget)


@web.middleware
async def give_back_bodies(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Gives a request's bytes back to their budgets once it has been answered."""
    taken: dict[BodyBudget, int] = {}
    _TAKEN.set(taken)
    try:
        return await handler(request)
    finally:
        for budget, count in taken.items():
            budget.held -= count


async def read_body(
    request: web.Request, *, limit: int = MAX_BODY_BYTES, budget: BodyBudget | None = None
) -> bytes:
    """Returns a request's body of at most ``limit`` bytes, if it comes within `BODY_WITHIN_S`.

    It counts in ``budget``, or in that of the application if it has one. A compressed body is
    refused: its size is known only once it has been unpacked.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(reason="send the body without Content-Encoding")
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    budget = budget or request.app.get(BODIES)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.content.iter_any():
                if len(data) + len(piece) > limit:
                    raise web.HTTPRequestEntityTooLarge(limit, len(data) + len(piece))
                if budget is not None:
                    budget.take(len(piece))
                data += piece
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    if budget is not None:
        budget.take(VALUE_BYTES * sum(data.count(one) for one in (b",", b"[", b"{")))
    return bytes(data)
