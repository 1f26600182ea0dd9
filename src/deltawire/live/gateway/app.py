"""The gateway's calls: answers with receipts, and feedback.

::

    POST /v1/chat/completions, /v1/completions   sampling   an answer with a receipt
    POST /v1/feedback                            sampling   one report about a receipt
    POST /v1/feedback/webhook                    signature  up to `MAX_REPORTS` reports
    GET  /v1/receipts/{id}                       sampling   the receipts of an answer by its id
    GET  /live/state                             admin      counters and rates
    GET  /metrics                                admin      the same and histograms, for Prometheus

All other calls are those of `deltawire.serving.app`. A whole answer carries its receipt in the
header `RECEIPT_HEADER` and in its member ``deltawire``; a stream carries it in that member of its
last chunk, because versions are known when the last token is drawn. Text is passed on as it
arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from deltawire.chat.requests import RequestDefaults
from deltawire.config.release import ReleaseConfig
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.live.capture.consent import CAPTURE_HEADER
from deltawire.live.capture.guardrails import AnswerFacts
from deltawire.live.feedback.client import RECEIPT_HEADER
from deltawire.live.feedback.intake import MAX_BODY_BYTES, Taken, UnknownReceiptError
from deltawire.live.gateway.answer_ids import ANSWER_HEADER, AnswerIds
from deltawire.live.gateway.answer_rows import ServedRequest
from deltawire.live.gateway.engine_tokens import AnswerReader, ClientView
from deltawire.live.gateway.events import DONE, EventSplitter, data_of
from deltawire.live.gateway.recorder import Recorder
from deltawire.live.gateway.requests import for_engine, read_asked
from deltawire.live.gateway.routing import ArmRouter
from deltawire.live.gateway.shadow import RequestCopy, ShadowCopies, facts_of
from deltawire.serving.app import (
    ANSWER,
    ANSWERS,
    KEY,
    MODEL,
    MODELS,
    REPLICAS,
    SERVER_ERROR,
    SESSION,
    WARNINGS,
    WRITE_WITHIN_S,
    Tries,
    break_off,
    call_replica,
    error_answer,
    headers_for,
    is_admin,
    json_answer,
    needs,
    path_of,
    session_of,
    to_replica,
    with_model,
)
from deltawire.serving.bodies import BodyBudget, read_body
from deltawire.serving.replica_set import TrackedReplica
from deltawire.wire.captures import FAILED, LEFT, TIMED_OUT

if TYPE_CHECKING:
    from deltawire.live.gateway.metrics import GatewayMetrics

USER_HEADER = "x-deltawire-user"
CONVERSATION_HEADER = "x-deltawire-conversation"
TASK_HEADER = "x-deltawire-task"
COHORT_HEADER = "x-deltawire-cohort"
SIGNATURE_HEADER = "x-deltawire-signature"
WEBHOOK = "/v1/feedback/webhook"
MAX_REPORTS = 1000
MAX_WEBHOOK_BYTES = 8 << 20
WEBHOOKS_BYTES = 32 << 20
"""The budget of webhooks, apart from that of clients with a token: a body is read before its
signature can be checked."""
MAX_ANSWER_BYTES = 64 << 20
AT_ONCE = 16 << 10
"""A smaller piece goes into the empty buffer of a connection without waiting."""
FAILED_EVENT = b'{"error":{"message":"the replica failed","type":"RetryError","code":500}}'
"""Takes the place of a stream's event that is no answer: it may name the replica or its version."""
CLIENT_LEFT = 499
"""The status by which requests are counted whose client left before the end."""
COUNTED = frozenset({*ANSWERS, MODELS, "/v1/feedback", WEBHOOK})
"""Routes that are counted: a client can ask for any other path."""
FAILURES = frozenset({408, 425, 429})
"""Lower statuses by which a replica, or this server for it, does not answer what it could."""


