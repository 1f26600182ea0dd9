"""An upstream whose answers are wrong, endless or refusals, and what becomes of them."""

import asyncio
import hashlib
import json
import sys
from dataclasses import replace

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from live_gateway import ADMIN, live_serving, published

from deltawire.chat.requests import RequestDefaults
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.launch.upstreams import read_upstreams
from deltawire.live.gateway import exchange, user_figures
from deltawire.live.gateway.answer_ids import AnswerIds
from deltawire.live.gateway.client_forms import ChatForm
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.engine_tokens import AnswerReader
from deltawire.live.gateway.exchange import LiveExchange
from deltawire.live.gateway.requests import read_asked
from deltawire.live.gateway.user_figures import AnswerSource, UserFigures
from deltawire.runtime.children import LocalLauncher
from deltawire.serving.client_keys import ClientKeys, ClientLimits
from deltawire.serving.replica_set import TargetVersion
from deltawire.serving.upstream import OpenAIUpstream
from deltawire.store import open_bare_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.wire import keys
from deltawire.wire.captures import Feedback, GatewayState
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.user_windows import UserWindow

SAID = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}


class ScriptedUpstream:
    """An OpenAI server that answers what it is told: ``body``, or ``events`` of a stream."""

    def __init__(self):
        self.seen, self.status, self.body, self.events = [], 200, {"choices": [SAID]}, []
        self.hangs, self.stalls, self.models = False, False, 200
        app = web.Application()
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = TestServer(app)

    async def list(self, request):
        return web.json_response({"data": []}, status=self.models)

    async def chat(self, request):
        body = await request.json()
        self.seen.append(body)
        if self.hangs:
            await asyncio.Event().wait()
        if not body.get("stream") or self.status != 200:
            return web.json_response(self.body, status=self.status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in self.events:
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())
            if self.stalls:
                await asyncio.Event().wait()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": {"completion_tokens": 7}}
            await answer.write(b"data: %s\n\n" % json.dumps(usage).encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setattr(OpenAIUpstream, "poll_every_s", 0.02)

    def run(scenario, **options):
        provider = ScriptedUpstream()

        async def beside(session):
            await provider.server.start_server()
            url = str(provider.server.make_url("/v1"))
            return [OpenAIUpstream("openai", url, session, model="gpt-x")]

        async def outer():
            async with live_serving(
                published(), tmp_path, monkeypatch, extra=beside, model_names=("m",), **options
            ) as at:
                await scenario(at, provider)
            await provider.server.close()

        asyncio.run(outer())

    return run


def stored(at):
    at.recorder._state_at = float("-inf")
    at.recorder._each_round()
    key = keys.live_gateway(at.recorder.name)
    data = at.bucket.get(key, limit=1 << 30)
    return decode_json(data, GatewayState, run="", key=key)


def test_a_count_of_tokens_that_no_reader_takes_harms_no_state(serve):
    async def scenario(at, provider):
        for count in (10**18, 10**30, -1, "x", 1 << 25):
            provider.body = {"choices": [SAID], "usage": {"completion_tokens": count}}
            assert (await at.ask())[0] == 200
        state = await asyncio.to_thread(stored, at)
        assert state.windows[0].counts[0].answers == 5
        at.recorder.figures.answered(
            "a" * 32, AnswerSource("serving"), finish="stop", first_s=1e300, tokens=10**18
        )
        assert (await asyncio.to_thread(stored, at)).windows
        at.recorder.figures.answered(
            "b" * 32, AnswerSource("no arm"), finish="stop", first_s=1.0, tokens=1
        )
        assert (await asyncio.to_thread(stored, at)).windows == [], "the rest of it stays"

    serve(scenario)


WRONG = [
    {"message": "hi"},
    {"message": {"content": "a", "tool_calls": ["x"]}},
    {"message": {"content": "a", "tool_calls": 5}},
    {"message": {"content": "a", "tool_calls": [{"index": []}]}},
    {"message": {"content": "a", "tool_calls": [{"function": "f"}]}},
    {"index": []},
]


@pytest.mark.parametrize("row", WRONG)
def test_an_answer_of_the_wrong_shape_is_one_failure(serve, row):
    async def scenario(at, provider):
        row_ = {"finish_reason": "stop"} | row
        provider.body = {"choices": [row_]}
        assert (await at.ask())[0] == 503
        if "message" in row_:
            row_["delta"] = row_.pop("message")
        provider.events = [{"choices": [row_]}]
        with pytest.raises(aiohttp.ClientError):
            await at.ask(stream=True)
        async with asyncio.timeout(10):
            while at.recorder.counts["failed"] < 2:
                await asyncio.sleep(0.01)
        rows, _ = await at.uploaded()
        assert [one.finish for one in rows] == ["error", "error"]
        assert at.recorder.counts["broken"] == 2

    serve(scenario)


@pytest.mark.parametrize("found", [{"token_logprobs": ["a", 10**400], "tokens": 5}, 5, ["a"]])
def test_log_probabilities_of_the_wrong_type_are_none(found):
    reader = AnswerReader()
    reader.read({"choices": [SAID | {"logprobs": found, "token_ids": [1]}]})
    assert reader.choices[0].fault()


def test_choices_of_the_wrong_shape_are_corrupt():
    for row in WRONG:
        with pytest.raises(CorruptError, match="shape"):
            AnswerReader().read({"choices": [row]})


def figures_of(answers):
    figures = UserFigures({}, clock=lambda: 1e6)
    for number in range(answers):
        figures.answered(
            f"{number:032x}", AnswerSource("serving"), finish="stop", first_s=1.0, tokens=1
        )
    return figures


def test_figures_of_before_outlive_a_bucket_that_does_not_answer_at_the_start():
    class UnansweredBucket(DelegatingBucket):
        fails = 2

        def get(self, key, **options):
            if self.fails:
                self.fails -= 1
                raise RetryError("no answer")
            return super().get(key, **options)

    bucket = UnansweredBucket(open_bare_bucket("memory://", create=True))
    state = GatewayState(
        gateway="g0", run="0" * 32, generations=[], started=0.0, at=0.0,
        windows=figures_of(3).windows(),
    )  # fmt: skip
    bucket.put(keys.live_gateway("g0"), encode_json(state))
    figures = figures_of(1)
    for _ in range(2):
        with pytest.raises(RetryError):
            figures.load_from(bucket, "g0")
    for _ in range(2):
        figures.load_from(bucket, "g0")
    assert sum(one.answers for w in figures.windows() for one in w.counts) == 4


def test_no_state_is_stored_before_the_figures_of_before_were_read(serve, monkeypatch):
    async def scenario(at, provider):
        def fail(*_):
            raise RetryError("no answer")

        monkeypatch.setattr(at.recorder.figures, "load_from", fail)
        with pytest.raises(RetryError):
            await asyncio.to_thread(stored, at)
        assert at.bucket.get(keys.live_gateway(at.recorder.name), limit=1 << 20) is None
        monkeypatch.undo()

    serve(scenario)


def test_an_answer_that_ends_after_its_outcome_was_due_counts_once(serve):
    async def scenario(at, provider):
        asked = read_asked({"model": "m", "messages": []}, chat=True, defaults=RequestDefaults())
        names = dict.fromkeys(("user", "conversation", "task", "cohort", "capture"), "")
        served = at.recorder.served(asked, names | {"user": "u"})
        judged = served.assignment._replace(propensity=0.5)
        late = LiveExchange(
            replace(served, assignment=judged), at.recorder, AnswerIds(), at.names, ChatForm(),
            ContentFilter(),
            reveal=False,
        )  # fmt: skip
        assert late._served.judged
        late._overdue()
        assert at.recorder.counts["timed_out"] == 1
        assert at.recorder.figures.windows() == []
        late.end("error", "the replica failed")
        (counts,) = at.recorder.figures.windows()[0].counts
        assert (counts.answers, counts.errors) == (1, 1)

    serve(scenario)


def test_users_and_kinds_without_a_range_take_bounded_space(monkeypatch):
    monkeypatch.setattr(user_figures, "MOST_USERS", 5)
    figures = UserFigures({}, clock=lambda: 1e6)
    for number in range(100):
        report = Feedback(
            id=f"r{number}", answer="c" * 32, conversation="d" * 32, user="", arm="serving",
            kind=f"event_{number}", value=1e308, source="client", at=0.0, received=0.0,
            served_at=0.0, recorded=True,
        )  # fmt: skip
        report = msgspec.structs.replace(report, user=f"{number:032x}")
        figures.reported(report)
        figures.reported(report)
    windows = figures.windows()
    (counts,) = windows[0].counts
    assert sum(one.count for one in counts.kinds.values()) == 5
    assert len(counts.reports) == 16
    assert sum(counts.reports.values()) == 200
    assert msgspec.json.decode(msgspec.json.encode(windows), type=list[UserWindow]) == windows


def test_no_child_gets_the_keys_of_upstreams(tmp_path, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_UPSTREAM_KEY_OPENAI", "provider-key")
    monkeypatch.setenv("DELTAWIRE_OTHER", "kept")
    log = tmp_path / "log"
    code = "import os; print(sorted(n for n in os.environ if n.startswith('DELTAWIRE_')))"
    child = LocalLauncher().start("child", [sys.executable, "-c", code], log)
    child._process.wait()
    assert "DELTAWIRE_OTHER" in log.read_text()
    assert "UPSTREAM_KEY" not in log.read_text()


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("http://models.example/v1", True), ("http://10.0.0.1/v1", True),
        ("https://models.example/v1", False), ("http://127.0.0.1:8000/v1", False),
        ("http://localhost/v1", False), ("http://[::1]:8000/v1", False),
    ],
)  # fmt: skip
def test_a_key_is_not_sent_in_clear_text(tmp_path, url, refused):
    (tmp_path / "key").write_text("provider-key")
    files = [f"a={tmp_path / 'key'}"]
    assert read_upstreams([f"a={url}"], ["a=m"], [])
    if not refused:
        assert read_upstreams([f"a={url}"], ["a=m"], files)
        return
    with pytest.raises(InputError, match="clear text"):
        read_upstreams([f"a={url}"], ["a=m"], files)


