"""A replica that is a server of vLLM or SGLang with the deltawire plugin, controlled over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from deltawire.engines.following.engine_client import (
    MAX_ANSWER_BYTES,
    EngineStatus,
    EngineStatuses,
)
from deltawire.errors import CorruptError, ResyncError, RetryError
from deltawire.serving.contract import CacheReset
from deltawire.serving.http_answers import read_limited
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.wire.objects import prepared

POLL_EVERY_S = 0.05
ANSWER_WITHIN_S = 30.0
LOAD_WITHIN_S = 3600.0


class VllmReplica(Replica):
    """Calls the ``/collective_rpc`` of a vLLM that was started with ``VLLM_SERVER_DEV_MODE=1`` and
    ``--additional-config '{"deltawire": {"follow": false, …}}'``, or of an SGLang with
    ``DELTAWIRE_FOLLOW='{"follow": false, …}'``.

    ``key`` is the server's ``--api-key``. The caller owns the session.
    """

    def __init__(self, base_url: str, session: aiohttp.ClientSession, *, key: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        parts = urlsplit(self.base_url)
        self.name = parts.netloc.rpartition("@")[2] + parts.path
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = session

    async def held(self) -> HeldVersion:
        """Returns the version that all its ranks serve, and the digest that they attested."""
        status = await self._call("deltawire_status")
        if status.version < 0:
            raise RetryError(f"replica {self.name} has not loaded a version yet")
        return HeldVersion(status.version, status.digest, status.engine)

    async def load(self, version: int, *, cache: CacheReset) -> HeldVersion:
        """Has it prepare and swap, and waits until it has.

        ``cache`` needs no action: the prefix cache is keyed by version, so new requests never
        reuse what an older one computed. Raises `ResyncError` with the engine's reason if it
        could not swap.
        """
        del cache
        await self._call("deltawire_want", version)
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                while True:
                    status = await self._call("deltawire_status")
                    if status.version == version:
                        return HeldVersion(status.version, status.digest, status.engine)
                    if status.failure and status.phase == "serving":
                        raise ResyncError(
                            f"replica {self.name} stays at version {status.version}: "
                            f"{status.failure[:500]}",
                            version=version,
                        )
                    await asyncio.sleep(POLL_EVERY_S)
        except TimeoutError as error:
            raise RetryError(
                f"replica {self.name} still prepares version {version} after {LOAD_WITHIN_S:.0f} s"
            ) from error

    async def _call(self, method: str, *arguments: Any) -> EngineStatus:
        try:
            async with self._session.post(
                f"{self.base_url}/collective_rpc",
                json={"method": method, "args": [str(argument) for argument in arguments]},
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S),
                allow_redirects=False,
            ) as response:
                data = await read_limited(response.content, MAX_ANSWER_BYTES)
                if response.status != 200:
                    raise RetryError(
                        f"replica {self.name} answers {response.status} to {method}",
                        hint="start it with the deltawire plugin, vLLM with VLLM_SERVER_DEV_MODE=1",
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryError(
                f"replica {self.name} does not answer: {type(error).__name__}"
            ) from error
        try:
            return msgspec.json.decode(data, type=prepared(EngineStatuses)).results[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(
                f"replica {self.name}'s answer to {method} cannot be read: {str(error)[:200]}"
            ) from error
