"""A replica that is a ``vllm serve`` with the deltawire plugin, led over its own HTTP calls."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from deltawire.engines.vllm.remote import MAX_ANSWER_BYTES, Status, Statuses
from deltawire.errors import CorruptError, ResyncError, RetryError
from deltawire.serving.contract import CacheReset
from deltawire.serving.replica import Held

ASK_EVERY_S = 0.05
ANSWER_WITHIN_S = 30.0
LOAD_WITHIN_S = 3600.0


class VllmReplica:
    """Talks to the ``/collective_rpc`` of a server that was started with
    ``VLLM_SERVER_DEV_MODE=1`` and ``--additional-config '{"deltawire": {"follow": false, …}}'``.

    ``key`` is the server's own ``--api-key``. The session belongs to the caller.
    """

    def __init__(self, base_url: str, session: aiohttp.ClientSession, *, key: str = "") -> None:
        self._base_url = base_url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def name(self) -> str:
        """Its address."""
        return self._base_url.split("://")[-1]

    @property
    def base_url(self) -> str:
        """Where its OpenAI-compatible endpoints are."""
        return self._base_url

    async def held(self) -> Held:
        """The version that all its ranks serve, and the digest that they attested together."""
        status = await self._call("deltawire_status")
        if status.version < 0:
            raise RetryError(f"replica {self.name} has not loaded a version yet")
        return Held(status.version, status.digest)

    async def load(self, version: int, *, cache: CacheReset) -> Held:
        """Have it prepare and swap, and wait for it.

        vLLM's prefix cache is keyed by version, so that no new request meets an old one's, and
        ``cache`` needs nothing done. Raises `ResyncError` with the engine's own words if it could
        not.
        """
        del cache
        await self._call("deltawire_want", version)
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                while True:
                    status = await self._call("deltawire_status")
                    if status.version == version:
                        return Held(status.version, status.digest)
                    if status.failure and status.phase == "serving":
                        raise ResyncError(
                            f"replica {self.name} stays at version {status.version}: "
                            f"{status.failure[:500]}",
                            version=version,
                        )
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError as error:
            raise RetryError(f"replica {self.name} still prepares version {version}") from error

    async def _call(self, method: str, *arguments: Any) -> Status:
        try:
            async with self._session.post(
                f"{self._base_url}/collective_rpc",
                json={"method": method, "args": [str(argument) for argument in arguments]},
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S),
                allow_redirects=False,
            ) as response:
                data = await _whole(response.content)
                if response.status != 200:
                    raise RetryError(
                        f"replica {self.name} answers {response.status} to {method}",
                        hint="start it with VLLM_SERVER_DEV_MODE=1 and the deltawire plugin",
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise RetryError(f"replica {self.name} does not answer: {reason}") from error
        try:
            return msgspec.json.decode(data, type=Statuses).results[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(
                f"replica {self.name} answers {method} with something else: {str(error)[:200]}"
            ) from error


async def _whole(content: aiohttp.StreamReader) -> bytes:
    """An answer to its end; raises `CorruptError` for one of more than `MAX_ANSWER_BYTES`."""
    data = bytearray()
    async for piece in content.iter_any():
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise CorruptError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)
