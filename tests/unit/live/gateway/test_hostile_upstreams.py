"""An upstream whose answers are wrong, endless or refusals, and what becomes of them."""

import asyncio
import json
import sys
from dataclasses import replace

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from live_gateway import live_serving, published

from deltawire.chat.requests import RequestDefaults
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.launch.upstreams import read_upstreams
from deltawire.live.gateway import user_figures
from deltawire.live.gateway.answer_ids import AnswerIds
from deltawire.live.gateway.engine_tokens import AnswerReader
from deltawire.live.gateway.exchange import ChatForm, LiveExchange
from deltawire.live.gateway.requests import read_asked
from deltawire.live.gateway.user_figures import AnswerSource, UserFigures
from deltawire.runtime.children import LocalLauncher
from deltawire.serving.upstream import OpenAIUpstream
from deltawire.store import open_bucket
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
        app = web.Application()
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = TestServer(app)

    async def list(self, request):
        return web.json_response({"data": []})

    async def chat(self, request):
        body = await request.json()
        self.seen.append(body)
        if not body.get("stream"):
            return web.json_response(self.body, status=self.status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in self.events:
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())
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
        with pytest.raises(Exception, match=r"(?i)payload|closed|disconnected"):
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

    bucket = UnansweredBucket(open_bucket("memory://", create=True))
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
        exchange = LiveExchange(
            replace(served, assignment=judged), at.recorder, AnswerIds(), at.names, ChatForm(),
            reveal=False,
        )  # fmt: skip
        assert exchange._served.judged
        exchange._overdue()
        assert at.recorder.counts["timed_out"] == 1
        assert at.recorder.figures.windows() == []
        exchange.end("error", "the replica failed")
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
