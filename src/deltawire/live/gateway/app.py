"""The gateway's calls: answers with receipts, and feedback.

::

    POST /v1/chat/completions, /v1/completions   sampling   an answer with a receipt
    POST /v1/responses                           sampling   the same, in that API's form
    GET  /v1/models, /v1/models/{id}             sampling   the names of the model
    POST /v1/feedback                            sampling   one report about a receipt
    POST /v1/feedback/webhook                    signature  up to `MAX_REPORTS` reports
    GET  /v1/receipts/{id}                       sampling   the receipts of an answer by its id
    GET  /live/state                             admin      counters and rates
    GET  /live/clients                           admin      what each API key has used
    GET  /metrics                                admin      the same and histograms, for Prometheus

All other calls are those of `deltawire.serving.app`. A whole answer carries its receipt in the
header `RECEIPT_HEADER` and in its member ``deltawire``; a stream carries it in that member of its
last chunk, because versions are known when the last token is drawn. Text is passed on as it
arrives.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from deltawire.chat.requests import RequestDefaults
from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError, RetryError
from deltawire.live.capture.consent import CAPTURE_HEADER
from deltawire.live.feedback.intake import MAX_BODY_BYTES, Taken, UnknownReceiptError
from deltawire.live.gateway.answer_ids import AnswerIds
from deltawire.live.gateway.answer_rows import ServedRequest
from deltawire.live.gateway.client_forms import ChatForm, ClientForm
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.exchange import EXCHANGE, FAILURES, LiveExchange
from deltawire.live.gateway.model_names import ModelNames
from deltawire.live.gateway.options import check_choice_count, check_option_values, refuse_options
from deltawire.live.gateway.recorder import Recorder
from deltawire.live.gateway.requests import AskedAnswer, decode_body, read_asked
from deltawire.live.gateway.responses import ResponseForm, chat_of
from deltawire.live.gateway.routing import ArmRouter
from deltawire.live.gateway.shadow import RequestCopy, ShadowCopies
from deltawire.serving.app import (
    ANSWER,
    ANSWERS,
    CLIENTS,
    COMPLETIONS,
    LIST,
    MODEL,
    MODELS,
    PREFIXES,
    REPLICAS,
    RESPONSES,
    SESSION,
    WARNINGS,
    is_admin,
    json_answer,
    needs,
    path_of,
    route_of,
    session_of,
    to_replica,
)
from deltawire.serving.bodies import BodyBudget, read_body
from deltawire.serving.client_keys import CLIENT, CountedRequest
from deltawire.serving.errors import SERVER_ERROR, RequestError, error_answer, error_object
from deltawire.serving.replica_set import ReplicaSet
from deltawire.wire.captures import FAILED, LEFT

if TYPE_CHECKING:
    from deltawire.live.gateway.metrics import GatewayMetrics

USER_HEADER = "x-deltawire-user"
CONVERSATION_HEADER = "x-deltawire-conversation"
TASK_HEADER = "x-deltawire-task"
COHORT_HEADER = "x-deltawire-cohort"
SIGNATURE_HEADER = "x-deltawire-signature"
WEBHOOK = "/v1/feedback/webhook"
MAX_REPORTS = 1000
MOST_SHOWN = 64
MAX_WEBHOOK_BYTES = 8 << 20
WEBHOOKS_BYTES = 32 << 20
"""The budget of webhooks, apart from that of clients with a token: a body is read before its
signature can be checked."""
REFUSED_WORDS = "the model's server refused the request"
FAILED_WORDS = "the model's server failed"
"""They replace words by which servers of different providers differ."""
CLIENT_LEFT = 499
"""The status by which requests are counted whose client left before the end."""
COUNTED = frozenset({*ANSWERS, RESPONSES, MODELS, "/v1/feedback", WEBHOOK})
"""Routes that are counted: a client can ask for any other path."""


class LiveCalls:
    """The handlers of one gateway; `add_to` adds them to the application of its replicas.

    ``webhook_secret`` is the key of the webhook's HMAC-SHA256; without one there is no webhook.
    ``model_names`` are names by which clients may ask for the model.
    ``filters`` say what may be asked, and answered.
    """

    def __init__(
        self,
        recorder: Recorder,
        defaults: RequestDefaults,
        *,
        release: ReleaseConfig | None = None,
        webhook_secret: bytes = b"",
        model_names: Sequence[str] = (),
        filters: ContentFilter | None = None,
    ) -> None:
        self._recorder = recorder
        self._release = release or ReleaseConfig()
        self._copies: ShadowCopies | None = None
        self._defaults = defaults
        self._secret = webhook_secret
        self._webhooks = BodyBudget(WEBHOOKS_BYTES)
        self._metrics: GatewayMetrics | None = None
        self._ids = AnswerIds()
        self._given_names = model_names
        self._filters = filters or ContentFilter()
        self._filters.counts = recorder.counts
        self._names: ModelNames | None = None

    def add_to(self, app: web.Application) -> None:
        """Adds the calls to an application of `deltawire.serving.app.build_app`."""
        app[ANSWER], app[LIST], app[WARNINGS] = self._answer, self._models, self._recorder.warnings
        names = ModelNames(
            app[REPLICAS],
            app[SESSION],
            run=self._recorder.run_name,
            given=self._given_names,
            own=app[MODEL],
        )
        self._names = names
        self._recorder.upstreams = {
            m.replica.upstream: m.replica.model[:MOST_SHOWN]
            for m in app[REPLICAS].members
            if m.replica.upstream
        }
        self._recorder.replicas = app[REPLICAS].serving
        for prefix in PREFIXES:
            app.router.add_post(prefix + RESPONSES, self._answer)
            app.router.add_get(prefix + MODELS + "/{name:.+}", self._model, allow_head=False)
        app.router.add_post("/v1/feedback", self._feedback)
        if self._secret:
            app.router.add_post(WEBHOOK, self._webhook)
        app.router.add_get("/v1/receipts/{answer}", self._receipts_of)
        app.router.add_get("/live/state", self._state)
        app.router.add_get("/live/clients", self._clients)
        app.router.add_get("/metrics", self._metrics_text)
        self._metrics = _metrics_of(self._recorder, app)
        app.middlewares.append(self._measure)

        async def life(app: web.Application) -> Any:
            self._recorder.start(asyncio.get_running_loop())
            self._recorder.judges.start(app[SESSION])
            copies = ShadowCopies(app[REPLICAS], app[SESSION], self._release)
            self._copies, self._recorder.shadow = copies, lambda: copies.counts
            router = ArmRouter(app[REPLICAS], copies.follow)
            self._recorder.assign, self._recorder.generation = router.assignment, router.generation
            following = [asyncio.create_task(one.follow()) for one in (router, names)]
            yield
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await copies.close()
            await self._recorder.judges.close()
            await asyncio.to_thread(self._recorder.close)

        app.cleanup_ctx.append(life)

    @web.middleware
    async def _measure(
        self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Counts a request that has passed the check of its token."""
        metrics = self._metrics
        if metrics is None or route_of(request) not in COUNTED:
            return await handler(request)
        began, status = time.monotonic(), 500
        EXCHANGE.set(None)  # A connection's requests share a context.
        try:
            answer = await handler(request)
            status = answer.status
            return answer
        except asyncio.CancelledError:
            status = CLIENT_LEFT
            raise
        except RequestError as error:
            status = error.status
            raise
        except (InputError, RetryError) as error:
            status = 400 if isinstance(error, InputError) else 503
            raise
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            exchange = EXCHANGE.get()
            metrics.answered(
                route_of(request),
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

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        assert self._names is not None
        return json_answer({"object": "list", "data": self._names.listed()})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        assert self._names is not None
        name = request.match_info["name"]
        if name not in {one["id"] for one in self._names.listed()}:
            self._names.require(name)
        (model,) = self._names.listed()[:1]
        return json_answer({**model, "id": name})

    def _asked(self, request: web.Request, data: bytes) -> tuple[AskedAnswer, ClientForm]:
        """Reads a request; raises `InputError` for one that no upstream would answer as it says."""
        assert self._names is not None
        body = decode_body(data)
        body["model"] = self._names.check(body.get("model"))
        form: ClientForm = ChatForm()
        route = route_of(request)
        if route == RESPONSES:
            form, body = ResponseForm(body), chat_of(body)
        members = request.app[REPLICAS].members
        check_option_values(body, chat=route != COMPLETIONS)
        refuse_options(body, {m.held.engine for m in members if m.held is not None})
        asked = read_asked(body, chat=route != COMPLETIONS, defaults=self._defaults)
        check_choice_count(asked.choices)
        return asked, form

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        with request.app[CLIENTS].request(CLIENT.get()) as counted:
            return await self._answer_counted(request, counted)

    async def _answer_counted(
        self, request: web.Request, counted: CountedRequest
    ) -> web.StreamResponse:
        asked, form = self._asked(request, await read_body(request))
        await self._filters.check_request(request.app[SESSION], asked)
        session = session_of(request)
        headers = request.headers
        served = self._recorder.served(
            asked,
            {
                "user": headers.get(USER_HEADER, ""),
                "conversation": headers.get(CONVERSATION_HEADER, "") or session,
                "task": headers.get(TASK_HEADER, ""),
                "cohort": headers.get(COHORT_HEADER, ""),
                "client": CLIENT.get(),
                "capture": headers.get(CAPTURE_HEADER, ""),
            },
        )
        self._recorder.continued(served)
        if asked.chat and not session:
            session = served.affinity
        assert self._names is not None
        counted.reserve(asked.tokens)
        exchange = LiveExchange(
            served,
            self._recorder,
            self._ids,
            self._names,
            form,
            self._filters,
            reveal=is_admin(request),
            hides=_are_of_many(request.app[REPLICAS]),
        )
        if exchange.hides and asked.logprobs:
            raise RequestError(
                "logprobs is not honored by every server of this model",
                hint="leave it out",
                code="unsupported_parameter",
                param="logprobs",
            )
        EXCHANGE.set(exchange)
        metrics = self._metrics
        if metrics is not None:
            metrics.began(exchange.arm)
        try:
            with exchange.due_after(self._release.outcome_after_s):
                answer = await to_replica(
                    request, b"", exchange, session=session, version=served.assignment.version
                )
                if answer.status in FAILURES or answer.status >= SERVER_ERROR:
                    exchange.end(FAILED, "no replica takes requests")
                return _alike(answer) if exchange.hides else answer
        except RetryError as error:
            if exchange.hides:
                raise RetryError(FAILED_WORDS) from error
            raise
        finally:
            if metrics is not None:
                metrics.ended(exchange.arm)
            # Of an answer that its client left before anything came, nobody knows the tokens.
            unseen = exchange.finish == LEFT and not exchange.drawn
            counted.drawn = counted.reserved if unseen else exchange.drawn
            self._ids.dropped(exchange.name)
            self._offer(request, served, exchange)

    def _offer(self, request: web.Request, served: ServedRequest, exchange: LiveExchange) -> None:
        """Offers a request that may be stored as a copy, once its answer has ended."""
        copies, facts = self._copies, exchange.facts
        if copies is None or not copies.copying or facts is None or not served.capture:
            return
        if served.asked.body.get("n") in (None, 1):
            copies.offer(RequestCopy(path_of(request), exchange.body_for, served.user, facts))

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
                taken = Taken(404, error_object(404, str(error)))
            except InputError as error:
                taken = Taken(400, error_object(400, str(error)))
            results.append({"status": taken.status, **taken.body})
        return web.json_response({"results": results})

    @needs("admin")
    async def _clients(self, request: web.Request) -> web.StreamResponse:
        return json_answer({"clients": request.app[CLIENTS].used()})

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
    return GatewayMetrics(recorder.totals, replicas.taking_requests)


def _taken(taken: Taken) -> web.Response:
    headers = {"Retry-After": str(int(taken.after_s) + 1)} if taken.after_s else {}
    return web.json_response(taken.body, status=taken.status, headers=headers)


def _are_of_many(replicas: ReplicaSet) -> bool:
    """Returns whether the servers are of different providers; the run's replicas are one, also
    while none of them is there yet."""
    names = {one.replica.upstream for one in replicas.members} | (
        {""} if replicas.changes else set()
    )
    return len(names) > 1


def _alike(answer: web.StreamResponse) -> web.StreamResponse:
    """Returns an answer as servers of all providers give it: one status for all refusals, another
    one for all failures."""
    status = answer.status
    if status == 200:
        return answer
    if 400 <= status < SERVER_ERROR and status not in FAILURES:
        return error_answer(400, InputError(REFUSED_WORDS))
    return error_answer(503, RetryError(FAILED_WORDS))
