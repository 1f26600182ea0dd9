"""Messages of MCP over HTTP: each is a POST, and its answers a JSON text or a stream of events.

An answer is limited before it is kept. Redirects are not followed, and compressed answers refused:
neither the place nor the size of what is read is the server's to choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp

from deltawire.envs.mcp.faults import CallFaultError, ToolServerError, UnreadableAnswerError
from deltawire.envs.sandbox.conversation import Lines

FLOOD_TIMES = 16
"""A stream of events may hold this many times the bytes of one message."""
FAREWELL_S = 2.0
MAX_IDENTITY = 4096
"""The most characters of a session's id."""


class HttpTransport:
    """A `deltawire.envs.mcp.session.Transport` to a URL. ``most`` bounds the bytes of a message."""

    def __init__(self, url: str, *, most: int) -> None:
        self._url = url
        self._most = most
        self._identity = ""
        self._version = ""
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # The session limits each request.
            read_bufsize=1 << 16,
        )

    async def exchange(self, message: bytes) -> AsyncIterator[bytes]:
        """Posts a message, and yields those of the answer."""
        try:
            async with self._posted(message) as answer:
                if not 200 <= answer.status < 300:
                    raise CallFaultError(f"the server answered {answer.status}")
                self._identity = answer.headers.get("Mcp-Session-Id", self._identity)
                if len(self._identity) > MAX_IDENTITY:
                    self._identity = ""
                    raise CallFaultError(f"its session's id is longer than {MAX_IDENTITY}")
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    raise CallFaultError("the server's answer is compressed")
                if answer.content_type == "text/event-stream":
                    async for event in self._events(answer):
                        yield event
                elif answer.content_type == "application/json":
                    yield b"".join([piece async for piece in self._pieces(answer, self._most)])
                else:
                    raise CallFaultError(f"the server's answer is {answer.content_type[:80]}")
        except (aiohttp.ClientConnectorError, ConnectionError) as error:
            raise ToolServerError(f"it cannot be reached: {error}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise CallFaultError(f"the server's answer broke off: {error!r}"[:300]) from error

    async def post(self, message: bytes) -> None:
        """Posts a message that has no answer."""
        try:
            async with self._posted(message):
                pass  # The answer is not read.
        except (aiohttp.ClientError, OSError) as error:
            raise ToolServerError(f"it cannot be reached: {error}") from error

    def agree(self, version: str) -> None:
        """Names the version in the requests that follow."""
        self._version = version

    async def close(self) -> None:
        """Tells the server that the session is over, if it has one, and closes connections."""
        try:
            if self._identity:
                limit = aiohttp.ClientTimeout(total=FAREWELL_S)
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with self._client.delete(
                        self._url, headers=self._headers(), timeout=limit, allow_redirects=False
                    ):
                        pass
        finally:
            await self._client.close()

    def _posted(self, message: bytes) -> aiohttp.client._RequestContextManager:
        return self._client.post(
            self._url, data=message, headers=self._headers(), allow_redirects=False
        )

    def _headers(self) -> dict[str, str]:
        known = {"Mcp-Session-Id": self._identity, "MCP-Protocol-Version": self._version}
        return {
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **{name: value for name, value in known.items() if value},
        }

    async def _pieces(self, answer: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
        read = 0
        async for piece in answer.content.iter_any():
            read += len(piece)
            if read > most:
                raise UnreadableAnswerError(f"the server's answer has more than {most} bytes")
            yield piece

    async def _events(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The data of each event of a stream."""
        split, size = Lines(), 0
        data: list[bytes] = []
        async for piece in self._pieces(answer, FLOOD_TIMES * self._most):
            for line in split.add(piece):
                line = line.removesuffix(b"\r")  # noqa: PLW2901
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                    size += len(line) + 1
                    self._limit(size)
                elif not line and data:
                    yield b"\n".join(data)
                    data, size = [], 0
            self._limit(len(split.waiting))

    def _limit(self, size: int) -> None:
        if size > self._most:
            raise UnreadableAnswerError(f"the server's answer has more than {self._most} bytes")