STREAM = [{"choices": [{"index": 0, "delta": {"content": "abcd"}, "finish_reason": "stop"}]}]


def test_streams_of_an_upstream_are_counted_and_only_who_asks_sees_it(serve):
    async def scenario(at, provider):
        provider.events = STREAM
        status, data, _ = await at.ask(stream=True)
        assert status == 200
        assert b"usage" not in data
        options = {"include_usage": True}
        for more in ({}, {"stream_options": options}):
            _, data, _ = await at.call(
                "POST", "/v1/chat/completions", ADMIN,
                json={"model": "m", "messages": [], "stream": True, **more},
            )  # fmt: skip
            assert (b'"completion_tokens":7' in data) == bool(more)
        assert [one["stream_options"] for one in provider.seen] == [options] * 3
        rows, _ = await at.uploaded()
        assert [row.drawn for row in rows] == [7], "the guardrail `long` needs it"

    serve(scenario)


@pytest.mark.parametrize(
    ("status", "code", "ours"),
    [
        (400, None, 400), (403, "content_policy_violation", 400), (404, None, 400), (422, "x", 400),
        (403, "invalid_api_key", 503), (404, "model_not_found", 503), (401, None, 503),
    ],
)  # fmt: skip
def test_a_refusal_counts_for_its_arm_and_takes_no_upstream_out(serve, status, code, ours):
    async def scenario(at, provider):
        provider.status, provider.body = status, {"error": {"message": "no", "code": code}}
        reported = []
        at.replicas.report = lambda member, *, ok: reported.append(ok)
        assert (await at.ask())[0] == ours
        (row,), _ = await at.uploaded()
        assert row.finish == "error"
        assert (False in reported) == (ours == 503)
        assert status not in (403, 404) or ours == 503 or not reported

    serve(scenario)


