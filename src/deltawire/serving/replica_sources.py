"""Which replicas a gateway has, while they come and go: a file of URLs, or the addresses of a name.

::

    ReplicaFollower, every 2 s:  source.read (a thread) ─▶ the same twice ─▶ ReplicaSet.replace

A source that cannot be read, or lists no replica, changes nothing: the replicas before stay. A
replica that is taken out gets no new request; those under way end as they would.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import web

from deltawire.errors import InputError
from deltawire.serving.http_answers import http_parts
from deltawire.serving.replica import Replica
from deltawire.serving.replica_set import ReplicaSet

READ_EVERY_S = 2.0
MOST_REPLICAS = 1024
MAX_FILE_BYTES = 1 << 20
_LOG = logging.getLogger("deltawire.live")


class ReplicaSource(Protocol):
    """Where the URLs of replicas come from."""

    def read(self) -> tuple[str, ...]:
        """Returns the base URLs in order, each once; raises `InputError` if it cannot say."""
        ...


class ReplicaFile:
    """A file with one base URL a line; empty lines and those that begin with ``#`` are skipped."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read(self) -> tuple[str, ...]:
        """Returns the URLs of the file."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise InputError(f"{self._path} has more than {MAX_FILE_BYTES >> 20} MiB")
            lines = [line.strip() for line in data.decode().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self._path}: {type(error).__name__}") from error
        urls = [line for line in lines if line and not line.startswith("#")]
        for url in urls:
            check_replica_url(str(self._path), url)
        return _each_once(urls)


class ReplicaName:
    """A host name, such as that of a headless service in Kubernetes: each of its addresses is a
    replica at the URL's port.

    Raises `InputError` for an ``https://`` URL: certificates are for names, not for addresses.
    """

    def __init__(self, url: str) -> None:
        check_replica_url("--replicas-dns", url)
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise InputError(
                "--replicas-dns takes an http:// URL: certificates are for names, and a replica is "
                "called by its address",
                hint="list the replicas' names in --replicas-file",
            )
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path

    def read(self) -> tuple[str, ...]:
        """Returns a URL for each address."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise InputError(f"the name {self._host} has no address: {error}") from error
        hosts = {f"[{place[0]}]" if ":" in str(place[0]) else place[0] for *_, place in found}
        return _each_once([f"http://{host}:{self._port}{self._path}" for host in sorted(hosts)])


class ReplicaFollower:
    """Keeps a set of replicas as its source lists them. ``make`` builds the replica of a URL."""

    def __init__(
        self, replicas: ReplicaSet, source: ReplicaSource, make: Callable[[str], Replica]
    ) -> None:
        self._replicas, self._source, self._make = replicas, source, make
        self._seen: tuple[str, ...] | None = None
        self._fault = ""

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Reads the source again and again while an application runs."""
        del app
        await self.poll()
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:  # If this ended, the replicas could never change again.
                _LOG.exception("cannot take the replicas that are listed")
            await asyncio.sleep(READ_EVERY_S)

    async def poll(self) -> None:
        """Takes the replicas that the source lists, once two reads in a row find the same: a file
        may be half written, and an answer of DNS may lack some."""
        try:
            found = await asyncio.to_thread(self._source.read)
            if not found:
                raise InputError("no replica is listed")
            names = Counter(m.replica.name for m in self._replicas.members if m.replica.upstream)
            names.update(self._make(url).name for url in found)
            if odd := [name for name, count in names.items() if count > 1]:
                raise InputError(f"two replicas or upstreams have the name {min(odd)}")
        except InputError as error:
            self._seen = None
            if error.message != self._fault:
                _LOG.error("the replicas before stay in use: %s", error.message)
            self._fault = error.message
            return
        self._fault = ""
        waits = all(m.replica.upstream for m in self._replicas.members)
        if found == self._seen or waits:
            self._replicas.replace([self._make(url) for url in found])
        self._seen = found


def check_replica_url(option: str, url: str) -> None:
    """Raises `InputError` unless it is an HTTP URL without credentials."""
    parts = http_parts(url)
    if parts is None:
        raise InputError(f"{option}: {url[:256]} is not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise InputError(
            f"{option}: the URL of {parts.hostname} contains credentials",
            hint="put the replicas' key into DELTAWIRE_REPLICA_KEY",
        )


def _each_once(urls: Sequence[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
    if len(found) > MOST_REPLICAS:
        raise InputError(f"{len(found)} replicas; a gateway has at most {MOST_REPLICAS}")
    return found
