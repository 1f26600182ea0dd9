"""The HTTP face of a fleet: the hot-load contract, and the OpenAI-compatible endpoints behind it.

::

    POST, GET   /hot_load/v1/models/hot_load                  load a snapshot; how replicas stand
    GET, DELETE /v1/accounts/{a}/deployments/{d}/ledger       what was asked for; forget it
    any         /v1/…, /inference/v1/…                        passed on to a replica, streams too
    GET         /health                                       200 once every replica is ready

Everything but ``/health`` wants the bearer token.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.serving.contract import read_request
from deltawire.serving.replica_set import ReplicaSet, TrackedReplica

MAX_BODY_BYTES = 64 << 20
BUSY = 425
"""What the hosted services answer a newcomer while weights change and all replicas drain."""

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity")
SNAPSHOT_HEADER = "x-deltawire-snapshot"

_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9@:._~-]+\Z")
_RETURNED_HEADERS = ("Content-Type", "Cache-Control", "X-Request-Id")

_REPLICAS = web.AppKey("fleet", ReplicaSet)
_SESSION = web.AppKey("session", aiohttp.ClientSession)
_KEY = web.AppKey("key", str)
_MODEL = web.AppKey("model", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    fleet: ReplicaSet,
    session: aiohttp.ClientSession,
    *,
    token: str,
    upstream_key: str = "",
    upstream_model: str = "",
) -> web.Application:
    """The application for ``fleet``, which it starts and closes.

    ``session`` reaches the replicas with ``upstream_key``. With ``upstream_model`` each request's
    ``model`` is replaced by it, so that clients may name a deployment as the services have them.
    """
    if not token:
        raise InputError("a server needs a token")
    app = web.Application(middlewares=[_errors, _bearer(token)], client_max_size=MAX_BODY_BYTES)
    app[_REPLICAS], app[_SESSION] = fleet, session
    app[_KEY], app[_MODEL] = upstream_key, upstream_model
    app.router.add_post("/hot_load/v1/models/hot_load", _hot_load)
    app.router.add_get("/hot_load/v1/models/hot_load", _state)
    ledger = "/v1/accounts/{account}/deployments/{deployment}/ledger"
    app.router.add_get(ledger, _ledger)
    app.router.add_delete(ledger, _forget)
    app.router.add_get("/health", _health)
    app.router.add_route("*", "/v1/{path:.*}", _proxy)
    app.router.add_route("*", "/inference/v1/{path:.*}", _proxy)

    async def life(_: web.Application) -> Any:
        fleet.start()
        yield
        await fleet.close()

    app.cleanup_ctx.append(life)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except InputError as error:
        return _error(400, error)
    except RetryError as error:
        return _error(503, error)
    except DeltawireError as error:
        return _error(500, error)
    except web.HTTPException as error:
        return _error(error.status, InputError(error.reason))


def _bearer(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            return _error(401, InputError("a bearer token is needed, and this is not it"))
        return await handler(request)

    return check


async def _hot_load(request: web.Request) -> web.StreamResponse:
    return _json(await request.app[_REPLICAS].hot_load(read_request(await request.read())))


async def _state(request: web.Request) -> web.StreamResponse:
    return _json(request.app[_REPLICAS].state())


async def _ledger(request: web.Request) -> web.StreamResponse:
    return _json({"snapshots": list(request.app[_REPLICAS].ledger.values())})


async def _forget(request: web.Request) -> web.StreamResponse:
    request.app[_REPLICAS].forget()
    return _json({})


async def _health(request: web.Request) -> web.StreamResponse:
    ready = request.app[_REPLICAS].ready
    return web.json_response({"ready": ready}, status=200 if ready else 503)


async def _proxy(request: web.Request) -> web.StreamResponse:
    """Hand a request to a replica and its answer back, piece by piece as it comes."""
    fleet = request.app[_REPLICAS]
    _check_path(request.match_info["path"])
    body = await request.read()
    session = next((request.headers[h] for h in SESSION_HEADERS if h in request.headers), "")
    body = _with_model(body, request.app[_MODEL])
    while (member := fleet.pick(session)) is not None:
        fleet.begin(member)
        try:
            return await _exchange(request, member, body)
        except aiohttp.ClientConnectorError:
            fleet.lost(member)  # It never saw the request, so that another one may.
        finally:
            fleet.end(member)
    code = BUSY if fleet.draining else 503
    return _error(code, RetryError("no replica takes requests now", hint="ask again shortly"))


async def _exchange(
    request: web.Request, member: TrackedReplica, body: bytes
) -> web.StreamResponse:
    app, fleet = request.app, request.app[_REPLICAS]
    headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
    if app[_KEY]:
        headers["Authorization"] = f"Bearer {app[_KEY]}"
    answer: web.StreamResponse | None = None
    try:
        async with app[_SESSION].request(
            request.method,
            f"{member.replica.base_url}/v1/{request.match_info['path']}",
            params=request.query,
            data=body if request.can_read_body or body else None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            allow_redirects=False,
        ) as upstream:
            passed = {k: upstream.headers[k] for k in _RETURNED_HEADERS if k in upstream.headers}
            passed[SNAPSHOT_HEADER] = fleet.identity_at(member)
            answer = web.StreamResponse(status=upstream.status, headers=passed)
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        if answer is not None and answer.prepared:
            # The status line is gone; only a broken stream can still say that this was no end.
            if request.transport is not None:
                request.transport.abort()
            return answer
        reason = str(error) or type(error).__name__
        raise RetryError(f"replica {member.replica.name} does not answer: {reason}") from error


def _check_path(path: str) -> None:
    """Raises `InputError` unless a path stays below ``/v1``: a replica has calls beside that, which
    are guarded by nothing but the key that this server adds."""
    if not all(_NAME.match(name) for name in path.split("/")):
        raise InputError(f"/v1/{path[:80]} is no path of a replica's")


def _with_model(body: bytes, model: str) -> bytes:
    """The body with the replica's own name for its model."""
    if not model or not body:
        return body
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body  # The replica says better what is wrong with it.
    if not isinstance(content, dict) or "model" not in content:
        return body
    return json.dumps({**content, "model": model}).encode()


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, error: DeltawireError) -> web.Response:
    body = {"error": {"message": str(error), "type": type(error).__name__, "code": status}}
    return web.json_response(body, status=status)
