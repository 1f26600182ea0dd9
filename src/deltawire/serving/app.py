"""Serves a replica set over HTTP: the hot-load contract and the OpenAI-compatible endpoints.

::

    POST, GET   /hot_load/v1/models/hot_load              admin     load a snapshot; replica states
    GET, DELETE /v1/accounts/{a}/deployments/{d}/ledger   admin     past requests; clear them
    POST        /v1/chat/completions, /v1/completions     sampling  proxied to a replica
    GET         /v1/models                                sampling  proxied to a replica
    GET         /health                                   none      200 once every replica is ready
    GET         /livez                                    none      200 while this process answers
    GET         /readyz                                   none      200 while a replica answers

The proxied paths are also served below ``/inference``. Nothing else reaches a replica: it has calls
that load weights, and it trusts the key that this server adds.

A handler says which token it needs (`needs`); one that says nothing needs the sampling token, as do
paths that do not exist. The admin token is accepted wherever the sampling token is. A client that
disconnects cancels its request at the replica. A request that a replica fails, before the client
got any of its answer, is tried once on another one. Clients have `HEADER_WITHIN_S` to send a
request's head, `deltawire.serving.bodies.BODY_WITHIN_S` for its body, and `WRITE_WITHIN_S` to take
each piece of the answer; replicas have `CallLimits`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from deltawire.bearer import bears
from deltawire.errors import InputError, RetryError
from deltawire.serving.bodies import (
    BODIES,
    BODIES_BYTES,
    BodyBudget,
    give_back_bodies,
    read_body,
)
from deltawire.serving.client_keys import CLIENT, ClientKeys
from deltawire.serving.contract import read_request
from deltawire.serving.errors import (
    SERVER_ERROR,
    ClientGoneError,
    Handler,
    answer_errors,
    error_answer,
)
from deltawire.serving.replica_set import ReplicaSet, TrackedReplica
from deltawire.serving.request_ids import HEADER, REQUEST_ID, name_request, state_request_id
from deltawire.serving.tracing import Traces, open_traces

BUSY = 425
"""The hosted services' status for new requests while all replicas drain to change weights."""
NOT_IMPLEMENTED = 501
"""The request's own failure: another replica would not answer it either."""

HEADER_WITHIN_S = 30.0
"""Also how long a connection may stay idle between two requests."""
WRITE_WITHIN_S = 60.0
SMALL = 16 << 10
"""Bytes of a write that needs no timer if nothing waits before it."""

_LOG = logging.getLogger("deltawire.serving")

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity")
SNAPSHOT_HEADER = "x-deltawire-snapshot"
PREFIXES = ("", "/inference")
ANSWERS = ("/v1/chat/completions", "/v1/completions")
"""Paths whose answers a model draws; with `MODELS` they are all that reaches a replica."""
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
_AT_REPLICA = {RESPONSES: "/v1/chat/completions"}
"""Paths that a replica serves under another one."""

RETURNED_HEADERS = ("Content-Type", "Cache-Control")

REPLICAS = web.AppKey("replicas", ReplicaSet)
SESSION = web.AppKey("session", aiohttp.ClientSession)
MODEL = web.AppKey("model", str)


@dataclass(frozen=True)
class CallLimits:
    """Seconds that a replica may take: to accept a connection, to a stream's first piece, from one
    piece to the next, and to the end of an answer in one piece."""

    connect_s: float = 10.0
    first_s: float = 60.0
    silence_s: float = 60.0
    whole_s: float = 600.0


LIMITS = web.AppKey("limits", CallLimits)
TRACES = web.AppKey[Traces | None]("traces")


