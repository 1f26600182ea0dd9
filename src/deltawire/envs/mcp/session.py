"""One session of an MCP server: the handshake, the list of tools, calls one at a time.

Written here, and not with the package ``mcp``, for two reasons: a server is untrusted, and that
package's clients read an answer of any size before they look at it; and other environments pin
versions of it that exclude each other. Of the protocol, only tools are used. Requests of the server
(sampling, roots, elicitation) are refused, and its notifications ignored.

Specification: https://modelcontextprotocol.io/specification/2025-06-18
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from deltawire.envs.mcp.faults import CallFaultError, ToolServerError, UnreadableAnswerError

PROTOCOL = "2025-06-18"
KNOWN_PROTOCOLS = ("2024-11-05", "2025-03-26", PROTOCOL, "2025-11-25")
MAX_MESSAGES = 1000
"""The most messages that a server may send before it answers a request."""
MAX_PAGES = 16
MAX_TOOLS = 128
MAX_ARGUMENTS = 1 << 16
"""The most bytes of a call's arguments."""
MAX_FAILED = 3
"""The number of calls in a row without an answer after which the server counts as gone."""


class Transport(Protocol):
    """Carries messages, each a JSON text, between this process and one server."""

    def exchange(self, message: bytes) -> AsyncIterator[bytes]:
        """Sends a message and yields those that the server sends, until it sends no more.

        Raises `CallFaultError` if this message got no usable answer, and `ToolServerError` if the
        server is gone.
        """
        ...

    async def post(self, message: bytes) -> None:
        """Sends a message that has no answer."""
        ...

    def agree(self, version: str) -> None:
        """Learns the version of the protocol that both sides speak."""
        ...

    async def close(self) -> None:
        """Ends the session."""
        ...


class McpSession:
    """The client's side of a session. ``name`` is for messages.

    Example::

        session = McpSession("calculator", transport, start_s=60.0, call_s=30.0)
        await session.start()
        tools = await session.list_tools()
        text = await session.call("add", {"a": 1, "b": 2})
    """

    def __init__(self, name: str, transport: Transport, *, start_s: float, call_s: float) -> None:
        self._name = name
        self._transport = transport
        self._start_s = start_s
        self._call_s = call_s
        self._number = 0
        self._failed = 0

    async def start(self) -> None:
        """Makes the handshake; raises `ToolServerError` if the server does not make it."""
        client = {"name": "deltawire", "version": "1"}
        asked = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        answer = await self._setup("initialize", asked)
        version = answer.get("protocolVersion")
        if version not in KNOWN_PROTOCOLS:
            raise self._fault(f"it speaks version {str(version)[:40]!r} of MCP")
        offered = answer.get("capabilities")
        if not isinstance(offered, dict) or "tools" not in offered:
            raise self._fault("it offers no tools")
        self._transport.agree(version)
        await self._transport.post(_message("notifications/initialized"))

    async def list_tools(self) -> list[dict[str, Any]]:
        """Lists the tools as the server describes them, unchecked; raises `ToolServerError`."""
        found: list[dict[str, Any]] = []
        asked: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            answer = await self._setup("tools/list", asked)
            page = answer.get("tools")
            if not isinstance(page, list) or not all(isinstance(one, dict) for one in page):
                raise self._fault("its list of tools is none")
            found += page
            if len(found) > MAX_TOOLS:
                raise self._fault(f"it has more than {MAX_TOOLS} tools")
            cursor = answer.get("nextCursor")
            if cursor is None:
                return found
            if not isinstance(cursor, str):
                break
            asked = {"cursor": cursor}
        raise self._fault("its list of tools has no end")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool; returns its text.

        Raises `CallFaultError` if there is none, and `ToolServerError` for a server that is gone,
        or gave no answer, or a broken one, `MAX_FAILED` times in a row. An answer that is too long,
        or no text, does not count: the model chose the call.
        """
        try:
            asked = {"name": tool, "arguments": arguments}
            answer = await self._request("tools/call", asked, self._call_s)
            text = _text_of(answer)
        except UnreadableAnswerError:
            self._failed = 0
            raise
        except CallFaultError as fault:
            self._failed += 1
            if self._failed >= MAX_FAILED:
                raise self._fault(f"{self._failed} calls in a row failed: {fault}") from fault
            raise
        except _AnsweredError as refusal:
            self._failed = 0  # It is there, and answers.
            raise CallFaultError(str(refusal)) from refusal
        self._failed = 0
        return text

    async def close(self) -> None:
        """Ends the session."""
        await self._transport.close()

    async def _setup(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._request(method, parameters, self._start_s)
        except (CallFaultError, _AnsweredError) as error:
            raise self._fault(f"{method}: {error}") from error

    async def _request(
        self, method: str, parameters: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        self._number += 1
        message = _message(method, parameters, self._number)
        try:
            async with asyncio.timeout(limit_s):
                return await self._answer(message, self._number)
        except TimeoutError as error:
            raise CallFaultError(f"no answer within {limit_s:g} s") from error
        except ToolServerError as error:
            raise self._fault(str(error)) from error

    async def _answer(self, message: bytes, number: int) -> dict[str, Any]:
        seen = 0
        async with aclosing(self._transport.exchange(message)) as messages:  # type: ignore[type-var]
            async for raw in messages:
                for one in _decoded(raw) or ({},):  # Other lines count as well.
                    seen += 1
                    if seen > MAX_MESSAGES:
                        raise ToolServerError(f"it sent {MAX_MESSAGES} messages and no answer")
                    if "method" in one:
                        await self._react(one)
                    elif one.get("id") == number and type(one["id"]) is int:
                        return _result_of(one)
        raise CallFaultError("the server's answer is missing")

    async def _react(self, message: dict[str, Any]) -> None:
        """Answers a request of the server's; notifications are ignored."""
        identity = message.get("id")
        if not isinstance(identity, str | int):
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": identity}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": -32601, "message": "this client offers tools no such thing"}
        await self._transport.post(json.dumps(answer).encode())

    def _fault(self, reason: str) -> ToolServerError:
        return ToolServerError(f"the tool server {self._name}: {reason}"[:1000])