class LiveCalls:
    """The handlers of one gateway; `add_to` adds them to the application of its replicas.

    ``webhook_secret`` is the key of the webhook's HMAC-SHA256; without one there is no webhook.
    """

    def __init__(
        self,
        recorder: Recorder,
        defaults: RequestDefaults,
        *,
        release: ReleaseConfig | None = None,
        webhook_secret: bytes = b"",
    ) -> None:
        self._recorder = recorder
        self._release = release or ReleaseConfig()
        self._copies: ShadowCopies | None = None
        self._defaults = defaults
        self._secret = webhook_secret
        self._webhooks = BodyBudget(WEBHOOKS_BYTES)
        self._metrics: GatewayMetrics | None = None
        self._ids = AnswerIds()

    def add_to(self, app: web.Application) -> None:
        """Adds the calls to an application of `deltawire.serving.app.build_app`."""
        app[ANSWER], app[WARNINGS] = self._answer, self._recorder.warnings
        app.router.add_post("/v1/feedback", self._feedback)
        if self._secret:
            app.router.add_post(WEBHOOK, self._webhook)
        app.router.add_get("/v1/receipts/{answer}", self._receipts_of)
        app.router.add_get("/live/state", self._state)
        app.router.add_get("/metrics", self._metrics_text)
        self._metrics = _metrics_of(self._recorder, app)
        app.middlewares.append(self._measure)

        async def life(app: web.Application) -> Any:
            self._recorder.start(asyncio.get_running_loop())
            copies = ShadowCopies(app[REPLICAS], app[SESSION], self._release, key=app[KEY])
            self._copies, self._recorder.shadow = copies, lambda: copies.counts
            router = ArmRouter(app[REPLICAS], copies.follow)
            self._recorder.assign, self._recorder.generation = router.assignment, router.generation
            following = asyncio.create_task(router.follow())
            yield
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await copies.close()
            await asyncio.to_thread(self._recorder.close)

        app.cleanup_ctx.append(life)

    @web.middleware
    async def _measure(
        self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Counts a request that has passed the check of its token."""
        metrics = self._metrics
        if metrics is None or path_of(request) not in COUNTED:
            return await handler(request)
        began, status = time.monotonic(), 500
        _EXCHANGE.set(None)  # A connection's requests share a context.
        try:
            answer = await handler(request)
            status = answer.status
            return answer
        except asyncio.CancelledError:
            status = CLIENT_LEFT
            raise
        except (InputError, RetryError) as error:
            status = 400 if isinstance(error, InputError) else 503
            raise
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            exchange = _EXCHANGE.get()
            metrics.answered(
                path_of(request),
                exchange.arm if exchange else "",
                status,
                ended=exchange.finish if exchange else "whole",
                first_s=exchange.first_s if exchange else 0.0,
                whole_s=time.monotonic() - began,
            )

    @needs("admin")
    async def _metrics_text(self, request: web.Request) -> web.StreamResponse:
        del request
        if self._metrics is None:
            hint = "pip install 'deltawire[metrics]' where the gateway runs"
            return error_answer(501, InputError("prometheus-client is not installed", hint=hint))
        from deltawire.live.gateway.metrics import CONTENT_TYPE

        return web.Response(
            body=await asyncio.to_thread(self._metrics.text),
            headers={"Content-Type": CONTENT_TYPE},
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = with_model(await read_body(request), request.app[MODEL])
        chat = path_of(request).endswith("/chat/completions")
        asked = read_asked(body, chat=chat, defaults=self._defaults)
        session = session_of(request)
        headers = request.headers
        served = self._recorder.served(
            asked,
            {
                "user": headers.get(USER_HEADER, ""),
                "conversation": headers.get(CONVERSATION_HEADER, "") or session,
                "task": headers.get(TASK_HEADER, ""),
                "cohort": headers.get(COHORT_HEADER, ""),
                "capture": headers.get(CAPTURE_HEADER, ""),
            },
        )
        self._recorder.continued(served)
        if asked.chat and not session:
            session = served.affinity
        body = asked.for_replica(capture=served.capture)
        exchange = _LiveExchange(served, self._recorder, self._ids, reveal=is_admin(request))
        _EXCHANGE.set(exchange)
        metrics = self._metrics
        if metrics is not None:
            metrics.began(exchange.arm)
        try:
            with exchange.due_after(self._release.outcome_after_s):
                answer = await to_replica(
                    request, body, exchange, session=session, version=served.assignment.version
                )
                if answer.status in FAILURES or answer.status >= SERVER_ERROR:
                    exchange.end(FAILED, "no replica takes requests")
                return answer
        finally:
            if metrics is not None:
                metrics.ended(exchange.arm)
            self._ids.dropped(exchange.name)
            self._offer(request, served, body, exchange.facts)

    def _offer(
        self, request: web.Request, served: ServedRequest, body: bytes, facts: AnswerFacts | None
    ) -> None:
        """Offers a request that may be stored as a copy, once its answer has ended."""
        copies = self._copies
        if copies is None or not copies.copying or facts is None or not served.capture:
            return
        if served.asked.body.get("n") in (None, 1):
            copies.offer(RequestCopy(path_of(request), body, served.user, facts))

    async def _receipts_of(self, request: web.Request) -> web.StreamResponse:
        found = self._ids.receipts(request.match_info["answer"])
        if found is None:
            return error_answer(404, InputError("this gateway knows no answer with this id"))
        if not found:
            return error_answer(409, RetryError("the answer has not ended", hint="ask again"))
        return json_answer({"receipt": found[0], "receipts": found})

    async def _feedback(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, limit=MAX_BODY_BYTES)
        users = self._recorder.users(request.headers.get(USER_HEADER, ""))
        try:
            return _taken(await self._recorder.intake.take(body, users=users))
        except UnknownReceiptError as error:
            return error_answer(404, error)

    @needs("signature")
    async def _webhook(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, limit=MAX_WEBHOOK_BYTES, budget=self._webhooks)
        given = request.headers.get(SIGNATURE_HEADER, "").removeprefix("sha256=").encode()
        wanted = hmac.new(self._secret, body, "sha256").hexdigest().encode()
        if not hmac.compare_digest(given, wanted):
            return error_answer(401, InputError("the webhook's signature is not valid"))
        try:
            reports = msgspec.json.decode(body, type=list[msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InputError("the webhook's body is not a list of reports") from error
        if len(reports) > MAX_REPORTS:
            raise InputError(f"{len(reports)} reports; send at most {MAX_REPORTS} at a time")
        results = []
        for report in reports:
            try:
                taken = await self._recorder.intake.take(bytes(report), source="webhook")
            except UnknownReceiptError as error:
                taken = Taken(404, {"error": {"message": str(error), "code": 404}})
            except InputError as error:
                taken = Taken(400, {"error": {"message": str(error), "code": 400}})
            results.append({"status": taken.status, **taken.body})
        return web.json_response({"results": results})

    @needs("admin")
    async def _state(self, request: web.Request) -> web.StreamResponse:
        del request
        return json_answer(self._recorder.state())


def _metrics_of(recorder: Recorder, app: web.Application) -> GatewayMetrics | None:
    """Returns the gateway's metrics; None where Prometheus' client is not installed."""
    try:
        from deltawire.live.gateway.metrics import GatewayMetrics
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        return None
    replicas = app[REPLICAS]
    return GatewayMetrics(lambda: recorder.state().counts, replicas.taking_requests)


class _ClientLeft(Exception):  # noqa: N818  (it names an event of a request)
    """The client took no more of its answer."""


class _LiveExchange:
    """Sends a request to a replica, and its answer with a receipt to the client.

    Whatever becomes of the answer, one row says so: its end, the replica's failure, the client's
    leaving, or that it was still under way when its outcome was due.
    """

    def __init__(
        self, served: ServedRequest, recorder: Recorder, ids: AnswerIds, *, reveal: bool
    ) -> None:
        self.name = ids.new()
        self._ids = ids
        asked = served.asked
        self._shown = ClientView(
            ids=asked.ids, logprobs=asked.logprobs, reveal=reveal, model=asked.given.get("model")
        )
        self._served = served
        self._recorder = recorder
        self._began = time.monotonic()
        self._first_s = 0.0
        self._has_row = False
        self._was_tried = False
        self._storing: asyncio.Future[list[str]] | None = None
        self.finish = "whole"
        """How the answer ended: ``whole``, or a word of `ENDED_EARLY`."""
        self.facts: AnswerFacts | None = None
        """The facts of the answer once it has ended, by its end or by the replica's failure."""

    @property
    def arm(self) -> str:
        """The arm that the user is assigned to."""
        return self._served.assignment.arm

    @property
    def first_s(self) -> float:
        """The seconds until the first token; 0 before it."""
        return self._first_s

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
            self._recorder.ended(served, TIMED_OUT, "no end when its outcome was due", waited_s)
            assignment = served.assignment._replace(propensity=1.0, kept=0.0)
            self._served = replace(served, assignment=assignment)

    async def __call__(
        self, request: web.Request, member: TrackedReplica, body: bytes, tries: Tries
    ) -> web.StreamResponse:
        if self._was_tried and not self._served.retried:
            self._served = replace(self._served, retried=True)
        self._was_tried = True
        answer: web.StreamResponse | None = None
        replicas, held = request.app[REPLICAS], member.held
        self._confirmed = lambda: replicas.confirm(member, held)
        self._version = None if held is None else held.version
        if held is not None:
            body = for_engine(body, held.engine, chat=self._served.asked.chat)
        try:
            stream = self._served.asked.stream
            async with call_replica(request, member, body, stream=stream) as (upstream, pieces):
                headers = headers_for(request, member, upstream)
                headers[ANSWER_HEADER] = self.name
                if upstream.status >= SERVER_ERROR:
                    tries.answered(member, upstream.status)
                if upstream.status == 200 and "event-stream" in headers.get("Content-Type", ""):
                    first = await anext(pieces, b"")
                    answer = web.StreamResponse(headers=headers)
                    await answer.prepare(request)
                    await self._stream(request, first, pieces, answer)
                else:
                    answer = await self._whole(upstream, pieces, headers)
                if upstream.status < SERVER_ERROR:
                    tries.answered(member, upstream.status)
                return answer
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, TimeoutError, CorruptError, _ClientLeft) as error:
            # The replica's answer, not an object: the user's connection ends, and it is counted.
            transport = request.transport
            if isinstance(error, _ClientLeft) or transport is None or transport.is_closing():
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
        upstream: aiohttp.ClientResponse,
        pieces: AsyncIterator[bytes],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        data = await _read_answer(pieces)
        self._first_s = time.monotonic() - self._began
        if upstream.status >= SERVER_ERROR or upstream.status in FAILURES:
            self.end(FAILED, f"the replica failed: status {upstream.status}")
        if upstream.status >= SERVER_ERROR and not self._shown.reveal:
            # A replica's own words may name it, its version or the run.
            return error_answer(upstream.status, RetryError("the replica failed"))
        if upstream.status != 200:
            return web.Response(status=upstream.status, body=data, headers=headers)
        reader = AnswerReader()
        if (body := _object_of(data)) is not None:
            reader.read(body)
            data = msgspec.json.encode(self._shown.of(body) or body)
        receipts = await self._receipts(reader)
        headers[RECEIPT_HEADER] = receipts[0]
        return web.Response(body=self._with_receipts(data, receipts), headers=headers)

    async def _stream(
        self,
        request: web.Request,
        first: bytes,
        pieces: AsyncIterator[bytes],
        answer: web.StreamResponse,
    ) -> None:
        """Passes events on as they arrive; those that end the answer wait for the receipt."""
        reader, splitter = AnswerReader(), EventSplitter()
        held: list[bytes] = []
        ended = False
        chunk = first
        while chunk:
            out: list[bytes] = []
            for event in splitter.feed(chunk):
                data = data_of(event)
                if data == DONE:
                    ended = True
                    continue
                data, final = self._read(reader, data) if data else (data, False)
                if not self._first_s and data:
                    self._first_s = time.monotonic() - self._began
                if final:
                    held.append(data)
                elif data:
                    out.append(b"data: %s\n\n" % data)
                elif event.startswith(b":"):
                    out.append(event + b"\n\n")
            if out:
                await _write(request, answer, b"".join(out))
            chunk = await anext(pieces, b"")
        if not ended or splitter.rest.strip():
            raise aiohttp.ClientPayloadError("the stream ended early")
        receipts = await self._receipts(reader)
        if held:
            held[-1] = self._with_receipts(held[-1], receipts)
        await _write(request, answer, b"".join(b"data: %s\n\n" % one for one in [*held, DONE]))
        await answer.write_eof()

    def _read(self, reader: AnswerReader, data: bytes) -> tuple[bytes, bool]:
        """Read a chunk; returns what the client gets of it, and whether it ends a choice."""
        body = _object_of(data)
        if body is None:
            hidden = b'"error"' in data and not self._shown.reveal
            return (FAILED_EVENT if hidden else data), False
        reader.read(body)
        rows = body.get("choices") or ()
        final = not rows or any(row.get("finish_reason") for row in rows)
        shown = self._shown.of(body)
        return (b"" if shown is None else msgspec.json.encode(shown)), final and shown is not None

    def _with_receipts(self, data: bytes, receipts: list[str]) -> bytes:
        member: dict[str, Any] = {"receipt": receipts[0]}
        if len(receipts) > 1:
            member["receipts"] = receipts
        if self._shown.reveal:
            member["revealed"] = [self._recorder.revealed(text) for text in receipts]
        return _with_member(data, member)


