"""Answers errors as OpenAI's API does, so that its clients raise the class they are written for.

::

    {"error": {"message": "…", "type": "invalid_request_error", "param": "model", "code": "…"}}

``type`` says whose fault it is, and ``code`` what it is; ``param`` names the member of the request,
where one is the cause. The HTTP status says what the caller does next.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from deltawire.errors import BugError, DeltawireError, InputError, RetryError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ClientGoneError(Exception):
    """The client took no more of its answer. It says nothing about the replica."""


INVALID = "invalid_request_error"
SERVER = "server_error"
SERVER_ERROR = 500
"""Statuses from this on are failures; lower ones answer what the client asked."""
_KINDS: dict[int, tuple[str, str | None]] = {
    400: (INVALID, None),
    401: (INVALID, "invalid_api_key"),
    403: (INVALID, "insufficient_permissions"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_supported"),
    408: (INVALID, "request_timeout"),
    409: (INVALID, "conflict"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
    421: (INVALID, "misdirected_request"),
    425: (SERVER, "weights_are_changing"),
    429: ("requests", "rate_limit_exceeded"),
    501: (SERVER, "not_implemented"),
    503: (SERVER, "service_unavailable"),
    504: (SERVER, "timeout"),
}
"""The ``type`` and ``code`` of each status, unless an error states its own."""
_LOG = logging.getLogger("deltawire.serving")


class RequestError(InputError):
    """A request that is refused for a stated reason: ``code`` is OpenAI's word for it where there
    is one, and ``param`` the member of the request that is the cause.

    Example::

        raise RequestError("there is no model 'x'", status=404, code="model_not_found")
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        status: int = 400,
        hint: str = "",
        after_s: float = 0.0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code, self.param, self.status = code, param, status
        self.after_s = after_s


def error_object(
    status: int, message: str, *, code: str = "", param: str | None = None
) -> dict[str, Any]:
    """Returns the object of an error, as JSON takes it."""
    kind, usual = _KINDS.get(status, (INVALID, None))
    if status >= SERVER_ERROR and usual is None:
        kind, usual = SERVER, "internal_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


def error_body(status: int, message: str, *, code: str = "", param: str | None = None) -> bytes:
    """Returns the same, encoded."""
    return msgspec.json.encode(error_object(status, message, code=code, param=param))


def error_answer(status: int, error: DeltawireError) -> web.Response:
    """Answers an error: its message, whose fault it is, and what it is."""
    code, param, headers = "", None, {}
    if isinstance(error, RequestError):
        code, param = error.code, error.param
        if error.after_s:
            headers["Retry-After"] = str(int(error.after_s) + 1)
    body = error_body(status, str(error), code=code, param=param)
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors as JSON, with the status that says what the caller does next."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_answer(error.status, error)
    except InputError as error:
        return error_answer(400, error)
    except RetryError as error:
        return error_answer(503, error)
    except DeltawireError as error:
        return error_answer(500, error)
    except web.HTTPException as error:
        return error_answer(error.status, InputError(error.reason))
    except Exception as error:  # Its message may hold parts of the request: only the type is kept.
        _LOG.error("request failed: %s", type(error).__name__)
        return error_answer(500, BugError("the server failed to handle this request"))
