"""Content filters and judges: other servers, by URL, that see what users ask and get."""

import asyncio
import dataclasses
import json

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from live_decider import run_now, until
from live_gateway import WORDS, live_serving, published

from deltawire.chat.requests import RequestDefaults
from deltawire.config import parse_config
from deltawire.config.ranges import range_of
from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.launch.upstreams import read_filter, read_judges
from deltawire.live.capture.guardrails import AnswerFacts, touches
from deltawire.live.gateway import content_filter, judges
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.judges import Judge
from deltawire.live.gateway.requests import read_asked
from deltawire.live.release.outcomes import METRIC, OutcomeRules
from deltawire.wire.captures import Capture, Feedback

ANSWER = "".join(WORDS)
HOSTILE = {
    "no object": b"[]",
    "no verdict": b"{}",
    "a text": b'{"allowed": "yes"}',
    "a number": b'{"allowed": 1}',
    "no JSON": b"yes",
    "long": b'{"allowed": true, "reason": "%s"}' % (b"x" * (1 << 20)),
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe",
}


class OtherServer:
    """A filter or judge that answers ``says`` and keeps what it was ``asked``."""

    def __init__(self, says):
        self.says, self.asked, self.status, self.hangs = says, [], 200, False
        self.headers = []
        app = web.Application()
        app.router.add_post("/v1", self.answer)
        self.server = TestServer(app)

    async def answer(self, request):
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        if self.hangs:
            await asyncio.Event().wait()
        if self.status == 302:
            raise web.HTTPFound("/v1/elsewhere")
        said = self.says(self.asked[-1]) if callable(self.says) else self.says
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        return web.Response(body=body, status=self.status, content_type="application/json")

    async def __aenter__(self):
        await self.server.start_server()
        return self

    async def __aexit__(self, *_):
        await self.server.close()

    @property
    def url(self):
        return str(self.server.make_url("/v1"))


def code_of(data):
    return json.loads(data)["error"]["code"]


def serving(tmp_path, monkeypatch, **options):
    return live_serving(published(), tmp_path, monkeypatch, **options)