_EXCHANGE: ContextVar[_LiveExchange | None] = ContextVar("deltawire_exchange", default=None)
"""The exchange of the request that is being answered, for its metrics."""


async def _write(request: web.Request, answer: web.StreamResponse, data: bytes) -> None:
    transport = request.transport
    if transport is not None and len(data) < AT_ONCE and not transport.get_write_buffer_size():
        try:
            await answer.write(data)  # The client took everything before: this does not wait.
        except ConnectionError as error:
            raise _ClientLeft from error
        return
    try:
        async with asyncio.timeout(WRITE_WITHIN_S):
            await answer.write(data)
    except (TimeoutError, ConnectionError) as error:
        raise _ClientLeft from error


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


def _with_member(data: bytes, member: dict[str, Any]) -> bytes:
    """Returns a JSON object with the member ``deltawire`` added, without decoding it."""
    whole = data.rstrip()
    if not whole.endswith(b"}"):
        return data
    comma = b"" if whole[:-1].rstrip().endswith(b"{") else b","
    return whole[:-1] + comma + b'"deltawire":' + msgspec.json.encode(member) + b"}"


def _taken(taken: Taken) -> web.Response:
    headers = {"Retry-After": str(int(taken.after_s) + 1)} if taken.after_s else {}
    return web.json_response(taken.body, status=taken.status, headers=headers)