class Tokens:
    """The token that permits sampling and the one that permits everything; `replace` changes them
    while the server runs. Raises `InputError` for tokens that are equal or empty."""

    def __init__(self, sampling: str, admin: str) -> None:
        self.replace(sampling, admin)

    def replace(self, sampling: str, admin: str) -> None:
        """Takes these tokens from the next request on; those before are refused then."""
        if not sampling or not admin or sampling == admin:
            raise InputError(
                "the server needs two different tokens",
                hint="one for sampling, one for hot-loading: clients that only sample must not be "
                "able to change the weights",
            )
        self.sampling, self.admin = sampling, admin


TOKENS = web.AppKey("tokens", Tokens)
CLIENTS = web.AppKey("clients", ClientKeys)


class UnansweredError(Exception):
    """A replica failed before the client got anything, and another one is to get the request."""


class Tries:
    """Counts how the replicas fail or answer one request, each of them once.

    A status that two replicas answer is the request's own failure and counts for neither. Paths
    other than `ANSWERS` count for nothing: a replica whose model fails may still list it.
    """

    def __init__(self, request: web.Request) -> None:
        self.may_retry = False
        """Another replica gets the request if this one fails before the client got anything."""
        self._replicas = request.app[REPLICAS]
        self._counts = path_of(request) in ANSWERS
        self._failed: tuple[TrackedReplica, int] | None = None
        self._is_counted = False

    def answered(self, member: TrackedReplica, status: int) -> None:
        """Counts an answer of a replica by its status; raises `UnansweredError` if it failed and
        another one is to get the request."""
        if status >= SERVER_ERROR and status != NOT_IMPLEMENTED:
            self.failed(member, status)
        else:
            self._count(member, ok=True)

    def failed(self, member: TrackedReplica, status: int = 0) -> None:
        """Counts that a replica failed, by a status or without one; raises `UnansweredError` if
        another one is to get the request."""
        if self.may_retry and not self._is_counted:
            self._failed = member, status
            raise UnansweredError
        if status and self._failed is not None and self._failed[1] == status:
            self._failed, self._is_counted = None, True
        self._count(member, ok=False)

    def close(self) -> None:
        """Counts the failure of the first replica, if nothing was heard of another one."""
        if self._failed is not None and self._counts:
            self._replicas.report(self._failed[0], ok=False)
        self._failed = None

    def _count(self, member: TrackedReplica, *, ok: bool) -> None:
        self.close()
        if self._counts and not self._is_counted:
            self._replicas.report(member, ok=ok)
        self._is_counted = True


ANSWER = web.AppKey[Handler]("answer")
"""The handler of the paths in `ANSWERS`; replace it to do more than to proxy them."""
LIST = web.AppKey[Handler]("list")
"""The handler of `MODELS`, likewise."""
Exchange = Callable[[web.Request, TrackedReplica, bytes, Tries], Awaitable[web.StreamResponse]]
"""Sends a request's body to a replica, and its answer to the client."""
Access = Literal["none", "sampling", "admin", "signature"]
WARNINGS = web.AppKey[Callable[[], list[str]]]("warnings")
"""Words for a person who asks if the server is ready; everybody can read them."""
H = TypeVar("H", bound=Callable[..., Any])


def needs(access: Access) -> Callable[[H], H]:
    """Marks a handler with who may call it: everybody (``none``), holders of a token, or whoever
        signs the request (``signature``), which the handler checks itself.

        Example::

            @needs("admin")
            @needs("admin")
    async def _state(request: web.Request) -> web.StreamResponse: ...
    """

    def mark(handler: H) -> H:
        vars(handler)["access"] = access
        return handler

    return mark


