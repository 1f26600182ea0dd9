"""Traces of a gateway's requests, by OpenTelemetry: off unless an SDK is set up in the process.

::

    client's traceparent ─▶ span of the request ─▶ span of each call of a replica ─▶ its traceparent

Only OpenTelemetry's API is used, which costs nothing without an SDK. Its own command sets one up by
the usual variables: ``OTEL_EXPORTER_OTLP_ENDPOINT=… opentelemetry-instrument deltawire gateway …``.
Spans name the request's id, route, status and replica; never a user, a text, or a client's key.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from deltawire.serving.errors import ClientGoneError
from deltawire.serving.request_ids import REQUEST_ID, Handler

SERVER_ERROR = 500
CLIENT_LEFT = 499


class Traces:
    """The spans of one gateway.

    Example::

        traces = open_traces()
        if traces is not None:
            app.middlewares.append(traces.trace_request)
    """

    def __init__(self, trace: Any, propagate: Any, tracer: Any) -> None:
        self._trace, self._propagate, self._tracer = trace, propagate, tracer

    @contextmanager
    def call(self, replica: str, headers: MutableMapping[str, str], *, own: bool) -> Iterator[None]:
        """Begins the span of a call of a replica. ``headers`` get its trace, unless the replica is
        not ``own``: another provider learns nothing of it."""
        span = self._tracer.start_span(
            "call replica",
            kind=self._trace.SpanKind.CLIENT,
            attributes={"server.address": replica},
        )
        if own:
            self._propagate.inject(headers, context=self._trace.set_span_in_context(span))
        try:
            yield
        except ClientGoneError:
            raise
        except Exception as error:  # Cancellation, by a client that left, is none.
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._trace.StatusCode.ERROR)
            raise
        finally:
            span.end()

    @web.middleware
    async def trace_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Traces a request, as a part of the trace that its client states."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        with self._tracer.start_as_current_span(
            f"{request.method} {route}",
            context=self._propagate.extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "http.request.method": request.method,
                "http.route": route,
                "deltawire.request_id": REQUEST_ID.get(),
            },
            record_exception=False,
        ) as span:
            status = CLIENT_LEFT
            try:
                answer = await handler(request)
                status = answer.status
                return answer
            except web.HTTPException as error:
                status = error.status
                raise
            finally:
                span.set_attribute("http.response.status_code", status)
                if status >= SERVER_ERROR:
                    span.set_status(self._trace.StatusCode.ERROR)


def open_traces() -> Traces | None:
    """Returns the traces of this process; None where no SDK is set up, or no API is installed."""
    try:
        from opentelemetry import propagate, trace
    except ModuleNotFoundError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Traces(trace, propagate, provider.get_tracer("deltawire"))
