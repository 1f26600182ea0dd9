"""Copies of users' requests for a candidate that no user sees yet.

Concurrency::

    request handler: user's answer is sent ─▶ `offer`, which never waits ─▶ dropped, or one task
    task: candidate's replica answers the copy ─▶ compared ─▶ `counts`, which the recorder stores

A copy starts after the user's answer has ended, and goes to a replica that holds the candidate
only. At most `MOST_AT_ONCE` are under way; what comes meanwhile is dropped and counted. Copies are
made of requests that may be captured. Nothing of a copy's answer is stored: only counts of the
guardrails that it touched and the user's answer did not, or the reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from deltawire.config.release import ReleaseConfig
from deltawire.errors import CorruptError
from deltawire.live.capture.guardrails import SILENT, AnswerFacts, touches
from deltawire.live.capture.marks import marks_of
from deltawire.live.gateway.engine_tokens import AnswerReader
from deltawire.live.gateway.events import DONE, EventSplitter, data_of
from deltawire.serving.replica_set import ReplicaSet, TrackedReplica
from deltawire.wire.captures import FAILED, ShadowCounts
from deltawire.wire.decisions import Decision

MOST_AT_ONCE = 4
WITHIN_S = 120.0
"""A copy that is not answered within this time is the candidate's failure."""
MAX_USERS = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
SERVER_ERROR = 500


class DroppedCopy(Exception):  # noqa: N818  (it names an event of a copy)
    """A copy says nothing of the candidate; the message is the reason that is counted."""


@dataclass(frozen=True)
class RequestCopy:
    """A request to copy: its path below the replica's URL, its body for a replica, the user's
    pseudonym, and the facts of the answer that the user got.

    Example::

        RequestCopy("/v1/chat/completions", exchange.body_for, user, AnswerFacts(finish="stop"))
    """

    path: str
    body_for: Callable[[TrackedReplica], bytes]
    user: str
    facts: AnswerFacts


