"""Sends simulated users to a gateway, with OpenAI's client, and notes how satisfied they are.

::

    arrivals ─▶ one task for each request: ask ─▶ answer, receipt ─▶ (delay) ─▶ report
                                                     └─▶ `ServedNote`

Half of the requests ask for a stream. The notes are the simulator's own record, which no part of
the system under test can change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deltawire.errors import InputError
from deltawire.testing.users.population import (
    STYLES,
    Population,
    Reaction,
    SimulatedRequest,
    style_of,
)
from deltawire.wire.receipts import Receipt

AT_ONCE = 64
"""Requests in flight, at most; users who come while there are more find no place and leave."""
PATIENT_AT_ONCE = 16
"""The same where users wait for a place (`UserDriver.drive`): so few that an answer takes seconds
on a slow machine too: with 64, a fifth of the answers came after their outcome was due."""
ROOM_EVERY_S = 0.02
"""A user who waits for a place looks for one so often."""
REPORT_ATTEMPTS = 5
REPORT_PAUSE_S = 1.0


class ServedNote(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as its user saw it: seconds from the start until it ended, kind and style (empty
    if it has none), true satisfaction, the version that drew its first token (-1: not stated), arm,
    and what was reported after how many seconds (empty: silence)."""

    at: float
    took_s: float
    kind: str
    style: str
    role: str
    satisfaction: float
    version: int
    arm: str
    propensity: float
    reported: str = ""
    after_s: float = 0.0