def build_session() -> aiohttp.ClientSession:
    """Returns a session for calls of other servers; the caller closes it. Streams stay open for
    long, so it has no limit of connections: aiohttp's own would have the 101st request wait."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)


def build_app(
    replicas: ReplicaSet,
    session: aiohttp.ClientSession,
    *,
    token: str,
    admin_token: str,
    upstream_model: str = "",
    limits: CallLimits | None = None,
    clients: ClientKeys | None = None,
) -> web.Application:
    """Builds the application for ``replicas``, which it starts and closes; serve it with
    `build_runner`.

    ``token`` permits sampling, ``admin_token`` everything. ``session`` reaches the
    replicas. ``upstream_model`` replaces each request's ``model``, so that clients may name a
    deployment as at the hosted services. ``clients`` may sample too, each by its own key.
    """
    app = web.Application(
        middlewares=[name_request, give_back_bodies, answer_errors, _check_bearer]
    )
    app.on_response_prepare.append(state_request_id)
    app[TRACES] = traces = open_traces()
    if traces is not None:
        app.middlewares.insert(1, traces.trace_request)
    app[BODIES] = BodyBudget(BODIES_BYTES)
    app[REPLICAS], app[SESSION], app[LIMITS] = replicas, session, limits or CallLimits()
    app[TOKENS], app[CLIENTS] = Tokens(token, admin_token), clients or ClientKeys()
    app[MODEL], app[ANSWER] = upstream_model, _proxy
    app[LIST] = _proxy
    app[WARNINGS] = list
    app.router.add_post("/hot_load/v1/models/hot_load", _hot_load)
    app.router.add_get("/hot_load/v1/models/hot_load", _state)
    ledger = "/v1/accounts/{account}/deployments/{deployment}/ledger"
    app.router.add_get(ledger, _ledger)
    app.router.add_delete(ledger, _forget)
    app.router.add_get("/health", _health)
    app.router.add_get("/livez", _live)
    app.router.add_get("/readyz", _ready)
    for prefix in PREFIXES:
        for path in ANSWERS:
            app.router.add_post(prefix + path, _answer)
        app.router.add_get(prefix + MODELS, _list, allow_head=False)

    async def life(_: web.Application) -> Any:
        replicas.start()
        yield
        await replicas.close()

    app.cleanup_ctx.append(life)
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """Returns a runner that cancels the requests of clients that disconnect, closes idle
    connections, and logs neither requests nor tracebacks."""
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=HEADER_WITHIN_S,
        auto_decompress=False,
        lingering_time=1.0,  # How long the rest of a refused body is read.
        logger=_OneLineLogger("deltawire.serving.http"),
    )


class _OneLineLogger(logging.Logger):
    """Logs an exception's type only: its message and its traceback may contain a request."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parent = _LOG

    def handle(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg, record.args = "request failed: %s", (record.exc_info[0].__name__,)
        record.exc_info = record.exc_text = record.stack_info = None
        super().handle(record)


@web.middleware
async def _check_bearer(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[TOKENS].sampling
    header = request.headers.get("Authorization", "")
    CLIENT.set(request.app[CLIENTS].name_of(header))
    is_client = bears(header, token) or bool(CLIENT.get())
    # That of the route, and so also of a path that is spelled in another way.
    access: Access = getattr(request.match_info.handler, "access", "sampling")
    if access in ("sampling", "admin"):
        admin = is_admin(request)
        if not (admin or is_client):
            return error_answer(401, InputError("this is not a valid bearer token"))
        if access == "admin" and not admin:
            return error_answer(403, InputError("this call needs the admin token"))
    return await handler(request)


@needs("admin")
async def _hot_load(request: web.Request) -> web.StreamResponse:
    return json_answer(await request.app[REPLICAS].hot_load(read_request(await read_body(request))))


@needs("admin")
async def _state(request: web.Request) -> web.StreamResponse:
    return json_answer(request.app[REPLICAS].state())


@needs("admin")
async def _ledger(request: web.Request) -> web.StreamResponse:
    return json_answer({"snapshots": list(request.app[REPLICAS].ledger.values())})


@needs("admin")
async def _forget(request: web.Request) -> web.StreamResponse:
    request.app[REPLICAS].forget()
    return json_answer({})


@needs("none")
async def _health(request: web.Request) -> web.StreamResponse:
    ready = request.app[REPLICAS].ready
    return web.json_response({"ready": ready}, status=200 if ready else 503)


@needs("none")
async def _live(_: web.Request) -> web.StreamResponse:
    return web.json_response({"live": True})


@needs("none")
async def _ready(request: web.Request) -> web.StreamResponse:
    ready = request.app[REPLICAS].takes_requests
    body = {"ready": ready, "warnings": request.app[WARNINGS]()}
    return web.json_response(body, status=200 if ready else 503)


async def _answer(request: web.Request) -> web.StreamResponse:
    return await request.app[ANSWER](request)


async def _list(request: web.Request) -> web.StreamResponse:
    return await request.app[LIST](request)


async def _proxy(request: web.Request) -> web.StreamResponse:
    """Proxies a request to a replica, and streams the answer back."""
    body = with_model(await read_body(request), request.app[MODEL])
    exchange = partial(_exchange, stream=is_stream(body))
    return await to_replica(request, body, exchange, session=session_of(request))


def session_of(request: web.Request) -> str:
    """Returns the session that a request names; empty if it names none."""
    return next((request.headers[h] for h in SESSION_HEADERS if h in request.headers), "")


def route_of(request: web.Request) -> str:
    """Returns the path of a request's route, however a client spells it."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical.removeprefix("/inference")


def path_of(request: web.Request) -> str:
    """Returns the path of a proxied request at the replica."""
    route = route_of(request)
    return _AT_REPLICA.get(route, route)


async def to_replica(
    request: web.Request,
    body: bytes,
    exchange: Exchange,
    *,
    session: str = "",
    version: int | None = None,
) -> web.StreamResponse:
    """Gives a request to the replica of its session, or to the least busy one; to one that holds
    ``version``, if there is any. Where a replica cannot be reached, another one gets it; where one
    fails before the client got anything, one other, unless the request is the cause (501)."""
    replicas, tries = request.app[REPLICAS], Tries(request)
    tried: list[TrackedReplica] = []
    try:
        while (member := replicas.pick(session, version=version, without=tried)) is not None:
            others = replicas.pick(session, version=version, without=[*tried, member])
            tries.may_retry = not tried and others is not None
            replicas.begin(member)
            try:
                return await exchange(request, member, body, tries)
            except aiohttp.ClientConnectorError:
                replicas.lost(member)  # It never saw the request, so another may have it.
            except UnansweredError:
                tried.append(member)
            finally:
                replicas.end(member)
    finally:
        tries.close()
    code = BUSY if replicas.draining else 503
    return error_answer(code, RetryError("no replica takes requests now", hint="try again shortly"))


async def _pieces_of(
    upstream: aiohttp.ClientResponse, deadline: float, silence_s: float | None
) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    while True:
        async with asyncio.timeout_at(deadline):
            piece = await upstream.content.readany()
        if not piece:
            return
        yield piece
        if silence_s is not None:
            deadline = clock() + silence_s


def is_stream(body: bytes) -> bool:
    """Returns whether a request asks for a stream."""
    try:
        content = msgspec.json.decode(body) if b'"stream"' in body else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return isinstance(content, dict) and bool(content.get("stream"))


@asynccontextmanager
async def call_replica(
    request: web.Request, member: TrackedReplica, body: bytes, *, stream: bool
) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]]]:
    """Calls a replica; yields its response, and the pieces of its answer as they arrive.

    Raises `TimeoutError` where a stream's first piece, its headers included, or a later one takes
    too long, or the whole of an answer that is no stream.
    """
    app = request.app
    limits = app[LIMITS]
    within_s = limits.first_s if stream else limits.whole_s
    deadline = asyncio.get_running_loop().time() + within_s
    # The client's own type of content is not passed on: servers differ in which they refuse.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    headers[HEADER] = REQUEST_ID.get()
    headers |= member.replica.headers
    traces, own = app.get(TRACES), not member.replica.upstream
    name = member.replica.name
    with nullcontext() if traces is None else traces.call(name, headers, own=own):
        async with asyncio.timeout_at(deadline):
            upstream = await app[SESSION].request(
                request.method,
                member.replica.url(path_of(request)),
                params=request.query if own else None,
                data=body or None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s),
                allow_redirects=False,
            )
        async with upstream:
            yield upstream, _pieces_of(upstream, deadline, limits.silence_s if stream else None)


def is_admin(request: web.Request) -> bool:
    """Returns whether a request has the admin token. Only then may its answer say which version it
    is from: users who can read that can vote on it."""
    return bears(request.headers.get("Authorization", ""), request.app[TOKENS].admin)


def headers_for(
    request: web.Request, member: TrackedReplica, upstream: aiohttp.ClientResponse
) -> dict[str, str]:
    """Returns the headers of an answer to the client, with the snapshot's name if the request has
    the admin token."""
    found = {name: upstream.headers[name] for name in RETURNED_HEADERS if name in upstream.headers}
    if is_admin(request):
        found[SNAPSHOT_HEADER] = request.app[REPLICAS].identity_at(member)
    return found


def break_off(
    request: web.Request,
    member: TrackedReplica,
    answer: web.StreamResponse | None,
    error: Exception,
) -> web.StreamResponse:
    """Ends an answer whose replica failed: by a broken stream if its status is sent already, which
    only shows that the answer is incomplete; else by raising `RetryError`."""
    if answer is not None and answer.prepared:
        if request.transport is not None:
            request.transport.abort()
        return answer
    _LOG.warning("replica %s does not answer: %s", member.replica.name, type(error).__name__)
    raise RetryError(f"the replica does not answer: {type(error).__name__}") from error


async def _exchange(
    request: web.Request, member: TrackedReplica, body: bytes, tries: Tries, *, stream: bool
) -> web.StreamResponse:
    answer: web.StreamResponse | None = None
    try:
        async with call_replica(request, member, body, stream=stream) as (upstream, pieces):
            if upstream.status >= SERVER_ERROR:
                tries.answered(member, upstream.status)
            first = await anext(pieces, b"")
            passed = headers_for(request, member, upstream)
            answer = web.StreamResponse(status=upstream.status, headers=passed)
            await answer.prepare(request)
            await write_to_client(request, answer, first)
            async for chunk in pieces:
                await write_to_client(request, answer, chunk)
            await answer.write_eof()
            if upstream.status < SERVER_ERROR:
                tries.answered(member, upstream.status)
            return answer
    except aiohttp.ClientConnectorError:
        raise
    except ClientGoneError as error:
        return break_off(request, member, answer, error)
    except (aiohttp.ClientError, TimeoutError) as error:
        if request.transport is not None and not request.transport.is_closing():
            tries.may_retry &= answer is None
            tries.failed(member)
        return break_off(request, member, answer, error)


async def write_to_client(request: web.Request, answer: web.StreamResponse, data: bytes) -> None:
    """Writes a part of an answer; raises `ClientGoneError` if the client closed the connection, or
    did not take it within `WRITE_WITHIN_S`."""
    transport = request.transport
    try:
        if transport is not None and len(data) < SMALL and not transport.get_write_buffer_size():
            await answer.write(data)  # The client took everything before: this does not wait.
            return
        async with asyncio.timeout(WRITE_WITHIN_S):
            await answer.write(data)
    except (TimeoutError, ConnectionError) as error:
        raise ClientGoneError from error


def with_model(body: bytes, model: str) -> bytes:
    """Returns the body with the replica's own name for its model."""
    if not model or not body:
        return body
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body  # The replica explains better what is wrong with it.
    if not isinstance(content, dict) or "model" not in content:
        return body
    return json.dumps({**content, "model": model}).encode()


def json_answer(value: Any) -> web.Response:
    """Returns a JSON answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
