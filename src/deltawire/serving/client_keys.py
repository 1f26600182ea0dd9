"""API keys of clients: each with its name, its rate, its requests at once and its daily quota.

The operator's file holds hashes of keys only, so that who reads it can use none::

    [support-web]
    key_sha256 = "…"            # printf %s "$KEY" | sha256sum
    requests_per_minute = 600   # in bursts of as many; 0, or left out: no limit
    at_once = 32
    tokens_per_day = 2000000    # drawn tokens

Limits are those of one gateway: behind a balancer over n gateways a client has n times as much.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.bearer import token_in
from deltawire.errors import InputError
from deltawire.serving.errors import RequestError

CLIENT: ContextVar[str] = ContextVar("deltawire_client", default="")
"""The client of the request that is being answered; empty for the gateway's own tokens."""
MAX_FILE_BYTES = 4 << 20
MAX_CLIENTS = 10_000
DAY_S = 86_400.0
_Limit = Annotated[int, Meta(ge=0, le=1 << 48)]


class ClientLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client's key, as the hexadecimal SHA-256 of its text, and its limits; 0 is none."""

    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    requests_per_minute: _Limit = 0
    at_once: _Limit = 0
    tokens_per_day: _Limit = 0


_File = dict[
    Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")],
    ClientLimits,
]


def read_clients(path: str) -> dict[str, ClientLimits]:
    """Reads the operator's file; raises `InputError` for one that cannot be used."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        found = msgspec.convert(tomllib.loads(data.decode()), _File)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"{path} is no list of clients: {str(error)[:200]}") from error
    if len(found) > MAX_CLIENTS:
        raise InputError(f"{path} lists {len(found)} clients; the limit is {MAX_CLIENTS}")
    if len({one.key_sha256 for one in found.values()}) < len(found):
        raise InputError(f"{path} gives two clients the same key")
    return found


@dataclass
class _Use:
    allowance: float
    at: float
    day_began: float
    drawn: int = 0
    requests: int = 0
    refused: int = 0
    under_way: int = 0
    reserved: int = 0


@dataclass
class CountedRequest:
    """A request of a client; ``drawn`` are the tokens of its answer, set before it ends, and
    ``reserved`` those of the day's quota that are kept for it until then."""

    client: str
    drawn: int = 0
    reserved: int = 0
    use: _Use | None = None
    quota: int = 0

    def reserve(self, tokens: int) -> None:
        """Keeps so many tokens of the quota, or what is left, for this request; raises
        `RequestError` where others under way keep all of it."""
        if self.use is None or not self.quota:
            return
        left = self.quota - self.use.drawn - self.use.reserved
        if left <= 0:
            self.use.refused += 1
            words = f"requests of {self.client} under way may use the rest of its tokens of the day"
            raise _refused(words, "rate_limit_exceeded", 1.0)
        self.reserved = min(tokens, left)
        self.use.reserved += self.reserved


@dataclass
class ClientKeys:
    """The clients of one gateway and what they used; `replace` changes the list while it runs.

    Example::

        keys = ClientKeys(read_clients("clients.toml"))
        name = keys.name_of(request.headers.get("Authorization", ""))
        with keys.request(name) as counted:
            counted.drawn = 31
    """

    limits: Mapping[str, ClientLimits] = field(default_factory=dict)
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self.replace(self.limits)

    def replace(self, limits: Mapping[str, ClientLimits]) -> None:
        """Takes these clients from the next request on; those that are gone are refused then."""
        self.limits = limits
        self._names = {one.key_sha256: name for name, one in limits.items()}
        self._uses = {name: use for name, use in self._uses.items() if name in limits}

    def name_of(self, header: str) -> str:
        """Returns the client whose key an ``Authorization`` header gives; empty if none's."""
        token = token_in(header)
        return self._names.get(hashlib.sha256(token).hexdigest(), "") if token else ""

    @contextmanager
    def request(self, name: str) -> Iterator[CountedRequest]:
        """Counts a request of a client while the block runs; raises `RequestError` with status 429
        for one that exceeds a limit. Without a name nothing is counted."""
        counted = CountedRequest(name)
        limits = self.limits.get(name)
        if limits is None:
            yield counted
            return
        use = self._take(name, limits)
        use.under_way += 1
        counted.use, counted.quota = use, limits.tokens_per_day
        try:
            yield counted
        finally:
            use.under_way -= 1
            use.reserved -= counted.reserved
            use.drawn += counted.drawn

    def used(self) -> dict[str, dict[str, int]]:
        """Returns what each client used since this gateway started, and today."""
        return {
            name: {
                "requests": use.requests,
                "refused": use.refused,
                "under_way": use.under_way,
                "tokens_today": use.drawn,
            }
            for name, use in sorted(self._uses.items())
        }

    def _take(self, name: str, limits: ClientLimits) -> _Use:
        now, rate = self.clock(), limits.requests_per_minute
        use = self._uses.setdefault(name, _Use(math.inf, now, now))
        filled = min(float(rate), use.allowance + (now - use.at) * rate / 60)
        use.allowance = filled if rate else math.inf  # A rate that comes later begins in full.
        use.at = now
        if now - use.day_began >= DAY_S:
            use.day_began, use.drawn = now, 0
        refusal: RequestError | None = None
        if limits.tokens_per_day and use.drawn >= limits.tokens_per_day:
            after_s = use.day_began + DAY_S - now
            words = f"{name} has used its {limits.tokens_per_day} tokens of the day"
            refusal = _refused(words, "insufficient_quota", after_s)
        elif rate and use.allowance < 1:
            words = f"{name} sends more than {rate} requests a minute"
            refusal = _refused(words, "rate_limit_exceeded", (1 - use.allowance) * 60 / rate)
        elif limits.at_once and use.under_way >= limits.at_once:
            words = f"{name} has {limits.at_once} requests under way"
            refusal = _refused(words, "rate_limit_exceeded", 1.0)
        if refusal is not None:
            use.refused += 1
            raise refusal
        use.allowance -= 1
        use.requests += 1
        return use


def _refused(message: str, code: str, after_s: float) -> RequestError:
    return RequestError(message, status=429, code=code, hint="try again later", after_s=after_s)