class ShadowCopies:
    """The copies of one gateway. ``counts`` are those of the newest shadow.

    Example::

        copies = ShadowCopies(replicas, session, release)
        copies.follow(decision)
        copies.offer(RequestCopy("/v1/chat/completions", exchange.body_for, user, facts))
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        session: aiohttp.ClientSession,
        release: ReleaseConfig,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._release = release
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._decision: Decision | None = None
        self._users: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random()
        self._totals: dict[str, Counter[str]] = {}
        self.counts: ShadowCounts | None = None

    def follow(self, decision: Decision) -> None:
        """Copies requests for the shadow of this decision, and for no other any more."""
        if not decision.copies or decision.candidate is None:
            self._decision = None
            return
        if self.counts is None or self.counts.shadow != decision.salt:
            self.counts = ShadowCounts(shadow=decision.salt)
            self._totals = {name: Counter() for name in ("rose", "fell", "dropped")}
            self._users = set()
        self._decision = decision

    @property
    def copying(self) -> bool:
        """Returns whether requests are copied now."""
        return self._decision is not None

    def offer(self, request: RequestCopy) -> None:
        """Copies a request, or drops it; returns at once."""
        decision = self._decision
        if decision is None or not self._is_drawn(request.user, decision):
            return
        if len(self._tasks) >= MOST_AT_ONCE:
            self._drop("busy")
            return
        self._users.add(request.user)
        task = asyncio.get_running_loop().create_task(self._copy(request, decision))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends the copies that are under way."""
        self._decision = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_drawn(self, user: str, decision: Decision) -> bool:
        """Draw a request by the decision's share; with ``unit = "user"`` one of each user."""
        if self._release.unit == "user" and (
            not user or user in self._users or len(self._users) >= MAX_USERS
        ):
            return False
        return self._random.random() < decision.copies

    async def _copy(self, request: RequestCopy, decision: Decision) -> None:
        try:
            facts = await self._answered(request, decision)
        except DroppedCopy as dropped:
            if self._is_same(decision):
                self._drop(str(dropped))
            return
        if self._is_same(decision):
            self._compare(request.facts, facts)

    def _is_same(self, decision: Decision) -> bool:
        return self._decision is not None and self._decision.salt == decision.salt

    async def _answered(self, request: RequestCopy, decision: Decision) -> AnswerFacts:
        """Return the facts of the candidate's answer; raises `DroppedCopy`."""
        assert decision.candidate is not None
        version = decision.candidate.version
        member = self._replicas.pick(version=version)
        if member is None or member.held is None or member.held.version != version:
            raise DroppedCopy("no_replica")
        held = member.held
        try:
            async with asyncio.timeout(WITHIN_S):
                facts = await self._ask(member, request)
        except aiohttp.ClientConnectorError as error:
            raise DroppedCopy("no_replica") from error
        except (aiohttp.ClientError, TimeoutError):
            facts = AnswerFacts(finish=FAILED, first_s=WITHIN_S)
        if member.held not in (held, None):
            raise DroppedCopy("changed")
        return facts

    async def _ask(self, member: TrackedReplica, request: RequestCopy) -> AnswerFacts:
        clock = asyncio.get_running_loop().time
        began, first_s = clock(), 0.0
        reader, splitter, size, done = AnswerReader(), EventSplitter(), 0, False
        whole = bytearray()
        url, headers = member.replica.url(request.path), {**self._headers, **member.replica.headers}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        body = request.body_for(member)
        async with self._session.post(
            url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as upstream:
            if upstream.status >= SERVER_ERROR:
                return AnswerFacts(finish=FAILED, first_s=clock() - began)
            if upstream.status != 200:
                raise DroppedCopy("refused")
            streamed = "event-stream" in upstream.headers.get("Content-Type", "")
            async for piece in upstream.content.iter_any():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise DroppedCopy("too_large")
                if not streamed:
                    whole += piece
                    continue
                for event in splitter.feed(piece):
                    data = data_of(event)
                    done = done or data == DONE
                    if data and data != DONE:
                        first_s = first_s or clock() - began
                        _read(reader, data)
        if not streamed:
            first_s, done = clock() - began, True
            _read(reader, bytes(whole))
        return facts_of(reader, first_s) if done else AnswerFacts(finish=FAILED, first_s=first_s)

    def _compare(self, users: AnswerFacts, candidates: AnswerFacts) -> None:
        counts, release = self.counts, self._release
        assert counts is not None
        for name in release.guardrails:
            one, other = touches(name, candidates, release), touches(name, users, release)
            if name != SILENT and one != other:
                self._totals["rose" if one else "fell"][str(name)] += 1
        mine, theirs = counts.first_s
        self._store(
            copies=counts.copies + 1,
            first_s=(mine + candidates.first_s, theirs + users.first_s),
        )

    def _drop(self, reason: str) -> None:
        self._totals["dropped"][reason] += 1
        self._store()

    def _store(self, **changes: Any) -> None:
        """Replace the counts at once: another thread stores them."""
        assert self.counts is not None
        totals = {name: dict(counts) for name, counts in self._totals.items()}
        self.counts = msgspec.structs.replace(self.counts, **totals, **changes)


def facts_of(reader: AnswerReader, first_s: float) -> AnswerFacts:
    """Returns the facts of an answer's first choice."""
    choice = reader.choices.get(0)
    if choice is None:
        return AnswerFacts(finish=FAILED, first_s=first_s)
    return AnswerFacts(
        choice.finish,
        first_s,
        len(choice.ids) or reader.completion_tokens,
        choice.broken_calls,
        marks_of("".join(choice.text), calls=len(choice.calls)),
    )


def _read(reader: AnswerReader, data: bytes) -> None:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    if isinstance(body, dict):
        with contextlib.suppress(CorruptError):  # A choice that is none has failed.
            reader.read(body)
