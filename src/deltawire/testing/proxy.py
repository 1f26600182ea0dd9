"""Simulates a bad network: an HTTP proxy on loopback that drops, delays, cuts and refuses.

Concurrency::

    client ── request ──▶ proxy (one thread, one event loop) ── request ──▶ server
           ◀── answer ───   fails before, in the middle or after       ◀── answer ──

    with FaultyProxy(server.endpoint, seed=3, rates={"lose": 0.1, "cut_answer": 0.1}) as proxy:
        bucket = server.open("s3://drills/run", endpoint=proxy.endpoint)

Which request fails, and how, follows from the seed, the request's method and path, and how often
that request was made before; it does not depend on the order in which threads run.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

NetworkFault = Literal[
    "refuse",  # the connection ends before the server gets the request
    "busy",  # 503, and the server did not get it
    "cut_request",  # the server gets half of the body, and then nothing
    "lose",  # the server has done it; the connection ends without an answer
    "busy_after",  # the server has done it; the answer is 503
    "cut_answer",  # the connection ends in the middle of the answer's body
    "shorten",  # half of the answer's body, under a length to match
    "delay",  # after a pause
    "stall",  # no answer, until the client gives up
]

_BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: 46\r\n\r\n<Error><Code>SlowDown</Code><Message/></Error>"
)
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 28


class FaultyProxy:
    """Forwards requests to ``upstream``, a URL like ``http://127.0.0.1:9000``.

    ``rates`` gives each fault's share of the requests. With ``mercy`` a request succeeds once it
    failed so many times in a row. `choose` can be replaced for other rules. ``struck`` lists every
    (fault, method, path) so far; ``requests`` counts all requests. ``delay_s`` is the pause of the
    fault ``delay`` and may be changed at any time. ``host`` is the address to listen on, such as
    one end of a pair of virtual network devices.
    """

    def __init__(
        self,
        upstream: str,
        *,
        seed: int = 0,
        rates: Mapping[NetworkFault, float] | None = None,
        mercy: int | None = None,
        delay_s: float = 0.02,
        host: str = "127.0.0.1",
    ) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._seed = seed
        self._mercy = mercy
        self._host = host
        self.delay_s = delay_s
        self._seen: Counter[tuple[str, str]] = Counter()
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        self._connections: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening = threading.Event()
        self.rates: dict[NetworkFault, float] = dict(rates or {})
        self.struck: list[tuple[NetworkFault, str, str]] = []
        self.requests = 0
        self.endpoint = ""
        self.choose: Callable[[str, str, int], NetworkFault | None] = self.draw
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        if not self._listening.wait(30):
            raise RuntimeError("the proxy does not listen")

    def draw(self, method: str, path: str, number: int) -> NetworkFault | None:
        """Draws the fault of the ``number``-th such request, by ``rates``."""
        chance = random.Random(f"{self._seed} {method} {path} {number}").random()
        for fault, rate in self.rates.items():
            if chance < rate:
                return fault
            chance -= rate
        return None

    def close(self) -> None:
        """Stops listening and ends every connection."""
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # The loop has ended by itself.
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, self._host, 0, limit=_MAX_HEAD_BYTES)
        self.endpoint = f"http://{self._host}:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._stop.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one request; then the connection ends."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._answer(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        fault = self._fault(method, path)
        body = await reader.readexactly(_content_length(head))
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault == "delay":
            await asyncio.sleep(self.delay_s)
        if fault == "refuse":
            _end(writer, abruptly=len(self.struck) % 2 == 0)
            return
        answer = _BUSY
        if fault != "busy":
            sent = body[: len(body) // 2] if fault == "cut_request" else body
            answer = await self._ask(head, sent, whole=len(sent) == len(body))
        if fault in ("cut_request", "lose"):
            _end(writer, abruptly=len(self.struck) % 2 == 0)
            return
        if fault == "busy_after":
            answer = _BUSY
        elif fault in ("cut_answer", "shorten"):
            answer = _half(answer, honest=fault == "shorten", method=method)
        writer.write(answer)
        await writer.drain()

    def _fault(self, method: str, path: str) -> NetworkFault | None:
        request = (method, path)
        fault = self.choose(method, path, self._seen[request])
        if self._mercy is not None and self._in_a_row[request] >= self._mercy:
            fault = None
        self.requests += 1
        self._seen[request] += 1
        self._in_a_row[request] = 0 if fault is None else self._in_a_row[request] + 1
        if fault is not None:
            self.struck.append((fault, method, path))
        return fault

    async def _ask(self, head: bytes, body: bytes, *, whole: bool) -> bytes:
        """Returns the server's whole answer to a request; nothing if the request is not whole."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(_closing(head) + body)
            await writer.drain()
            if not whole:
                writer.write_eof()  # The server sees the body end early.
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), self.delay_s)
                return b""
            return await reader.read(_MAX_BODY_BYTES) + await reader.read()
        finally:
            writer.close()


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return min(int(line.split(b":", 1)[1]), _MAX_BODY_BYTES)
    return 0


def _closing(head: bytes) -> bytes:
    """Returns the head, asking to close the connection after the answer."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([lines[0], b"Connection: close", *lines[1:]])


def _half(answer: bytes, *, honest: bool, method: str) -> bytes:
    """Cuts the answer's body in half; with ``honest`` under a length to match."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if method == "HEAD" or not body:
        return answer
    body = body[: len(body) // 2]
    lines = head.split(b"\r\n")
    if honest and any(line.lower().startswith(b"content-length:") for line in lines):
        lines = [line for line in lines if not line.lower().startswith(b"content-length:")]
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + separator + body


def _end(writer: asyncio.StreamWriter, *, abruptly: bool) -> None:
    if abruptly:
        writer.transport.abort()
    else:
        writer.close()
