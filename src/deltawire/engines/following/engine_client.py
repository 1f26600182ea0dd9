"""Calls deltawire's methods in an engine of another process, and selects the version it serves.

Concurrency::

    `RemoteWeights.swap` ─▶ deltawire_want N ─▶ the engine prepares, swaps between two steps
             └─ polls until it serves N, with the digest that this process read from the manifest

The engine fetches and verifies its part of the weights itself, and keeps decoding while `swap`
waits; `swap` requires that it arrives at the manifest's digest.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import CorruptError, DeltawireError, ResyncError
from deltawire.wire.objects import prepared

MAX_ANSWER_BYTES = 4 << 20
POLL_EVERY_S = 0.01
ANSWER_WITHIN_S = 60.0
SWAP_WITHIN_S = 90.0
"""Less than ``faults.stall_s``, so that the process reports why it stops before it is killed."""

_Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]


class EngineStatus(msgspec.Struct):
    """The engine's status, as its `SwapController` reports it."""

    version: int
    phase: str
    failure: str = ""
    digest: _Digest = ""
    engine: Annotated[str, Meta(max_length=32)] = ""
    """The engine's package; empty where it does not say."""


class _Rank(msgspec.Struct):
    digest: _Digest
    failure: str = ""


class _Attested(msgspec.Struct):
    version: int
    sound: bool
    ranks: Annotated[list[_Rank], Meta(min_length=1)]


T = TypeVar("T")


class EngineStatuses(msgspec.Struct):
    """The answer to ``deltawire_status`` and ``deltawire_want``."""

    results: Annotated[list[EngineStatus], Meta(min_length=1, max_length=1)]


class _Attestations(msgspec.Struct):
    results: Annotated[list[_Attested], Meta(min_length=1, max_length=1)]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_WITHIN_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineClient:
    """Calls deltawire's methods in the engine, by ``POST /collective_rpc`` over a Unix socket.

    ``engine`` is its name in errors. The methods block: the engine answers between two steps. They
    raise `ResyncError` if there is no answer, and `CorruptError` for one that cannot be read.
    """

    def __init__(self, path: str, engine: str = "vLLM") -> None:
        self.path = path
        self.engine = engine

    def status(self) -> EngineStatus:
        """Returns the engine's status."""
        return self._call("deltawire_status", EngineStatuses).results[0]

    def want(self, version: int) -> None:
        """Tells the engine to move to ``version``, newer or older; returns at once."""
        self._call("deltawire_want", EngineStatuses, str(version))

    def attest(self) -> _Attested:
        """Has all ranks digest their live bits, and returns the outcome."""
        return self._call("deltawire_attest", _Attestations).results[0]

    def _call(self, method: str, kind: type[T], *arguments: str) -> T:
        connection = UnixConnection(self.path)
        body = json.dumps({"method": method, "args": arguments})
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/collective_rpc", body, headers)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ResyncError(f"{self.engine} does not answer {method}: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ResyncError(
                f"{self.engine} answers {response.status} to {method}: {excerpt(data)}"
            )
        return read_answer(data, kind, method, self.engine)


class RemoteWeights:
    """The engine's weights, as `deltawire.engines.base.Weights`.

    ``version`` is -1 until the first `swap`, regardless of the version that the engine loaded at
    its start.
    """

    def __init__(self, calls: EngineClient) -> None:
        self.version = -1
        self.digest: Digest = codec.ZERO
        self._calls = calls

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Does nothing: the engine prepares by itself when `swap` names the version."""

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Moves the engine to ``version``, whose patches it fetches itself, and waits until it
        serves them. Raises `ResyncError` if it does not arrive there with ``digest``, after telling
        it to return to the old version."""
        del patches
        try:
            self._calls.want(version)
            status = self._wait_for(version)
            if status.digest != digest.hex():
                raise ResyncError(
                    f"{self._calls.engine} serves weights with digest {status.digest}; the "
                    f"manifest states {digest.hex()}",
                    version=version,
                )
        except DeltawireError:
            self._return()
            raise
        self.version, self.digest = version, digest

    def attest(self) -> Digest:
        """Returns the digest of the live bits, which every rank has read again. Raises
        `CorruptError` if they are not the version that the engine reports."""
        found = self._calls.attest()
        if not found.sound or found.version != self.version:
            failures = "; ".join(rank.failure for rank in found.ranks if rank.failure)
            raise CorruptError(
                f"{self._calls.engine}'s live weights are not those of its version: "
                f"{failures[:500] or 'it serves another one'}",
                version=found.version,
            )
        return Digest.from_hex(found.ranks[0].digest)

    def _wait_for(self, version: int) -> EngineStatus:
        deadline = time.monotonic() + SWAP_WITHIN_S
        while True:
            status = self._calls.status()
            if status.version == version:
                return status
            if status.failure and status.phase == "serving":
                raise ResyncError(
                    f"{self._calls.engine} stays at version {status.version}: "
                    f"{status.failure[:500]}",
                    version=version,
                )
            if time.monotonic() > deadline:
                raise ResyncError(
                    f"{self._calls.engine} is still {status.phase[:20]} after "
                    f"{SWAP_WITHIN_S:.0f} s",
                    version=version,
                )
            time.sleep(POLL_EVERY_S)

    def _return(self) -> None:
        """Asks for the old version again, or the engine would keep trying and swap unexpectedly."""
        if self.version >= 0:
            try:
                self._calls.want(self.version)
            except DeltawireError:
                return  # The error that led here is the one to report.


def read_answer(data: bytes | bytearray, kind: type[T], what: str, engine: str) -> T:
    """Decodes an answer of ``engine``; raises `CorruptError` if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{engine}'s answer to {what} cannot be read: {error}") from error


def excerpt(data: bytes | bytearray) -> str:
    """Returns the beginning of an answer, for an error."""
    return bytes(data[:300]).decode(errors="replace")
