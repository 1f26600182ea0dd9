"""Posts to another server, within a time and a number of bytes, and follows no redirect.

A timeout of urllib is one of each read: headers that come byte by byte would never end. So the
connection itself is cut off.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from deltawire.errors import InputError


def post(
    url: str, body: bytes, *, timeout_s: float, most_bytes: int, headers: Mapping[str, str] = {}
) -> bytes:
    """Posts JSON to an ``http://`` or ``https://`` URL, and returns the whole answer.

    Raises `InputError` for a status that is no success, and for an answer that is too long, too
    slow or cut short, and `OSError` if the server does not answer.
    """
    request = urllib.request.Request(  # noqa: S310 - the caller has checked the scheme
        url, data=body, headers={"Content-Type": "application/json", **headers}, method="POST"
    )
    until = time.monotonic() + timeout_s
    output = bytearray()
    with _cut_off_after(timeout_s) as handler:
        opener = urllib.request.build_opener(_NoRedirect, handler)
        try:
            answer = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise InputError(f"it answered with status {error.code}") from error
        with answer:
            while data := answer.read1(1 << 16):
                output += data
                if len(output) > most_bytes:
                    raise InputError(f"it answered more than {most_bytes >> 10} KiB")
            if time.monotonic() > until:
                raise InputError(f"it did not end within {timeout_s:g} s")
            if answer.length:  # More was announced than came.
                raise InputError("its answer was cut short")
    return bytes(output)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Follows none: the answer would be another server's."""


class _CutOff(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens connections, and ends all of them by `end`. A timeout of urllib is one of each read:
    headers that come byte by byte would never end."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Opens a connection."""
        return self.do_open(self._noted(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Opens a connection by TLS."""
        return self.do_open(self._noted(http.client.HTTPSConnection), req)

    def _noted(self, kind: type[http.client.HTTPConnection]) -> Callable[..., Any]:
        def make(host: str, **options: Any) -> http.client.HTTPConnection:
            made = kind(host, **options)
            connect = made.connect

            def noted() -> None:
                connect()
                # A second descriptor: urllib drops the first before it reads the body.
                self._sockets.append(socket.socket(fileno=os.dup(made.sock.fileno())))

            made.connect = noted  # type: ignore[method-assign]
            return made

        return make

    def end(self) -> None:
        """Ends the connections."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the second descriptors."""
        for one in self._sockets:
            one.close()


@contextmanager
def _cut_off_after(timeout_s: float) -> Iterator[_CutOff]:
    handler = _CutOff()
    timer = threading.Timer(timeout_s, handler.end)
    timer.daemon = True
    timer.start()
    try:
        yield handler
    finally:
        timer.cancel()
        timer.join()
        handler.release()
