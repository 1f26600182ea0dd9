"""Traces of requests: a span of the gateway in the client's trace, and one of each call."""

import asyncio
from types import SimpleNamespace

import pytest
from live_gateway import TokenReplica, live_serving, published
from opentelemetry import trace
from test_gateway_upstreams import Provider, beside

from deltawire.serving.app import write_to_client
from deltawire.serving.errors import ClientGoneError
from deltawire.serving.tracing import open_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class KeptSpan(trace.NonRecordingSpan):
    """A span that keeps what it is told."""

    def __init__(self, name, context, parent, attributes):
        super().__init__(context)
        self.name, self.parent, self.attributes = name, parent, dict(attributes or {})
        self.ended, self.status = False, None

    def set_attribute(self, key, value):
        self.attributes[key] = value

    def set_status(self, status, description=None):
        self.status = status

    def end(self, end_time=None):
        self.ended = True


class Tracer(trace.Tracer):
    def __init__(self):
        self.spans = []

    def start_span(self, name, context=None, kind=None, attributes=None, **_):
        parent = trace.get_current_span(context).get_span_context()
        number = parent.trace_id if parent.is_valid else 77
        own = trace.SpanContext(number, len(self.spans) + 1, False, trace.TraceFlags(1))
        self.spans.append(KeptSpan(name, own, parent.span_id, attributes))
        return self.spans[-1]

    def start_as_current_span(self, name, **options):
        options = {key: options[key] for key in options if key != "record_exception"}
        return trace.use_span(self.start_span(name, **options), end_on_exit=True)


class KeptProvider(trace.TracerProvider):
    def __init__(self):
        self.tracer = Tracer()

    def get_tracer(self, *_, **__):
        return self.tracer


@pytest.fixture
def spans(monkeypatch):
    provider = KeptProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider.tracer.spans


class NotingReplica(TokenReplica):
    """Keeps the headers that it got."""

    def __init__(self, *args):
        super().__init__(*args)
        self.headers = []

    async def chat(self, request):
        self.headers.append(request.headers)
        return await super().chat(request)


def run(tmp_path, monkeypatch, scenario, **options):
    async def go():
        options["replica"] = NotingReplica
        async with live_serving(published(), tmp_path, monkeypatch, **options) as at:
            await scenario(at, at.fake.headers)

    asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_part_of_its_clients_trace(tmp_path, monkeypatch, spans, stream):
    async def scenario(at, seen):
        del spans[:], seen[:]
        body = {"model": "m", "messages": [{"role": "user", "content": "SECRET"}]}
        status, _, _ = await at.call(
            "POST", "/v1/chat/completions", json=body | {"stream": stream},
            headers=STATED | {"x-deltawire-user": "ann", "x-request-id": "r1"},
        )  # fmt: skip
        assert status == 200
        request, call = [one for one in spans if one.name.startswith(("POST", "call"))]
        assert request.name == "POST /v1/chat/completions"
        assert f"{request.get_span_context().trace_id:032x}" == TRACE
        assert f"{request.parent:016x}" == PARENT
        assert call.parent == request.get_span_context().span_id
        assert request.attributes["http.response.status_code"] == 200
        assert request.attributes["deltawire.request_id"] == "r1"
        (sent,) = [one["traceparent"] for one in seen if "traceparent" in one]
        assert sent == f"00-{TRACE}-{call.get_span_context().span_id:016x}-01"
        told = str([(one.name, one.attributes) for one in spans])
        assert "SECRET" not in told
        assert "ann" not in told
        assert all(one.ended for one in spans)

    run(tmp_path, monkeypatch, scenario)


def test_failures_are_errors_of_their_spans(tmp_path, monkeypatch, spans):
    async def scenario(at, seen):
        at.fake.mode = "fail"
        del spans[:]
        assert (await at.ask("Hi"))[0] == 500
        request = next(one for one in spans if one.name.startswith("POST"))
        assert request.status == trace.StatusCode.ERROR
        assert request.attributes["http.response.status_code"] == 500
        del spans[:]
        assert (await at.call("POST", "/v1/chat/completions", data=b"{"))[0] == 400
        (request,) = [one for one in spans if one.name.startswith("POST")]
        assert request.status is None
        assert all(one.ended for one in spans)

    run(tmp_path, monkeypatch, scenario)


def test_another_provider_learns_nothing_of_a_trace(tmp_path, monkeypatch, spans):
    headers = []

    class Noting(Provider):
        async def chat(self, request):
            headers.append(request.headers)
            return await super().chat(request)

    async def scenario(at, seen):
        status, _, _ = await at.call(
            "POST", "/v1/chat/completions", headers=STATED,
            json={"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]},
        )  # fmt: skip
        assert status == 200
        assert "traceparent" not in headers[0]
        assert any(one.name == "call replica" for one in spans)
        await provider.server.close()

    provider = Noting()
    run(tmp_path, monkeypatch, scenario, **beside(provider))


def test_without_an_sdk_nothing_is_traced_or_passed_on(tmp_path, monkeypatch):
    async def scenario(at, seen):
        headers = STATED | {"x-deltawire-user": "ann"}
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        await at.call("POST", "/v1/chat/completions", json=body, headers=headers)
        assert seen
        assert not any("traceparent" in one for one in seen)

    run(tmp_path, monkeypatch, scenario)


def test_a_client_that_leaves_is_no_error_of_a_replica(spans):
    traces = open_traces()
    for error, failed in (
        (asyncio.CancelledError, False), (ClientGoneError, False), (ConnectionError, True),
    ):  # fmt: skip
        with pytest.raises(error), traces.call("http://r", {}, own=True):
            raise error
        assert (spans[-1].status is not None, spans[-1].ended) == (failed, True)


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError])
@pytest.mark.parametrize("length", [1, 1 << 20])
def test_what_a_client_does_not_take_is_never_the_replicas_error(error, length):
    class Closed:
        async def write(self, data):
            raise error

    request = SimpleNamespace(transport=SimpleNamespace(get_write_buffer_size=lambda: 0))
    with pytest.raises(ClientGoneError):
        asyncio.run(write_to_client(request, Closed(), bytes(length)))