class _AnsweredError(Exception):
    """The server answered that it could not do what was asked."""


def packed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's arguments if they can be sent; raises `CallFaultError`."""
    try:
        text = json.dumps(dict(arguments), allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CallFaultError("the arguments are not JSON") from error
    if len(text) > MAX_ARGUMENTS:
        raise CallFaultError(f"the arguments have {len(text)} bytes; at most {MAX_ARGUMENTS}")
    return dict(arguments)


def _message(method: str, parameters: Any = None, identity: int | None = None) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if parameters is not None:
        message["params"] = parameters
    if identity is not None:
        message["id"] = identity
    return json.dumps(message).encode()


def _decoded(raw: bytes) -> list[dict[str, Any]]:
    """The messages of a text: one, or a batch. Text that is none is left out: servers print."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return []
    batch = found if isinstance(found, list) else [found]
    return [one for one in batch if isinstance(one, dict)]


def _result_of(message: dict[str, Any]) -> dict[str, Any]:
    result, error = message.get("result"), message.get("error")
    if isinstance(result, dict):
        return result
    told = error.get("message") if isinstance(error, dict) else None
    if isinstance(told, str):
        raise _AnsweredError(told[:1000])
    raise CallFaultError("the server's answer holds neither a result nor an error")


def _text_of(result: dict[str, Any]) -> str:
    """The text of a call's result; what is no text is named and left out."""
    content = result.get("content", [])
    if not isinstance(content, list) or len(content) > MAX_MESSAGES:
        raise CallFaultError("the server's answer has no content")
    texts: list[str] = []
    readable = False
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        held = part.get("resource") if kind == "resource" else part
        text = held.get("text") if isinstance(held, dict) else None
        if kind in ("text", "resource") and isinstance(text, str):
            texts.append(text)
            readable = True
        else:
            texts.append(f"({str(kind)[:40]}, which cannot be read as text)")
    if not texts and isinstance(structured := result.get("structuredContent"), dict):
        return json.dumps(structured, ensure_ascii=False)
    if texts and not readable:
        raise UnreadableAnswerError(f"the answer has no text: {texts[0]}")
    said = "\n".join(texts)
    return f"error: {said}" if result.get("isError") is True else said
