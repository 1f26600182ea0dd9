"""Judges by URL: another server scores answers, as feedback that no client sends.

::

    stored answer ─▶ a share of them ─▶ queue ─▶ POST {request, answer} ─▶ {"value": 0 … 1}
                                     (full: dropped)                 └─▶ feedback judged_NAME

A judge gets only what may be stored, redacted as it is stored, and neither user, arm nor version.
Its scores count where ``live.rewards`` or ``live.release.metric`` name ``judged_NAME``; they are no
words of users, so they have no part in satisfaction.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.config.ranges import JUDGED
from deltawire.errors import CorruptError
from deltawire.serving.http_answers import post_json
from deltawire.wire.captures import Feedback
from deltawire.wire.receipts import Receipt

ANSWER_WITHIN_S = 60.0
MAX_ANSWER_BYTES = 64 << 10
MOST_WAITING = 256
"""Answers that wait for one judge; further ones are dropped and counted, as are those of more than
`MOST_CHARACTERS`, request included."""
MOST_CHARACTERS = 1 << 18
AT_ONCE = 4
_LOG = logging.getLogger("deltawire.live")


class Score(msgspec.Struct, frozen=True):
    """A judge's answer: from 0, the worst, to 1, the best; null without an opinion."""

    value: Annotated[float, Meta(ge=0, le=1)] | None


@dataclass(frozen=True)
class Judge:
    """One judge. It scores the ``share`` of stored answers; ``key`` is sent as a bearer token."""

    name: str
    url: str
    key: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class StoredAnswer:
    """An answer that was stored: its receipt, and its redacted texts."""

    receipt: Receipt
    request: Sequence[str]
    answer: str

    @property
    def size(self) -> int:
        """The characters of its texts."""
        return sum(map(len, self.request)) + len(self.answer)


class Judges:
    """The judges of one gateway. ``note`` stores the reports that they give, and
    ``on_noted`` gets each.

    Example::

        judges = Judges([Judge("safety", "https://judge.example.com/v1")], note)
        judges.start(session)
        judges.offer(StoredAnswer(receipt, ["Where is my order?"], "On its way."))
    """

    def __init__(
        self,
        judges: Sequence[Judge],
        note: Callable[[Iterable[Feedback]], object],
        on_noted: Callable[[Feedback], object] = lambda _: None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._note, self._on_noted = note, on_noted
        self._queues = {one: asyncio.Queue[StoredAnswer](MOST_WAITING) for one in judges}
        self._tasks: list[asyncio.Task[None]] = []
        self._faults: dict[str, str] = {}

    def start(self, session: aiohttp.ClientSession) -> None:
        """Starts scoring, on the running event loop."""
        self._tasks = [
            asyncio.create_task(self._score_all(session, judge, queue))
            for judge, queue in self._queues.items()
            for _ in range(AT_ONCE)
        ]

    async def close(self) -> None:
        """Stops; answers that wait are not scored."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def offer(self, stored: StoredAnswer) -> None:
        """Has an answer scored later, unless it has no text. Returns at once."""
        if not stored.answer.strip():
            return
        if stored.size > MOST_CHARACTERS:
            self.counts["dropped"] += 1
            return
        for judge, queue in self._queues.items():
            if not _is_drawn(judge, stored.receipt.answer):
                continue
            try:
                queue.put_nowait(stored)
            except asyncio.QueueFull:
                self.counts["dropped"] += 1

    async def _score_all(
        self,
        session: aiohttp.ClientSession,
        judge: Judge,
        queue: asyncio.Queue[StoredAnswer],
    ) -> None:
        while True:
            stored = await queue.get()
            try:
                score = await post_json(
                    session,
                    judge.url,
                    {"judge": judge.name, "request": stored.request, "answer": stored.answer},
                    Score,
                    key=judge.key,
                    limit=MAX_ANSWER_BYTES,
                    within_s=ANSWER_WITHIN_S,
                )
            except CorruptError as error:
                # A damaged score counts as no score, and no request waits for it.
                self.counts["failed"] += 1
                if self._faults.get(judge.name) != error.message:
                    _LOG.error("the judge %s gives no score: %s", judge.name, error.message)
                self._faults[judge.name] = error.message
                continue
            self._faults.pop(judge.name, None)
            if score.value is None:
                self.counts["no_opinion"] += 1
            else:
                self.counts["scored"] += 1
                report = _report(judge, stored.receipt, score.value)
                self._note([report])
                self._on_noted(report)


def _is_drawn(judge: Judge, answer: str) -> bool:
    """Returns whether a judge scores an answer: by a hash, so that no other fact has a part."""
    digest = blake3(f"judge\0{judge.name}\0{answer}".encode()).digest(8)
    return int.from_bytes(digest, "little") < judge.share * 2**64


def _report(judge: Judge, receipt: Receipt, value: float) -> Feedback:
    now, kind = time.time(), f"{JUDGED}{judge.name.replace('-', '_')}"
    return Feedback(
        id=f"{kind}-{receipt.answer}",
        answer=receipt.answer,
        conversation=receipt.conversation,
        user=receipt.user,
        arm=receipt.arm,
        kind=kind,
        value=value,
        source="detector",  # Releases before judges refuse rows of a source that they do not know.
        at=now,
        received=now,
        served_at=receipt.at,
        recorded=receipt.recorded,
    )