@pytest.mark.parametrize("bound", ["bytes", "choices", "seconds"])
def test_streams_have_bounds(serve, monkeypatch, bound):
    async def scenario(at, provider):
        provider.events = STREAM * 3
        if bound == "bytes":
            monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", 200)
        elif bound == "seconds":
            monkeypatch.setattr(exchange, "STREAM_WITHIN_S", 0.0)
        else:
            row = STREAM[0]["choices"][0]
            provider.events = [{"choices": [row | {"index": one}]} for one in range(3)]
            assert (await at.ask(stream=True, n=3))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await at.ask(stream=True, n=2)
        async with asyncio.timeout(10):
            while not at.recorder.counts["failed"]:
                await asyncio.sleep(0.01)

    serve(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_early_has_used_its_quota(serve, stream):
    key = hashlib.sha256(b"web-key").hexdigest()
    clients = ClientKeys({"web": ClientLimits(key, tokens_per_day=100)})

    async def scenario(at, provider):
        row = {"index": 0, "delta": {"content": "abcd"}}
        provider.events = [{"choices": [row]}]
        provider.stalls, provider.hangs = stream, not stream
        body = {"model": "m", "messages": [], "stream": stream, "max_tokens": 60}
        call = at.client.post(
            at.url("/v1/chat/completions"), json=body,
            headers={"Authorization": "Bearer web-key"},
        )  # fmt: skip
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(10):
            while not provider.seen:
                await asyncio.sleep(0.01)
            assert clients._uses["web"].reserved == 60
            if stream:
                answer = await task
                await answer.content.readany()
                answer.close()
            else:
                task.cancel()
            while not clients.used()["web"]["tokens_today"]:
                await asyncio.sleep(0.01)
        assert clients.used()["web"]["tokens_today"] == (1 if stream else 60)
        assert clients._uses["web"].reserved == 0

    serve(scenario, clients=clients)


def test_readiness_says_whether_a_server_may_answer(serve):
    async def scenario(at, provider):
        async def ready():
            return (await at.call("GET", "/readyz"))[0]

        async def until(status):
            async with asyncio.timeout(10):
                while await ready() != status:
                    await asyncio.sleep(0.01)

        assert await ready() == 200
        provider.models = 302
        await until(503)
        assert (await at.ask())[0] == 503, "the run's replicas do not answer for a provider"
        at.replicas.wanted = TargetVersion(0, "", "none")
        assert await ready() == 200
        provider.models = 200

    serve(scenario)