@dataclass
class DriveResult:
    """The notes in the order of answers, and totals: ``asked``, ``failed`` answers,
    ``turned_away``, ``waited`` for a place, ``reports``, ``repeated`` reports, and ``refused``
    ones. ``seconds`` passed until the last request."""

    notes: list[ServedNote] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def satisfaction(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Returns the mean true satisfaction of answers between two times; NaN without any."""
        found = [n.satisfaction for n in self.notes if since <= n.at < until]
        return sum(found) / len(found) if found else float("nan")


class UserDriver:
    """Drives one gateway. Without ``model`` users ask for the gateway's own.

    ``claims`` opens a receipt, which users cannot; without it notes tell no arm and no version.

    Example::

        driver = UserDriver("http://127.0.0.1:8400", token, Population())
        result = await driver.drive(rate=20.0, seconds=60.0)
    """

    def __init__(
        self,
        url: str,
        token: str,
        population: Population,
        *,
        model: str = "",
        watch: Callable[[ServedNote], None] = lambda _: None,
        claims: Callable[[str], Receipt | None] = lambda _: None,
    ) -> None:
        try:
            import httpx
            import openai
        except ImportError as error:
            raise InputError(
                "the simulated users need OpenAI's client", hint="pip install openai"
            ) from error
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url[:80]!r} is not an http:// or https:// URL")
        self._errors: tuple[type[Exception], ...] = (openai.OpenAIError, httpx.HTTPError)
        """httpx's own if a stream breaks off: the client wraps only those of its start."""
        self._refusals = openai.APIStatusError
        self._client = openai.AsyncOpenAI(
            base_url=url.rstrip("/") + "/v1", api_key=token, max_retries=0, timeout=60.0
        )
        self._population = population
        self._model = model
        self._watch = watch
        self._claims = claims
        self.result = DriveResult()

    async def drive(
        self,
        *,
        rate: float,
        seconds: float = math.inf,
        requests: int | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> DriveResult:
        """Sends requests for some ``seconds``, then waits for the reports that are still to come.

        With ``requests`` it sends so many instead, at most ``rate`` a second: a user who finds no
        place waits for one, and all later users come later by as much. So a slow machine takes
        longer, and turns nobody away. ``stopping`` ends it early. Answers that fail are counted,
        not raised.
        """
        began = time.monotonic()
        waited = 0.0
        tasks: set[asyncio.Task[None]] = set()
        async with self._client:
            try:
                for number, due in enumerate(self._population.arrivals(rate)):
                    # This machine may not keep the rate.
                    late = time.monotonic() - began >= seconds
                    if late or waited + due >= seconds or number == requests or stopping():
                        break
                    await asyncio.sleep(max(0.0, began + waited + due - time.monotonic()))
                    self.result.counts["asked"] += 1
                    if requests is None and self._asking >= AT_ONCE:
                        self.result.counts["turned_away"] += 1
                        continue
                    if requests is not None and self._asking >= PATIENT_AT_ONCE:
                        self.result.counts["waited"] += 1
                        while self._asking >= PATIENT_AT_ONCE and not stopping():
                            await asyncio.sleep(ROOM_EVERY_S)
                        waited = max(waited, time.monotonic() - began - due)
                    self.result.seconds = time.monotonic() - began
                    task = asyncio.create_task(self._user(self._population.request(number), began))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                while tasks and not stopping():
                    await asyncio.wait(tasks, timeout=0.5)
            finally:  # Before the client is closed, also if an interrupt ends this.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self.result.notes.sort(key=lambda note: note.at)
        return self.result

    _asking = 0

    async def _user(self, request: SimulatedRequest, began: float) -> None:
        asked = time.monotonic()
        self._asking += 1
        try:
            text, receipt = await self._ask(request)
        except self._errors:
            self.result.counts["failed"] += 1
            return
        finally:
            self._asking -= 1
        at = time.monotonic() - began
        reactions = self._population.reactions(request, text, at)
        facts, style = self._claims(receipt), style_of(text)
        note = ServedNote(
            at=at,
            took_s=time.monotonic() - asked,
            kind=request.task,
            style="" if style is None else STYLES[style],
            role=request.user.role,
            satisfaction=self._population.satisfaction(request.kind, text, at),
            version=facts.spans[0][0] if facts is not None and facts.spans else -1,
            arm="" if facts is None else facts.arm,
            propensity=1.0 if facts is None else facts.propensity,
            reported=reactions[0].kind if reactions else "",
            after_s=reactions[0].after_s if reactions else 0.0,
        )
        self.result.notes.append(note)
        self._watch(note)
        waited = 0.0
        for place, reaction in enumerate(reactions):
            await asyncio.sleep(max(0.0, reaction.after_s - waited))
            waited = reaction.after_s
            await self._report(receipt, reaction, repeated=bool(place))

    async def _ask(self, request: SimulatedRequest) -> tuple[str, str]:
        """Returns an answer's text and receipt; empty if it has none."""
        options: Any = {
            "model": self._model,
            "messages": [{"role": "user", "content": request.text}],
            "extra_headers": {
                "x-deltawire-user": request.user.name,
                "x-deltawire-task": request.task,
                "x-deltawire-cohort": request.user.cohort,
                "x-deltawire-conversation": f"c{request.number}",
                "x-deltawire-capture": "true",
            },
        }
        if request.number % 2:
            answer = await self._client.chat.completions.create(**options)
            return answer.choices[0].message.content or "", _receipt_in(answer)
        parts: list[str] = []
        receipt = ""
        async for chunk in await self._client.chat.completions.create(**options, stream=True):
            parts += [choice.delta.content or "" for choice in chunk.choices]
            receipt = _receipt_in(chunk) or receipt
        return "".join(parts), receipt

    async def _report(self, receipt: str, reaction: Reaction, *, repeated: bool) -> None:
        body: dict[str, Any] = {
            "receipt": receipt, "kind": reaction.kind, "value": reaction.value, "id": reaction.id,
        }  # fmt: skip
        if reaction.text:
            body["text"] = reaction.text
        for attempt in range(REPORT_ATTEMPTS):
            try:
                await self._client.post("/feedback", body=body, cast_to=object)
                self.result.counts["repeated" if repeated else "reports"] += 1
                return
            except self._errors as error:
                refused = isinstance(error, self._refusals) and error.status_code < 500
                if refused or attempt == REPORT_ATTEMPTS - 1:
                    self.result.counts["refused"] += 1
                    return
            await asyncio.sleep(REPORT_PAUSE_S)


def _receipt_in(answer: Any) -> str:
    found = (answer.model_extra or {}).get("deltawire")
    receipt = found.get("receipt", "") if isinstance(found, dict) else ""
    return receipt if isinstance(receipt, str) else ""
