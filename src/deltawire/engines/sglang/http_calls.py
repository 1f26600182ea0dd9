"""Adds deltawire's calls to SGLang's HTTP server.

::

    POST /collective_rpc  {"method": "deltawire_status", "args": []}   the answer: {"results": […]}
                          {"method": "deltawire_want", "args": ["7"]}
                          {"method": "deltawire_attest", "args": []}
    GET  /deltawire       200 if the run is followed without a failure, else 503

They have the form of vLLM's, so that callers need not know which engine they talk to. A server that
did not load the plugin answers 404 to both.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from typing import Any

from deltawire.engines.sglang.refusals import REFUSAL

WANT = "deltawire_want"
ATTEST = "deltawire_attest"
STATUS = "deltawire_status"
MEMBER = "deltawire"
"""The member of SGLang's internal state that holds the status."""

MODULE = "sglang.srt.entrypoints.http_server"
FORBIDDEN = frozenset(
    {"/update_weight_version", "/release_memory_occupation", "/resume_memory_occupation"}
)
"""SGLang's calls that would give tokens another label, or take the weights out of memory."""


def install() -> None:
    """Adds the calls in the process that serves HTTP, which is no child of another."""
    if MODULE not in sys.modules and multiprocessing.parent_process() is not None:
        return
    app = importlib.import_module(MODULE).app
    app.router.add_route("/collective_rpc", _call, methods=["POST"])
    app.router.add_route("/deltawire", _health, methods=["GET"])
    app.add_middleware(Refusing)


class Refusing:
    """Answers 409 to calls of `FORBIDDEN`, as ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers, or passes the request on."""
        if scope["type"] == "http" and scope["path"] in FORBIDDEN:
            await _json({"error": REFUSAL}, 409)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _call(request: Any) -> Any:
    body = await request.json()
    method, arguments = body.get("method"), body.get("args") or []
    if method not in (STATUS, WANT, ATTEST):
        return _json({"error": f"there is no method {str(method)[:80]!r}"}, 404)
    manager = _manager()
    if method == WANT:
        if len(arguments) != 1 or not str(arguments[0]).isdecimal():
            return _json({"error": f"{WANT} takes one version"}, 400)
        await _order(manager, WANT, int(arguments[0]))
    elif method == ATTEST:
        await _order(manager, ATTEST, 1)
    status = await _status(manager)
    return _json({"results": [status["attested"] if method == ATTEST else status]}, 200)


async def _health(_request: Any) -> Any:
    status = await _status(_manager())
    told = {name: status[name] for name in ("version", "digest", "wanted", "phase", "failure")}
    return _json(told, 503 if status["failure"] or status["version"] < 0 else 200)


def _manager() -> Any:
    return sys.modules[MODULE]._global_state.tokenizer_manager


async def _order(manager: Any, name: str, value: int) -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    await manager.set_internal_state(SetInternalStateReq(server_args={name: value}))


async def _status(manager: Any) -> dict[str, Any]:
    """Asks the schedulers, which answer between two steps."""
    answers = await manager.get_internal_state()
    status: dict[str, Any] = answers[0][MEMBER]
    manager._update_weight_version_if_provided(str(status["version"]))  # For /model_info.
    return status


def _json(content: Any, status: int) -> Any:
    return importlib.import_module("fastapi.responses").JSONResponse(content, status)
