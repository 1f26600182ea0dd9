"""Carries the server's verbs over HTTP, as Tinker's SDK 0.38 calls them.

::

    POST /api/v1/client/config, create_session, session_heartbeat, telemetry, sessions/ID/finish
    POST /api/v1/create_model, load_weights, forward_backward, optim_step,
                 save_weights, save_weights_for_sampler               a future each
    POST /api/v1/create_sampling_session, asample (a future), retrieve_future, get_info,
                 weights_info
    GET  /api/v1/healthz, get_server_capabilities, samplers/ID, training_runs, checkpoints,
                 sessions, sessions/ID, training_runs/MODEL[/checkpoints]
    DELETE /api/v1/training_runs/MODEL/checkpoints/KIND/NAME; PUT the same/ttl

Any other call is refused by its name (`deltawire.tinker.requests.REFUSED_CALLS`). Every call but
``healthz`` needs the token in ``X-API-Key``. A request that was read is handled to its end even if
its client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from deltawire.errors import InputError, RetryError
from deltawire.serving.app import json_answer
from deltawire.serving.bodies import BODY_WITHIN_S, read_body
from deltawire.serving.errors import Handler, answer_errors, error_answer
from deltawire.tinker.requests import (
    EDGE_BYTES,
    KINDS,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNK_DATA,
    OVERSIZE,
    decode_body,
    oversize,
)
from deltawire.tinker.rest import RestAnswers
from deltawire.tinker.results import RequestResult
from deltawire.tinker.server import ExpiredError, TinkerServer
from deltawire.tinker.state import MissingError

PREFIX = "/api/v1/"
TOKEN_STARTS = ("tml-", "eyJ")
"""The client refuses other keys before it sends anything."""

MOST_DRAINED_BYTES = 1 << 30
"""The most bytes that are read of a request that is refused for its size."""

_SERVER = web.AppKey("server", TinkerServer)


class _Ttl(msgspec.Struct):
    ttl_seconds: int | None = None


class _Retrieve(msgspec.Struct):
    request_id: str
    allow_metadata_only: bool = False


def build_app(server: TinkerServer, *, token: str) -> web.Application:
    """Builds the application for ``server``, which it starts and closes. Raises `InputError` for a
    token that no client sends."""
    check_token(token)
    app = web.Application(
        middlewares=[answer_errors, _authorized(token), _answer_missing],
        client_max_size=MAX_BODY_BYTES,
    )
    app[_SERVER] = server
    post, get = app.router.add_post, app.router.add_get
    get(f"{PREFIX}healthz", _constant({"status": "ok"}))
    post(f"{PREFIX}client/config", _constant(_CONFIG))
    post(f"{PREFIX}session_heartbeat", _constant({"type": "session_heartbeat"}))
    post(f"{PREFIX}telemetry", _constant({"status": "accepted"}))
    get(f"{PREFIX}get_server_capabilities", _capabilities)
    post(f"{PREFIX}create_session", _call(lambda one, body: one.create_session(body)))
    post(f"{PREFIX}sessions/{{session}}/finish", _finish)
    for kind in KINDS:
        post(f"{PREFIX}{kind}", _submit(kind))
    post(f"{PREFIX}create_sampling_session", _call(lambda one, body: one.create_sampler(body)))
    post(f"{PREFIX}asample", _call(lambda one, body: one.sample(body)))
    post(f"{PREFIX}retrieve_future", _retrieve)
    post(f"{PREFIX}get_info", _info)
    post(f"{PREFIX}weights_info", _weights_info)
    get(f"{PREFIX}samplers/{{sampler}}", _sampler)
    get(f"{PREFIX}training_runs", _listed(RestAnswers.training_runs))
    get(f"{PREFIX}checkpoints", _listed(RestAnswers.user_checkpoints))
    get(f"{PREFIX}sessions", _listed(RestAnswers.sessions))
    get(f"{PREFIX}sessions/{{name}}", _described(RestAnswers.session))
    get(f"{PREFIX}training_runs/{{name}}", _described(RestAnswers.training_run))
    get(f"{PREFIX}training_runs/{{name}}/checkpoints", _described(RestAnswers.checkpoints))
    saved = f"{PREFIX}training_runs/{{model}}/checkpoints/{{kind}}/{{checkpoint}}"
    app.router.add_delete(saved, _delete_checkpoint)
    app.router.add_put(f"{saved}/ttl", _set_ttl)
    app.router.add_route("*", f"{PREFIX}{{call:.+}}", _refuse)

    async def life(_: web.Application) -> Any:
        await server.start()
        yield
        await server.close()

    app.cleanup_ctx.append(life)
    return app


def check_token(token: str) -> None:
    """Raises `InputError` unless Tinker's SDK would send this token."""
    if not token.startswith(TOKEN_STARTS):
        raise InputError(
            "the token does not begin with tml-", hint="Tinker's client refuses other keys"
        )


_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": MAX_CHUNK_DATA,
    "fwdbwd_max_chunk_bytes_count": MAX_CHUNK_BYTES,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
}


def _authorized(token: str) -> Any:
    wanted = token.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
        if request.path != f"{PREFIX}healthz" and not hmac.compare_digest(given, wanted):
            raise web.HTTPUnauthorized(reason="this is not the server's API key")
        return await handler(request)

    return check


