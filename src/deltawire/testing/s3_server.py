"""Runs a real S3 server on a loopback port, as a child process that ends with its owner.

    with S3Server() as server:
        server.make_bucket("drills")
        bucket = server.open("s3://drills/some/run")

There are two implementations of the protocol, both from PyPI: MiniStack, whose requests run one at
a time on an event loop, and moto. moto looks for the object of an ``If-None-Match: *`` put and
writes it later without a lock, so that two creates at once may both win; with one lock around it,
as here, it keeps what S3 promises. Neither checks signatures or keeps anything on disk. Both can
refuse requests above a rate (`S3Server.throttle`).

Concurrency::

    owner                                child process
      throttle, attempts ── a line ─────▶  one thread reads lines, sets or reads the throttle
                         ◀── a line ────   the server's threads ask the throttle for each request
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.client import HTTPConnection
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from deltawire.errors import InputError, RetryError
from deltawire.store import Bucket, open_bare_bucket, open_bucket
from deltawire.testing.throttle import SLOW_DOWN, Attempts, Limits, Throttle

Implementation = Literal["ministack", "moto"]

START_S = 60.0
STOP_S = 10.0
_KEY = "testing"  # The servers check no signatures.

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class S3Server:
    """Starts the server and waits until it listens; `close`, or the end of this process, ends it.

    Raises `InputError` if the server's packages are not installed.
    """

    def __init__(self, implementation: Implementation = "ministack") -> None:
        self.implementation = implementation
        self._asking = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by its name
            [sys.executable, "-P", "-m", "deltawire.testing.s3_server", implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self.endpoint = f"http://127.0.0.1:{self._read_port()}"
        except BaseException:
            self.close()
            raise

    def _read_port(self) -> int:
        line = b""

        def read() -> None:
            nonlocal line
            assert self._process.stdout is not None
            line = self._process.stdout.readline()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(START_S)
        if line.strip().isdigit():
            return int(line)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        raise InputError(
            f"the S3 server {self.implementation} did not start; it said: {said[-1][:300]}",
            hint="is the extra deltawire[dev] installed?",
        )

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables by which `open_bucket` in any process finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Makes an empty bucket; raises `InputError` if the server refuses."""
        parts = urlsplit(self.endpoint)
        connection = HTTPConnection(parts.netloc, timeout=START_S)
        try:
            connection.request("PUT", f"/{name}")
            answer = connection.getresponse()
            answer.read()
        except OSError as error:
            raise RetryError(f"cannot make the bucket {name}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise InputError(f"cannot make the bucket {name}: {answer.status} {answer.reason}")

    def open(
        self,
        location: str,
        *,
        endpoint: str | None = None,
        access_key_id: str = _KEY,
        **options: Any,
    ) -> Bucket:
        """`open_bucket` on this server, or on a proxy of it at ``endpoint``. `attempts` tells
        clients apart by their ``access_key_id``."""
        return open_bucket(location, **self._reached(endpoint, access_key_id), **options)

    def open_bare(
        self,
        location: str,
        *,
        endpoint: str | None = None,
        access_key_id: str = _KEY,
        **options: Any,
    ) -> Bucket:
        """As `open`, with one attempt an operation: for tests that count or fail requests."""
        return open_bare_bucket(location, **self._reached(endpoint, access_key_id), **options)

    def _reached(self, endpoint: str | None, access_key_id: str) -> dict[str, Any]:
        return {
            "endpoint": endpoint or self.endpoint,
            "access_key_id": access_key_id,
            "secret_access_key": _KEY,
            "region": "us-east-1",
        }

    def throttle(
        self,
        *,
        reads_per_s: float | None = None,
        writes_per_s: float | None = None,
        retry_after_s: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """Refuses requests above these rates from now on, all without arguments none; see `Limits`.
        `attempts` then counts from 0."""
        self._ask(
            Limits(
                reads_per_s=reads_per_s,
                writes_per_s=writes_per_s,
                retry_after_s=retry_after_s,
                latency_s=latency_s,
            )
        )

    def attempts(self) -> list[Attempts]:
        """Returns the requests since `throttle`, by verb, run, kind of key and access key."""
        return msgspec.json.decode(self._ask(None), type=list[Attempts])

    def _ask(self, limits: Limits | None) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            try:
                self._process.stdin.write(msgspec.json.encode(limits) + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise RetryError(f"the S3 server has ended: {error}") from error
            answer = self._process.stdout.readline()
        if not answer:
            raise RetryError("the S3 server has ended")
        return answer

    def close(self) -> None:
        """Ends the server; its objects are gone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refusal_headers(throttle: Throttle) -> list[tuple[str, str]]:
    after_s = throttle.limits.retry_after_s
    found = [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))]
    return found if after_s is None else [*found, ("Retry-After", str(after_s))]


def _latency_s(throttle: Throttle) -> float:
    return throttle.limits.latency_s * (0.75 + 0.5 * random.random())


def _serve_moto(listening: socket.socket, throttle: Throttle) -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    inner = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # Read the body before the lock: a client that stalls must not stall the others.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) != length:  # Cut off: as if the request had never come.
            start_response("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        method = environ["REQUEST_METHOD"]
        query, authorization = (
            environ.get(name, "") for name in ("QUERY_STRING", "HTTP_AUTHORIZATION")
        )
        line = method, environ["PATH_INFO"], query, authorization
        refused = throttle.refuses(*line)
        time.sleep(_latency_s(throttle))
        if refused:
            start_response("503 Slow Down", _refusal_headers(throttle))
            return [] if method == "HEAD" else [SLOW_DOWN]
        with one_at_a_time:
            answer = list(inner(environ, start_response))
        throttle.moved(*line, received=length, sent=sum(map(len, answer)))
        return answer

    make_server(
        "127.0.0.1",
        0,
        app,
        threaded=True,
        request_handler=MotoRequestHandler,
        fd=listening.fileno(),
    ).serve_forever()


def _serve_ministack(listening: socket.socket, throttle: Throttle) -> None:
    # Start only what requests need: the emulator's other services, its timers and its search for
    # containers start with the lifespan, which is answered here instead.
    os.environ.update(SERVICES="s3", LOG_LEVEL="WARNING")
    os.environ.update(dict.fromkeys(("S3_PERSIST", "PERSIST_STATE", "AUTH"), "0"))
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    async def requests_only(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query = scope["query_string"].decode("latin-1")
            authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            line = scope["method"], scope["path"], query, authorization
            refused = throttle.refuses(*line)
            await asyncio.sleep(_latency_s(throttle))
            if refused:
                await _refuse(throttle, scope["method"], receive, send)
                return
            counted = _ByteCount(throttle, line)
            await app(scope, counted.receive(receive), counted.send(send))
            return
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while True:
            event = await receive()
            await send({"type": f"{event['type']}.complete"})
            if event["type"] == "lifespan.shutdown":
                return

    config = Config()
    config.bind = [f"fd://{listening.fileno()}"]
    config.loglevel = "WARNING"
    config.keep_alive_timeout = 75.0
    served: Any = requests_only
    asyncio.run(serve(served, config))


class _ByteCount:
    """Counts the bytes of one request's body and of its answer's, before the client gets them:
    its next question may be how many they were."""

    def __init__(self, throttle: Throttle, line: tuple[str, str, str, str]) -> None:
        self._throttle, self._line = throttle, line

    def receive(self, inner: Receive) -> Receive:
        """Returns what passes parts of the request on."""

        async def receive() -> Scope:
            event = await inner()
            self._count(received=len(event.get("body", b"")))
            return event

        return receive

    def send(self, inner: Send) -> Send:
        """Returns what passes parts of the answer on."""

        async def send(event: Scope) -> None:
            self._count(sent=len(event.get("body", b"")))
            await inner(event)

        return send

    def _count(self, *, received: int = 0, sent: int = 0) -> None:
        self._throttle.moved(*self._line, received=received, sent=sent)


async def _refuse(throttle: Throttle, method: str, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass  # The client sends all of its body before it reads the answer.
    headers = [(name.encode(), value.encode()) for name, value in _refusal_headers(throttle)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    body = b"" if method == "HEAD" else SLOW_DOWN
    await send({"type": "http.response.body", "body": body})


def _obey_owner(throttle: Throttle) -> None:
    """Answers each line of the standard input, and exits when the owner closes it."""
    for line in sys.stdin.buffer:
        limits = msgspec.json.decode(line, type=Limits | None)
        if limits is not None:
            throttle.limit(limits)
        answer = throttle.attempts()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Serves until the standard input is closed; the port goes to the standard output."""
    parser = argparse.ArgumentParser(prog="python -m deltawire.testing.s3_server")
    parser.add_argument("implementation", choices=("ministack", "moto"))
    implementation = parser.parse_args().implementation
    serve = {"ministack": _serve_ministack, "moto": _serve_moto}[implementation]
    throttle = Throttle()
    # Connections queue in the listening socket from here on, so clients need not poll.
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=_obey_owner, args=(throttle,), daemon=True).start()
        serve(listening, throttle)


if __name__ == "__main__":
    main()