def test_a_refused_request_reaches_no_replica_and_blames_no_arm(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        says = lambda asked: {"allowed": "bomb" not in str(asked), "reason": "weapons"}  # noqa: E731
        async with OtherServer(says) as other:
            filters = ContentFilter(before=other.url, key="secret")
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                status, data, _ = await at.ask("a bomb")
                assert (status, code_of(data)) == (400, "content_filter")
                assert b"weapons" not in data, "a filter's own words are for the log"
                assert not at.fake.seen
                assert (await at.ask("Hi"))[0] == 200
                (rows, _), sent = await at.uploaded(), other.asked[-1]
                assert len(rows) == 1
                assert sent.pop("id")
                assert sent == {
                    "stage": "request",
                    "messages": [{"role": "user", "content": "Hi"}],
                    "request": ["Hi"],
                }, "neither user nor arm"
                assert other.headers[-1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_withheld_answer_is_shown_or_trained_on(tmp_path, monkeypatch, stream, path):
    @run_now
    async def scenario():
        async with OtherServer({"allowed": False}) as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                said = [{"role": "user", "content": "Hi"}]
                body = {"messages": said} if "chat" in path else {"input": "Hi"}
                status, data, _ = await at.call(
                    "POST", f"/v1/{path}", json={"model": "m", "stream": stream, **body},
                    headers={"x-deltawire-user": "ann", "x-deltawire-capture": "true"},
                )  # fmt: skip
                assert status == 200
                for word in WORDS:
                    assert word.strip().encode() not in data
                assert b"content_filter" in data
                assert b"receipt" in data
                assert other.asked[-1]["texts"] == [ANSWER]
                (row,), _ = await at.uploaded()
                assert row.finish == "content_filter"
                assert row.unusable
                assert not row.tokens
                assert touches("error", AnswerFacts.of(row), ReleaseConfig())
                (window,) = at.recorder.figures.windows()
                assert [one.errors for one in window.counts] == [1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_allowed_answer_is_the_same_as_without_a_filter(tmp_path, monkeypatch, stream):
    @run_now
    async def scenario():
        async with OtherServer({"allowed": True}) as other:
            filters = ContentFilter(before=other.url, after=other.url)
            found = []
            for number, one in enumerate((filters, None)):
                folder = tmp_path / str(number)
                async with serving(folder, monkeypatch, filters=one) as at:
                    status, data, _ = await at.ask("Hi", stream=stream, user="")
                    assert status == 200
                    text = data.decode()
                    start = text.index('"deltawire"')
                    found.append((text[:start], "content" in text))
            assert found[0] == found[1]


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("name", [*HOSTILE, "status", "redirect", "hang", "nobody"])
def test_a_filter_that_does_not_answer_lets_nothing_pass(tmp_path, monkeypatch, name, stage):
    monkeypatch.setattr(content_filter, "ANSWER_WITHIN_S", 1.0 if name == "hang" else 30.0)

    @run_now
    async def scenario():
        async with OtherServer(HOSTILE.get(name, {"allowed": True})) as other:
            other.hangs = name == "hang"
            other.status = {"status": 500, "redirect": 302}.get(name, 200)
            url = "http://127.0.0.1:1/v1" if name == "nobody" else other.url
            filters = ContentFilter(**{stage: url})
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                status, data, _ = await at.ask("Hi")
                assert (status, code_of(data)) == (503, "service_unavailable")
                assert ANSWER.encode() not in data
                assert filters.counts["filter_failed"] == 1
                assert not filters._held_bytes
                status, data, _ = await at.ask("Hi", stream=True)
                assert ANSWER.split()[0].encode() not in data
                assert status == (503 if stage == "before" else 200)
                assert b'"error"' in data
                assert len(at.fake.seen) == (0 if stage == "before" else 2), "no second try"
                filters._open_on_failure = True
                status, data, _ = await at.ask("Hi")
                assert (status, ANSWER in data.decode()) == (200, True)


def test_a_judge_scores_stored_answers_only_and_learns_nothing_else(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        def redact(texts):
            return [text.replace("Ann", "[name]") for text in texts]

        async with OtherServer({"value": 0.25}) as other:
            judged = [Judge("safety", other.url, key="secret")]
            async with serving(tmp_path, monkeypatch, judges=judged, redact=redact) as at:
                assert (await at.ask("I am Ann"))[0] == 200
                assert (await at.ask("not mine", capture=""))[0] == 200
                await until(lambda: at.recorder.judges.counts["scored"] == 1)
                rows, reports = await at.uploaded()
                assert [r.kind for r in reports] == ["judged_safety"]
                (report,) = reports
                assert (report.value, report.arm, report.user) == (0.25, "serving", rows[0].user)
                assert len(other.asked) == 1
                assert other.asked == [
                    {"judge": "safety", "request": ["I am [name]"], "answer": ANSWER}
                ]
                assert other.headers[0]["Authorization"] == "Bearer secret"
                (window,) = at.recorder.figures.windows()
                (counts,) = [one for one in window.counts if one.kinds]
                assert counts.kinds["judged_safety"].mean == 0.25
                assert not counts.satisfaction.count, "a judge is no user"


def test_a_judge_that_fails_or_is_slow_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(judges, "MOST_WAITING", 3)

    @run_now
    async def scenario():
        async with OtherServer({"value": None}) as other:
            judged = [Judge("j", other.url)]
            async with serving(tmp_path, monkeypatch, judges=judged) as at:
                counts = at.recorder.judges.counts
                assert (await at.ask("Hi"))[0] == 200
                await until(lambda: counts["no_opinion"] == 1)
                for said in ({"value": 2}, {"value": "1"}, *HOSTILE.values()):
                    other.says = said
                    before = counts["failed"]
                    assert (await at.ask("Hi"))[0] == 200
                    await until(lambda: counts["failed"] == before + 1)  # noqa: B023
                other.hangs = True
                for _ in range(judges.AT_ONCE + 5):
                    assert (await at.ask("Hi"))[0] == 200
                await until(lambda: counts["dropped"] >= 1)
                _, reports = await at.uploaded()
                assert not [one for one in reports if one.kind.startswith("judged")]


def test_a_filter_sees_all_that_a_model_gets_or_refuses_it(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer({"allowed": True}) as other:
            filters = ContentFilter(before=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                tool = {"type": "function", "function": {"name": "f", "description": "SECRET"}}
                assert (await at.ask("Hi", tools=[tool]))[0] == 200
                assert "SECRET" in str(other.asked[-1]["request"])
                image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
                said = [{"role": "user", "content": [image]}]
                seen = len(at.fake.seen)
                status, data, _ = await at.ask(messages=said)
                assert (status, code_of(data)) == (400, "content_filter")
                assert len(at.fake.seen) == seen


def test_what_a_filter_cannot_read_is_withheld(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer({"allowed": True}) as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                at.fake.says = {"refusal": "SECRET"}
                assert (await at.ask("Hi"))[0] == 200
                assert "SECRET" in str(other.asked[-1]["texts"]), "a refusal is text too"
                at.fake.says = {"audio": {"transcript": "SECRET"}}
                status, data, _ = await at.ask("Hi")
                assert status == 200
                assert b"SECRET" not in data
                assert b"content_filter" in data


def test_streams_that_wait_take_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(content_filter, "MOST_HELD_BYTES", 10)

    @run_now
    async def scenario():
        async with OtherServer({"allowed": True}) as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                with pytest.raises(aiohttp.ClientError):
                    await at.ask("Hi", stream=True)
                await until(lambda: not filters._held_bytes)


def test_a_filter_that_fails_blames_no_arm(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer(b"no") as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                drawn = at.recorder.assign("u", "c")._replace(propensity=0.5)
                at.recorder.assign = lambda *_: drawn
                assert (await at.ask("Hi"))[0] == 503
                (row,), _ = await at.uploaded()
                assert (row.finish, row.propensity, row.kept) == ("error", 1.0, None)


def test_withheld_answers_and_calls_are_not_judged(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        no = OtherServer({"allowed": False})
        async with OtherServer({"value": 1.0}) as other, no as filters_at:
            options = {
                "filters": ContentFilter(after=filters_at.url),
                "judges": [Judge("j", other.url)],
            }
            async with serving(tmp_path, monkeypatch, **options) as at:
                assert (await at.ask("Hi"))[0] == 200
                (row,), _ = await at.uploaded()
                release = parse_config(
                    {"name": "x", "live": {"release": {"metric": "judged_j"}}}, source="x"
                ).live
                rules = OutcomeRules(release)
                score = Feedback(
                    id="s", answer=row.answer, conversation=row.conversation, arm="serving",
                    kind="judged_j", value=1.0, at=row.at, received=row.at, served_at=row.at,
                )  # fmt: skip
                assert rules.values(row, [score])[METRIC] == 0.0, "the user got no answer"
                assert not other.asked


def test_a_score_neither_ends_the_wait_for_users_nor_breaks_silence():
    live = parse_config(
        {"name": "x", "live": {"rewards": {"thumbs": 1.0, "judged_j": 0.5}}}, source="x"
    ).live
    row = Capture(
        answer="a" * 32, conversation="c" * 32, turn=0, arm="serving", propensity=0.5, at=100.0,
        receipt="r", finish="stop", unusable="x",
    )  # fmt: skip
    score = Feedback(
        id="s", answer=row.answer, conversation=row.conversation, arm="serving",
        kind="judged_j", value=1.0, at=100.0, received=100.0, served_at=100.0,
    )  # fmt: skip
    assert OutcomeRules(live).values(row, [score])["silent"] == 1.0
    only = msgspec.structs.replace(live, rewards={"judged_j": 1.0})
    assert OutcomeRules(only).values(row, [score])["silent"] == 0.0


def test_a_label_that_is_no_text_stops_no_upload(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with serving(tmp_path, monkeypatch) as at:
            for number in range(6):
                names = {"user": f"u{number}", "task": "x\udcff", "cohort": "y\udcff"}
                asked = read_asked(
                    {"model": "m", "messages": []}, chat=True, defaults=RequestDefaults()
                )
                empty = dict.fromkeys(("conversation", "capture"), "")
                served = at.recorder.served(asked, empty | names)
                served = dataclasses.replace(served, capture=True)
                at.recorder.ended(served, "error", "x", 0.1)
            assert {one.name for one in at.recorder.figures.stated()[0].labels} == {"x?"}
            rows, _ = await at.uploaded()
            assert {(row.task, row.cohort) for row in rows} == {("x?", "y?")}


def test_a_judge_scores_the_share_that_is_stated():
    judge = Judge("j", "http://x", share=0.3)
    drawn = sum(judges._is_drawn(judge, f"{n:032x}") for n in range(4000))
    assert abs(drawn / 4000 - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    other = Judge("k", "http://x", share=0.3)
    both = sum(
        judges._is_drawn(judge, f"{n:032x}") and judges._is_drawn(other, f"{n:032x}")
        for n in range(4000)
    )
    assert abs(both / 4000 - 0.09) < 4 * (0.09 / 4000) ** 0.5, "judges draw for themselves"


def test_scores_of_judges_have_a_range():
    assert range_of({}, "judged_safety") == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        (["j=ftp://a"], []),
        (["j=http://user:password@a"], []),
        (["j=http://a", "j=http://b"], []),
        (["J=http://a"], []),
        (["http://a"], []),
        (["j=http://a"], ["k=f"]),
        ([f"j{n}=http://a" for n in range(9)], []),
    ],
)
def test_judges_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(InputError):
        read_judges(*arguments, share=1.0)


def test_a_key_is_never_sent_in_clear_text(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    for url in ("http://filter.example.com/v1", "http://10.0.0.1"):
        with pytest.raises(InputError, match="clear text"):
            read_filter(url, "", str(key))
        with pytest.raises(InputError, match="clear text"):
            read_filter("", url, str(key))
        with pytest.raises(InputError, match="clear text"):
            read_judges([f"j={url}"], [f"j={key}"], share=1.0)
    assert read_judges(["j=http://127.0.0.1:1"], [f"j={key}"], share=0.5)[0].key == "secret"
    assert read_filter("https://filter.example.com/v1", "", str(key))