@web.middleware
async def _answer_missing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers what is missing with the status for which the SDK has an error of its kind."""
    try:
        return await handler(request)
    except MissingError as error:
        return error_answer(404, error)


def _constant(value: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await read_body(request)
        return json_answer(value)

    return handler


def _call(verb: Callable[[TinkerServer, bytes], Awaitable[Any]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        return json_answer(await _to_its_end(verb(request.app[_SERVER], body)))

    return handler


def _submit(kind: str) -> Handler:
    submit = _call(lambda server, body: server.submit(kind, body))

    async def handler(request: web.Request) -> web.StreamResponse:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return await _refuse_oversize(request, kind)
        return await submit(request)

    return handler


async def _refuse_oversize(request: web.Request, kind: str) -> web.StreamResponse:
    """Answers a request that is larger than what is read: its number is used, as that of any other
    that is refused. Reads it, and keeps no more than its two ends, so that its client hears the
    answer: one that is still sending takes it for a lost connection, and sends it all again."""
    head, tail, size = b"", b"", request.content_length or 0
    left = min(size, MOST_DRAINED_BYTES)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.content.iter_any():
                head = head if len(head) >= EDGE_BYTES else (head + piece)[:EDGE_BYTES]
                tail = (tail + piece)[-EDGE_BYTES:]
                if (left := left - len(piece)) <= 0:
                    break
    try:
        refused = request.app[_SERVER].refuse(OVERSIZE, oversize(kind, head, tail, size))
        return json_answer(await _to_its_end(refused))
    except InputError as error:
        return error_answer(413, error)


async def _refuse(request: web.Request) -> web.StreamResponse:
    """Answers every other call: its number is used, and the reason is told."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        return await _refuse_oversize(request, request.match_info["call"])
    body = await read_body(request)
    refused = request.app[_SERVER].refuse(request.match_info["call"], body)
    try:
        return json_answer(await _to_its_end(refused))
    except InputError as error:  # The SDK asks for optional calls, and goes on after a 404.
        return error_answer(404, error)


async def _to_its_end(work: Awaitable[Any]) -> Any:
    """Waits for work that goes on if the client disconnects: it would be half done."""
    return await asyncio.shield(asyncio.ensure_future(work))


async def _capabilities(request: web.Request) -> web.StreamResponse:
    server = request.app[_SERVER]
    context = server.options.sampling.context
    models = [
        {
            "model_name": name,
            "max_context_length": context,
            "trainable": True,
            "sampleable": True,
        }
        for name in server.names[:1]
    ]
    return json_answer({"supported_models": models})


async def _finish(request: web.Request) -> web.StreamResponse:
    body = decode_body(await read_body(request), dict[str, Any])
    reason = body.get("reason")
    text = reason.get("type", "") if isinstance(reason, dict) else ""
    server = request.app[_SERVER]
    return json_answer(
        await _to_its_end(server.finish_session(request.match_info["session"], str(text)))
    )


async def _retrieve(request: web.Request) -> web.StreamResponse:
    asked = decode_body(await read_body(request), _Retrieve)
    try:
        result = await request.app[_SERVER].retrieve(asked.request_id)
    except ExpiredError as error:
        raise web.HTTPGone(reason=_reason(error)) from error
    except InputError as error:
        raise web.HTTPNotFound(reason=_reason(error)) from error
    except RetryError as error:
        raise web.HTTPServiceUnavailable(reason=_reason(error)) from error
    if result is None:
        pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        return json_answer(pending)
    return _answer(result)


def _answer(result: RequestResult) -> web.Response:
    if result.kind == "error":
        text = result.body.decode("utf-8", "replace")
        return json_answer({"error": text, "category": result.category})
    kind = "application/x-protobuf" if result.kind == "proto" else "application/json"
    return web.Response(body=result.body, content_type=kind)


async def _info(request: web.Request) -> web.StreamResponse:
    asked = decode_body(await read_body(request), dict[str, Any])
    return json_answer(await request.app[_SERVER].model_info(str(asked.get("model_id"))))


async def _weights_info(request: web.Request) -> web.StreamResponse:
    asked = decode_body(await read_body(request), dict[str, Any])
    return json_answer(await request.app[_SERVER].rest.weights_info(str(asked.get("tinker_path"))))


async def _sampler(request: web.Request) -> web.StreamResponse:
    return json_answer(await request.app[_SERVER].sampler(request.match_info["sampler"]))


def _listed(answer: Callable[[RestAnswers, Mapping[str, str]], Awaitable[Any]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return json_answer(await answer(request.app[_SERVER].rest, request.query))

    return handler


def _described(answer: Callable[[RestAnswers, str], Awaitable[Any]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return json_answer(await answer(request.app[_SERVER].rest, request.match_info["name"]))

    return handler


async def _set_ttl(request: web.Request) -> web.StreamResponse:
    part, asked = request.match_info, decode_body(await read_body(request), _Ttl)
    renewed = request.app[_SERVER].rest.set_ttl(
        part["model"], part["kind"], part["checkpoint"], asked.ttl_seconds
    )
    await _to_its_end(renewed)
    return web.Response(status=204)


async def _delete_checkpoint(request: web.Request) -> web.StreamResponse:
    part = request.match_info
    await _to_its_end(
        request.app[_SERVER].rest.delete_checkpoint(part["model"], part["kind"], part["checkpoint"])
    )
    return web.Response(status=204)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
