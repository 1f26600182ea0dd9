"""Model names: by which names clients may ask for the model, and what each upstream calls it.

Concurrency::

    one task of the event loop                           request handlers
      each minute: GET /v1/models of each replica          check(), name_at(), listed()
      that answers ─▶ the names that it lists              only read what is known

A request that names another model is refused with 404, as at OpenAI's API. While no replica has
stated its names, and none were given, every name is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.serving.errors import RequestError
from deltawire.serving.http_answers import read_limited
from deltawire.serving.replica_set import ReplicaSet, TrackedReplica
from deltawire.wire.objects import prepared

ANY_NAME = "*"
MAX_LIST_BYTES = 1 << 20
MAX_NAMES = 256
ANSWER_WITHIN_S = 5.0
POLL_EVERY_S = 60.0
RETRY_EVERY_S = 1.0
_LOG = logging.getLogger("deltawire.live")


class _ListedModel(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=256)]
    max_model_len: Any = None


class _ListedModels(msgspec.Struct):
    data: Annotated[list[_ListedModel], Meta(max_length=MAX_NAMES)]


class ModelNames:
    """The names of one gateway's model: those ``given`` and the run's, or else those that its
    replicas list and the run's. ``own`` is the replicas' name where the operator states it, as
    ``--model``.

    Example::

        names = ModelNames(replicas, session, run="support", given=["support-bot"])
        names.check(body)                      # RequestError if it names another model
        body["model"] = names.name_at(member, body["model"])
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        session: aiohttp.ClientSession,
        *,
        run: str,
        given: Sequence[str] = (),
        own: str = "",
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._run, self._given, self._own = run, tuple(given), own
        self._listed: dict[str, tuple[str, ...]] = {}
        self._lengths: dict[str, int] = {}
        """The most tokens of a prompt and its answer, of each replica that states them."""
        self._since = int(time.time())

    async def follow(self) -> None:
        """Asks the replicas for their names, until it is cancelled."""
        while True:
            asked = [m for m in self._replicas.members if m.held and not m.replica.model]
            waiting = [m for m in asked if not self._names_of(m)]
            await asyncio.gather(*(self._poll(member) for member in waiting or asked))
            known = all(self._names_of(m) for m in self._replicas.members)
            await asyncio.sleep(POLL_EVERY_S if known else RETRY_EVERY_S)

    def names(self) -> list[str]:
        """Returns the names that clients may use, the first of which is used where they give none;
        empty while none but the run's is known."""
        own = [one for one in self._replicas.members if not one.replica.upstream]
        learned = [name for member in own for name in self._names_of(member)]
        found = [*self._given] or [*([self._own] if self._own else []), *learned]
        return list(dict.fromkeys([*found, self._run])) if found else []

    def check(self, name: Any) -> str:
        """Returns the name that a request is answered under; raises `RequestError` if it names
        another model."""
        names = self.names()
        if name is None or name == "":
            return next((one for one in names if one != ANY_NAME), self._run)
        if not isinstance(name, str):
            raise RequestError("model is not a text", code="invalid_type", param="model")
        if names and name not in names:
            self.require(name)
        return name

    def require(self, name: str) -> None:
        """Raises `RequestError` for a name that is not listed, unless every name is taken."""
        if ANY_NAME in self._given:
            return
        listed = [one["id"] for one in self.listed()]
        raise RequestError(
            f"the model {name[:256]!r} does not exist",
            hint=f"this server has {', '.join(map(repr, listed[:8]))}",
            status=404,
            code="model_not_found",
            param="model",
        )

    def name_at(self, member: TrackedReplica, name: str) -> str:
        """Returns what a replica calls the model that a client calls ``name``."""
        own = member.replica.model or self._own
        if own:
            return own
        learned = self._names_of(member)
        return name if not learned or name in learned else learned[0]

    def listed(self) -> list[dict[str, Any]]:
        """Returns the objects of ``GET /v1/models``."""
        names = [one for one in self.names() if one != ANY_NAME] or [self._run]
        same = {"object": "model", "created": self._since, "owned_by": "deltawire"}
        own = [one for one in self._replicas.members if not one.replica.upstream]
        lengths = {self._lengths.get(one.replica.name) for one in own}
        if len(lengths) == 1 and None not in lengths and len(own) == len(self._replicas.members):
            same["max_model_len"] = lengths.pop()
        return [{"id": name, **same} for name in names]

    def _names_of(self, member: TrackedReplica) -> tuple[str, ...]:
        stated = member.replica.model
        return (stated,) if stated else self._listed.get(member.replica.name, ())

    async def _poll(self, member: TrackedReplica) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                names = await self._ask(member)
        except (DeltawireError, aiohttp.ClientError, TimeoutError, OSError) as error:
            _LOG.debug("replica %s lists no models: %s", member.replica.name, type(error).__name__)
            return
        self._listed[member.replica.name] = names

    async def _ask(self, member: TrackedReplica) -> tuple[str, ...]:
        async with self._session.get(
            member.replica.url("/v1/models"),
            headers=member.replica.headers,
            allow_redirects=False,
        ) as answer:
            data = await read_limited(answer.content, MAX_LIST_BYTES)
            if answer.status != 200:
                raise RetryError(f"status {answer.status}")
        try:
            found = msgspec.json.decode(data, type=prepared(_ListedModels))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError("no list of models") from error
        lengths = [one.max_model_len for one in found.data]
        self._lengths.pop(member.replica.name, None)
        if lengths and type(lengths[0]) is int and all(one == lengths[0] for one in lengths):
            self._lengths[member.replica.name] = lengths[0]
        return tuple(dict.fromkeys(one.id for one in found.data))
