"""One answer: a request goes to a replica, and its answer with a receipt to the client.

::

    body ─▶ the replica's own form ─▶ replica ─▶ chunks ─▶ `ClientView` ─▶ the client's form
                                                   └▶ `AnswerReader` ─▶ receipt, row ─┘

Text is passed on as it arrives; only what ends the answer waits for the receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from deltawire.display import safe_line
from deltawire.errors import CorruptError, RetryError
from deltawire.live.capture.guardrails import AnswerFacts
from deltawire.live.feedback.client import RECEIPT_HEADER
from deltawire.live.gateway.answer_ids import ANSWER_HEADER, AnswerIds
from deltawire.live.gateway.answer_rows import ServedRequest
from deltawire.live.gateway.client_forms import ClientForm
from deltawire.live.gateway.common_form import CommonForm
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.engine_tokens import (
    MOST_CHOICES,
    AnswerReader,
    ChoiceTokens,
    ClientView,
)
from deltawire.live.gateway.events import DONE, EventSplitter, data_of
from deltawire.live.gateway.model_names import ModelNames
from deltawire.live.gateway.recorder import Recorder
from deltawire.live.gateway.shadow import facts_of
from deltawire.serving.app import (
    REPLICAS,
    SESSION,
    Tries,
    break_off,
    call_replica,
    headers_for,
    write_to_client,
)
from deltawire.serving.errors import SERVER_ERROR, ClientGoneError, error_answer, error_body
from deltawire.serving.replica_set import TrackedReplica
from deltawire.wire.captures import FAILED, FILTERED, LEFT, TIMED_OUT

MAX_ANSWER_BYTES = 64 << 20
FAILURES = frozenset({408, 425, 429})
"""Lower statuses by which a replica, or this server for it, does not answer what it could."""
UPSTREAM_FAULTS = frozenset({401, 402})
"""Statuses by which a provider refuses the gateway's own key."""
REFUSALS = frozenset({403, 404})
"""Statuses by which providers refuse a key or a model, but also what a client wrote."""
FAULT_CODES = frozenset(
    {"invalid_api_key", "account_deactivated", "model_not_found", "DeploymentNotFound"}
)
"""Codes of errors that come with `REFUSALS` where the key or the model is the cause."""
STREAM_WITHIN_S = 3600.0
"""Seconds that a replica may take for a stream, without those that its client takes."""
WHOLE_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-cache"}
STREAM_HEADERS = {**WHOLE_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
"""A server's own headers would tell which one it is."""
COMMENT = b": \n\n"
_LOG = logging.getLogger("deltawire.live")
PIECES_AT_ONCE = 64
"""Pieces of a stream that waited for the content filter, in one write."""
MOST_REASON = 1000
"""Characters of a replica's own words on why it refuses a request."""


_Shown = bytes | str | Mapping[str, Any]
"""A piece of a stream for the client: a comment, words on why the replica failed, or a chunk."""


@dataclass
class _StreamEvents:
    """The events of one stream: the chunks that end it, which wait for receipts, and whether it
    has ended."""

    splitter: EventSplitter
    held: list[Mapping[str, Any]] = field(default_factory=list)
    ended: bool = False


class _FilterFailed(Exception):  # noqa: N818  (no replica failed)
    """The content filter did not answer, and nothing may be shown without it."""


class LiveExchange:
    """Sends a request to a replica, and its answer with a receipt to the client.

    Whatever becomes of the answer, one row says so: its end, the replica's failure, the client's
    leaving, or that it was still under way when its outcome was due.
    """

    def __init__(
        self,
        served: ServedRequest,
        recorder: Recorder,
        ids: AnswerIds,
        names: ModelNames,
        form: ClientForm,
        filters: ContentFilter,
        *,
        reveal: bool,
        hides: bool = False,
    ) -> None:
        self.name = ids.new()
        self._ids = ids
        self._names = names
        self._form = form
        self._filters = filters
        asked = served.asked
        self._shown = ClientView(
            ids=asked.ids,
            logprobs=asked.logprobs,
            reveal=reveal,
            model=asked.given.get("model"),
        )
        self._mixed = hides
        self._common: CommonForm | None = None
        """Where servers of different providers answer, unless the client may know which."""
        checked = filters.checks_answers and bool(recorder.upstreams)  # Of known members only.
        if checked or (hides and not reveal):
            self._common = CommonForm(self.name, model=asked.given.get("model"), chat=asked.chat)
        self._served = served
        self._recorder = recorder
        self._began = time.monotonic()
        self._first_s = 0.0
        self._has_row = False
        self._held_bytes = 0
        self._was_tried = False
        self._storing: asyncio.Future[list[str]] | None = None
        self.finish = "whole"
        """How the answer ended: ``whole``, `FILTERED`, or a word of `ENDED_EARLY`."""
        self.drawn = 0
        """The tokens of the answer's choices, as the server counts them, else by its text."""
        self.facts: AnswerFacts | None = None
        """The facts of the answer once it has ended, by its end or by the replica's failure."""

    @property
    def arm(self) -> str:
        """The arm that the user is assigned to."""
        return self._served.assignment.arm

    @property
    def hides(self) -> bool:
        """True if the client must not tell servers of different providers apart."""
        return self._common is not None

    @property
    def first_s(self) -> float:
        """The seconds until the first token; 0 before it."""
        return self._first_s

    def body_for(self, member: TrackedReplica) -> bytes:
        """Returns the request as a replica takes it."""
        asked, held = self._served.asked, member.held
        model = self._names.name_at(member, str(asked.given.get("model") or ""))
        engine = "" if held is None else held.engine
        return asked.for_replica(capture=self._served.capture, engine=engine, model=model)

    @contextlib.contextmanager
    def due_after(self, seconds: float) -> Iterator[None]:
        """Waits for the answer's end within this block; its outcome is due after so many
        seconds. A block that is cancelled means that the client has left."""
        timer = asyncio.get_running_loop().call_later(seconds, self._overdue)
        try:
            yield
        except asyncio.CancelledError:
            self.end(LEFT, "the client left")
            raise
        finally:
            timer.cancel()

    def end(self, finish: str, reason: str) -> None:
        """Stores that the answer did not come to its end, unless a row says already what became of
        it."""
        if not self._has_row:
            self._has_row = True
            self.finish = finish
            waited_s = self._first_s or time.monotonic() - self._began
            if finish == FAILED:
                self.facts = AnswerFacts(finish=FAILED, first_s=waited_s)
            self._recorder.ended(self._served, finish, reason, waited_s)

    def _overdue(self) -> None:
        """Judges an answer that is still under way. Its end may still be stored, and is no outcome
        of the canary any more."""
        served = self._served
        if served.judged and not self._has_row:
            waited_s = self._first_s or time.monotonic() - self._began
            reason = "no end when its outcome was due"
            self._recorder.ended(served, TIMED_OUT, reason, waited_s, late=True)
            assignment = served.assignment._replace(propensity=1.0, kept=0.0)
            self._served = replace(served, assignment=assignment)

    async def __call__(
        self, request: web.Request, member: TrackedReplica, body: bytes, tries: Tries
    ) -> web.StreamResponse:
        """Sends the request to a replica, and its answer to the client."""
        del body  # Each replica gets its own form of the request.
        if self._was_tried and not self._served.retried:
            self._served = replace(self._served, retried=True)
        self._was_tried = True
        answer: web.StreamResponse | None = None
        replicas, held = request.app[REPLICAS], member.held
        self._confirmed = lambda: replicas.confirm(member, held)
        own = held is not None and not member.replica.upstream
        self._version = held.version if held is not None and own else None
        self._served = replace(self._served, upstream=member.replica.upstream, held=self._version)
        sent = self.body_for(member)
        try:
            stream = self._served.asked.stream
            async with call_replica(request, member, sent, stream=stream) as (upstream, pieces):
                headers = headers_for(request, member, upstream)
                streams = "event-stream" in headers.get("Content-Type", "")
                headers |= STREAM_HEADERS if streams and upstream.status == 200 else WHOLE_HEADERS
                headers[ANSWER_HEADER] = self.name
                if upstream.status >= SERVER_ERROR:
                    tries.answered(member, upstream.status)
                if upstream.status == 200 and streams:
                    first = await anext(pieces, b"")
                    answer = web.StreamResponse(headers=headers)
                    await answer.prepare(request)
                    reader = AnswerReader(self._most_choices())
                    try:
                        await self._stream(request, reader, first, pieces, answer)
                    finally:
                        self.drawn = max(self.drawn, reader.drawn)
                        self._filters.hold(-self._held_bytes)
                else:
                    answer = await self._whole(request, upstream, pieces, headers)
                refusal = member.replica.upstream and upstream.status in REFUSALS
                if upstream.status < SERVER_ERROR and not refusal:
                    tries.answered(member, upstream.status)
                return answer
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, TimeoutError, CorruptError, ClientGoneError) as error:
            # The replica's answer, not an object: the user's connection ends, and it is counted.
            transport = request.transport
            if isinstance(error, ClientGoneError) or transport is None or transport.is_closing():
                self.end(LEFT, "the client left")
            else:
                tries.may_retry &= answer is None
                tries.failed(member)
                self._recorder.counts["broken"] += 1
                self.end(FAILED, f"the replica failed: {type(error).__name__}")
            return break_off(request, member, answer, error)

    async def _receipts(self, reader: AnswerReader) -> list[str]:
        self._has_row = True
        self.facts = facts_of(reader, self._first_s)
        self._storing = asyncio.ensure_future(
            self._recorder.finish(
                self._served,
                reader,
                version=self._version,
                confirmed=self._confirmed,
                first_s=self._first_s,
            )
        )
        # A client that leaves now does not keep its answer from being stored.
        receipts = await asyncio.shield(self._storing)
        self._ids.ended(self.name, receipts)
        return receipts

    async def _whole(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        pieces: AsyncIterator[bytes],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        data = await _read_answer(pieces)
        self._first_s = time.monotonic() - self._began
        if 300 <= upstream.status < 400 or self._is_own_fault(upstream.status, data):
            # The gateway's own key or model: no client can do anything about it.
            _LOG.error("%s answers %d", self._served.upstream or "a replica", upstream.status)
            raise aiohttp.ClientPayloadError(f"status {upstream.status}")
        # Where providers differ in what they refuse, an arm is judged by its refusals too.
        refused = self._mixed and upstream.status != 200
        if refused or upstream.status >= SERVER_ERROR or upstream.status in FAILURES:
            self.end(FAILED, f"the replica failed: status {upstream.status}")
        if upstream.status >= SERVER_ERROR and not self._shown.reveal:
            # A replica's own words may name it, its version or the run.
            return error_answer(upstream.status, RetryError("the replica failed"))
        if upstream.status != 200:
            body = error_body(upstream.status, _reason_in(data))
            return web.Response(status=upstream.status, body=body, headers=headers)
        found = _object_of(data)
        if found is None:
            raise CorruptError("the replica's answer is no object with choices")
        reader = AnswerReader(self._most_choices())
        reader.read(found)
        shown = self._common.whole(found) if self._common else self._shown.of(found) or found
        try:
            shown, receipts = await self._filtered(request, reader, shown)
        except _FilterFailed as error:
            return error_answer(503, RetryError(str(error)))
        headers[RECEIPT_HEADER] = receipts[0]
        return web.Response(body=self._form.whole(shown, self._member(receipts)), headers=headers)

    async def _stream(
        self,
        request: web.Request,
        reader: AnswerReader,
        first: bytes,
        pieces: AsyncIterator[bytes],
        answer: web.StreamResponse,
    ) -> None:
        """Passes events on as they arrive; those that end the answer wait for the receipt."""
        found = _StreamEvents(EventSplitter())
        size, waited_s = 0, time.monotonic() - self._began
        checked: list[bytes] = []  # Nothing is shown before the filter has seen all.
        chunk = first
        while chunk:
            size += len(chunk)
            if size > MAX_ANSWER_BYTES or waited_s > STREAM_WITHIN_S:
                raise CorruptError(f"a stream of {size} bytes and {waited_s:.0f} s")
            shown = list(self._shown_of(reader, found, chunk))
            if self._filters.checks_answers:
                pieces_of = [msgspec.msgpack.encode(one) for one in shown]
                self._hold(sum(map(len, pieces_of)))
                checked += pieces_of
            elif shown:
                await write_to_client(request, answer, self._events_of(shown))
            asked = time.monotonic()
            chunk = await anext(pieces, b"")
            waited_s += time.monotonic() - asked
        if not found.ended or found.splitter.rest.strip():
            raise aiohttp.ClientPayloadError("the stream ended early")
        try:
            last, receipts = await self._filtered_stream(request, reader, found.held)
        except _FilterFailed as error:
            await write_to_client(request, answer, self._form.failed(str(error)))
        else:
            for start in range(0, len(checked) if last is found.held else 0, PIECES_AT_ONCE):
                part = checked[start : start + PIECES_AT_ONCE]
                await write_to_client(
                    request, answer, self._events_of(map(msgspec.msgpack.decode, part))
                )
            await write_to_client(request, answer, self._form.end(last, self._member(receipts)))
        await answer.write_eof()

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        self._filters.hold(size)

    def _shown_of(
        self, reader: AnswerReader, found: _StreamEvents, chunk: bytes
    ) -> Iterator[_Shown]:
        """Reads a piece of a stream; yields what the client gets of it, but for what ends the
        answer."""
        for event in found.splitter.feed(chunk):
            data = data_of(event)
            if data == DONE:
                found.ended = True
                continue
            if not data and event.startswith(b":") and self._common is None:
                yield COMMENT  # Some providers name themselves in theirs.
            body = _object_of(data) if data else None
            if body is None:
                if b'"error"' in data:
                    yield _reason_in(data) if self._shown.reveal else "the replica failed"
                continue
            for shown in self._read(reader, body):
                self._first_s = self._first_s or time.monotonic() - self._began
                if _is_final(shown):
                    found.held.append(shown)
                else:
                    yield shown

    def _events_of(self, shown: Iterable[_Shown]) -> bytes:
        """Returns the events of pieces: comments as they are, words on why the replica failed, and
        chunks."""
        out = []
        for one in shown:
            if isinstance(one, bytes):
                out.append(one)
            elif isinstance(one, str):
                out.append(self._form.failed(one))
            else:
                out.append(self._form.chunk(one))
        return b"".join(out)

    async def _filtered(
        self, request: web.Request, reader: AnswerReader, shown: dict[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the answer that the client gets, and its receipts."""
        if await self._allowed(request, reader):
            return shown, await self._receipts(reader)
        withheld, self.finish = _withheld(reader), FILTERED
        body = {"choices": [_ended_row(place, message=True) for place in withheld.choices]}
        return self._empty_form.whole(body), await self._receipts(withheld)

    async def _filtered_stream(
        self, request: web.Request, reader: AnswerReader, held: list[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Returns the chunks that end the stream, and the receipts: ``held``, or those of an answer
        that is withheld."""
        if await self._allowed(request, reader):
            return held, await self._receipts(reader)
        withheld, self.finish = _withheld(reader), FILTERED
        body = {"choices": [_ended_row(place, message=False) for place in withheld.choices]}
        last: list[Mapping[str, Any]] = list(self._empty_form.chunks(body))
        return last, await self._receipts(withheld)

    @property
    def _empty_form(self) -> CommonForm:
        asked = self._served.asked
        return CommonForm(self.name, model=asked.given.get("model"), chat=asked.chat)

    async def _allowed(self, request: web.Request, reader: AnswerReader) -> bool:
        self.drawn = reader.drawn
        if not self._filters.checks_answers:
            return True
        if any(one.opaque for one in reader.choices.values()):
            _LOG.error("an answer is withheld: it has members that no filter reads")
            return False
        texts = ["\n".join(one.texts()) for _, one in sorted(reader.choices.items())]
        try:
            return await self._filters.allows_answer(
                request.app[SESSION], self._served.asked, texts
            )
        except RetryError as error:
            # The filter failed, not the arm: nothing is an outcome of the canary.
            assignment = self._served.assignment._replace(propensity=1.0, kept=0.0)
            self._served = replace(self._served, assignment=assignment)
            self.end(FAILED, error.message)
            raise _FilterFailed(error.message) from error

    def _read(self, reader: AnswerReader, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Reads a chunk; returns the chunks that the client gets of it."""
        reader.read(body)
        if self._common is not None:
            return list(self._common.chunks(body))
        unasked = self._served.upstream and not self._served.asked.wants_usage
        if unasked and body.pop("usage", None) and not body.get("choices"):
            return []
        shown = self._shown.of(body)
        return [] if shown is None else [shown]

    def _most_choices(self) -> int:
        """Returns how many choices an answer may have: a provider's no more than were asked for."""
        return self._served.asked.choices if self._served.upstream else MOST_CHOICES

    def _is_own_fault(self, status: int, data: bytes) -> bool:
        """Returns whether a provider refuses the gateway's key or model, whatever a client asks."""
        if not self._served.upstream:
            return False
        return status in UPSTREAM_FAULTS or (status in REFUSALS and _code_in(data) in FAULT_CODES)

    def _member(self, receipts: list[str]) -> dict[str, Any]:
        member: dict[str, Any] = {"receipt": receipts[0]}
        if len(receipts) > 1:
            member["receipts"] = receipts
        if self._shown.reveal:
            member["revealed"] = [self._recorder.revealed(text) for text in receipts]
        return member


EXCHANGE: ContextVar[LiveExchange | None] = ContextVar("deltawire_exchange", default=None)
"""The exchange of the request that is being answered, for its metrics."""


def _withheld(reader: AnswerReader) -> AnswerReader:
    """Returns what is stored of an answer that is withheld: that each choice ended so."""
    found = AnswerReader()
    found.model = reader.model
    for place in sorted(reader.choices) or [0]:
        found.choices[place] = ChoiceTokens(finish=FILTERED)
    return found


def _ended_row(place: int, *, message: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"content": ""}
    return {"index": place, "message" if message else "delta": said, "finish_reason": FILTERED}


def _is_final(chunk: Mapping[str, Any]) -> bool:
    """Returns whether a chunk ends a choice, or tells of all of them."""
    rows = chunk.get("choices") or ()
    return not rows or any(row.get("finish_reason") for row in rows)


async def _read_answer(pieces: AsyncIterator[bytes]) -> bytes:
    data = bytearray()
    async for piece in pieces:
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise CorruptError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _object_of(data: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    rows = found.get("choices")
    return found if isinstance(rows, list) and all(isinstance(r, dict) for r in rows) else None


def _code_in(data: bytes) -> str:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def _reason_in(data: bytes) -> str:
    """Returns a replica's words on why it did not answer, in one line."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    reason = message if isinstance(message, str) and message else "the replica refused the request"
    return safe_line(reason)[:MOST_REASON]
