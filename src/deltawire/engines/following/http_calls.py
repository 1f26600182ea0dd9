"""Adds deltawire's calls to the HTTP server of an engine that has none for calling its ranks.

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
from abc import ABC, abstractmethod
from typing import Any

WANT = "deltawire_want"
ATTEST = "deltawire_attest"
STATUS = "deltawire_status"

REFUSAL = "this server follows a deltawire run, and only the run decides its weights"
"""The answer to an engine's own calls that would write other weights, or label them."""


class EngineCalls(ABC):
    """Adds the calls to ``app``, a Starlette application, and has the paths of ``forbidden``
    answered with 409; an engine's own class reaches its ranks."""

    def __init__(self, app: Any, forbidden: frozenset[str]) -> None:
        app.router.add_route("/collective_rpc", self.call, methods=["POST"])
        app.router.add_route("/deltawire", self.health, methods=["GET"])
        app.add_middleware(Refusing, forbidden=forbidden)

    @abstractmethod
    async def order(self, name: str, value: int) -> None:
        """Has every rank move towards a version (`WANT`), or check its live bits (`ATTEST`)."""

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Returns the status of the controller, and as ``attested`` its last check."""

    async def call(self, request: Any) -> Any:
        """Answers ``/collective_rpc``."""
        body = await request.json()
        method, arguments = body.get("method"), body.get("args") or []
        if method not in (STATUS, WANT, ATTEST):
            return _json({"error": f"there is no method {str(method)[:80]!r}"}, 404)
        if method == WANT:
            if len(arguments) != 1 or not str(arguments[0]).isdecimal():
                return _json({"error": f"{WANT} takes one version"}, 400)
            await self.order(WANT, int(arguments[0]))
        elif method == ATTEST:
            await self.order(ATTEST, 1)
        status = await self.status()
        return _json({"results": [status["attested"] if method == ATTEST else status]}, 200)

    async def health(self, _request: Any) -> Any:
        """Answers ``/deltawire``."""
        status = await self.status()
        told = {name: status[name] for name in ("version", "digest", "wanted", "phase", "failure")}
        return _json(told, 503 if status["failure"] or status["version"] < 0 else 200)


class Refusing:
    """Answers 409 to calls of ``forbidden``, as ASGI middleware."""

    def __init__(self, app: Any, forbidden: frozenset[str]) -> None:
        self._app = app
        self._forbidden = forbidden

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers, or passes the request on."""
        if (
            scope["type"] == "http"
            and scope["path"].removeprefix(scope.get("root_path", "")) in self._forbidden
        ):
            await _json({"error": REFUSAL}, 409)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _json(content: Any, status: int) -> Any:
    return importlib.import_module("starlette.responses").JSONResponse(content, status)
