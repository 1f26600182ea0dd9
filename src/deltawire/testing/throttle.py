"""Refuses the requests to a test server above a rate, as S3 does for a prefix, and counts all.

Reads and writes have a limit each. The server holds one second's requests in store: after a quiet
second as many are answered at once, and from then on one whenever a share of a second has passed.
The others get 503 *Slow Down*, with or without ``Retry-After``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from deltawire.wire import keys

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)

_FOLDERS = sorted(
    (name for name in vars(keys).values() if isinstance(name, str) and name.endswith("/")),
    key=len,
    reverse=True,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a server: requests a second (None: all), the seconds of ``Retry-After`` (None:
    no such header), and how long each answer takes."""

    reads_per_s: float | None = None
    writes_per_s: float | None = None
    retry_after_s: int | None = None
    latency_s: float = 0.0


class Attempts(msgspec.Struct, kw_only=True):
    """Requests of one kind: ``verb`` is GET, HEAD, LIST, PUT or DELETE, ``run`` the part of the key
    before the run's own keys, ``kind`` a folder such as ``weights/blobs`` or an object's name.
    ``client`` is the access key that signed them, ``received`` and ``sent`` are the bytes of their
    bodies and of the answers'."""

    verb: str
    run: str
    kind: str
    client: str = ""
    made: int = 0
    refused: int = 0
    received: int = 0
    sent: int = 0


class Throttle:
    """Decides which requests are refused; usable by several threads.

    Example::

        throttle = Throttle(Limits(reads_per_s=100))
        if throttle.refuses("GET", "/bucket/run/weights/blobs/ab", ""):
            ...  # answer 503
    """

    def __init__(
        self, limits: Limits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.limit(limits or Limits())

    def limit(self, limits: Limits) -> None:
        """Begins other limits, with one second's requests in store, and counts from 0."""
        with self._lock:
            self.limits = limits
            # At least one, or a limit below one request a second would refuse all.
            self._most = {
                writes: max(rate or 0.0, 1.0)
                for writes, rate in ((False, limits.reads_per_s), (True, limits.writes_per_s))
            }
            self._left = dict(self._most)
            self._filled_at = dict.fromkeys((False, True), self._clock())
            self._counted: dict[tuple[str, str, str, str], Attempts] = {}

    def refuses(self, method: str, path: str, query: str, authorization: str = "") -> bool:
        """Counts a request and returns whether it is refused."""
        with self._lock:
            counted = self._entry(method, path, query, authorization)
            counted.made += 1
            refused = not self._take(writes=counted.verb in ("PUT", "POST", "DELETE"))
            counted.refused += refused
            return refused

    def moved(
        self, method: str, path: str, query: str, authorization: str, *, received: int, sent: int
    ) -> None:
        """Counts the bytes of a request's body and of its answer's."""
        with self._lock:
            counted = self._entry(method, path, query, authorization)
            counted.received += received
            counted.sent += sent

    def _entry(self, method: str, path: str, query: str, authorization: str) -> Attempts:
        verb, run, kind = kind_of(method, path, query)
        _, _, credential = authorization.partition("Credential=")
        client = credential.partition("/")[0]
        return self._counted.setdefault(
            (verb, run, kind, client), Attempts(verb=verb, run=run, kind=kind, client=client)
        )

    def attempts(self) -> list[Attempts]:
        """Returns the requests since the limits began."""
        with self._lock:
            return [msgspec.structs.replace(one) for one in self._counted.values()]

    def _take(self, *, writes: bool) -> bool:
        rate = self.limits.writes_per_s if writes else self.limits.reads_per_s
        if rate is None:
            return True
        now = self._clock()
        gained = rate * (now - self._filled_at[writes])
        self._left[writes] = min(self._left[writes] + gained, self._most[writes])
        self._filled_at[writes] = now
        if self._left[writes] < 1:
            return False
        self._left[writes] -= 1
        return True


def kind_of(method: str, path: str, query: str) -> tuple[str, str, str]:
    """Returns the verb of a request, the run that it is about, and the kind of the key."""
    listing = parse_qs(query, keep_blank_values=True)
    if method == "POST" and "delete" in listing:
        method = "DELETE"  # Of many objects, whose keys are in the body.
    if method == "GET" and ("list-type" in listing or "prefix" in listing):
        method = "LIST"
        path = f"{path.rstrip('/')}/{listing.get('prefix', [''])[0]}"
    path = unquote(urlsplit(path).path)
    for folder in _FOLDERS:
        run, found, _ = path.partition(f"/{folder}")
        if found:
            return method, run.strip("/"), folder.strip("/")
    run, _, name = path.rpartition("/")
    return method, run.strip("/"), name
