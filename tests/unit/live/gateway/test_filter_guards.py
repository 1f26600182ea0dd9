"""Limits of content filters and judges, one at a time."""

import asyncio
import hashlib
import json
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from live_answers import NOW, answer, config_of, put_rows, report
from live_decider import run_now, until
from live_gateway import ADMIN, WORDS, live_serving, published
from test_filters_and_judges import ANSWER, OtherServer, serving
from test_gateway_upstreams import Provider, beside

from deltawire.errors import CorruptError
from deltawire.live.gateway import content_filter, judges
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.judges import Judge, Judges, StoredAnswer
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.records import LiveRecords
from deltawire.serving.client_keys import ClientKeys, ClientLimits
from deltawire.store import open_bucket
from deltawire.wire.receipts import Receipt

HUNDRED = [f"{n:032x}" for n in range(100)]
DEEP = b'{"allowed": true, "value": 1, "more": ' + b"[" * 20_000
LONG = b'{"allowed": true, "value": 1}' + b" " * (64 << 10)


def receipt(name="0" * 32):
    return Receipt(
        run="0" * 32, answer=name, conversation="c" * 32, turn=0, user="u", arm="serving",
        propensity=1.0, spans=[], tokens="", recorded=True, at=0.0,
    )  # fmt: skip


def queued(judges_, name="j"):
    (queue,) = [queue for one, queue in judges_._queues.items() if one.name == name]
    return queue.qsize()


@pytest.mark.parametrize("said", [DEEP, LONG], ids=["deep", "long"])
def test_a_verdict_that_could_harm_is_none(tmp_path, monkeypatch, said):
    @run_now
    async def scenario():
        async with OtherServer(said) as other:
            filters = ContentFilter(before=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                assert (await at.ask("Hi"))[0] == 503
                assert not at.fake.seen


def test_a_filter_that_answers_elsewhere_is_not_followed(tmp_path, monkeypatch):
    """Texts of users go where the operator says, and nowhere else."""
    seen = []

    async def move(request):
        raise web.HTTPFound("/to")

    async def answer_there(request):
        seen.append(request)
        return web.json_response({"allowed": True})

    @run_now
    async def scenario():
        app = web.Application()
        app.router.add_post("/v1", move)
        app.router.add_get("/to", answer_there)
        server = TestServer(app)
        await server.start_server()
        filters = ContentFilter(before=str(server.make_url("/v1")))
        async with serving(tmp_path, monkeypatch, filters=filters) as at:
            assert (await at.ask("Hi"))[0] == 503
            assert not seen
        await server.close()


def test_a_filters_work_is_counted(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer(lambda asked: {"allowed": "no" not in str(asked)}) as other:
            filters = ContentFilter(before=other.url, after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                assert (await at.ask("no"))[0] == 400
                assert (await at.ask("Hi"))[0] == 200
                other.says = lambda asked: {"allowed": asked["stage"] == "request"}
                assert (await at.ask("Hi"))[0] == 200
                other.says = b"junk"
                assert (await at.ask("Hi"))[0] == 503
                _, data, _ = await at.call("GET", "/live/state", ADMIN)
                found = json.loads(data)["counts"]
                names = ("filter_refused", "filter_withheld", "filter_failed")
                assert [found[name] for name in names] == [1, 1, 1]


def test_bytes_are_given_back_also_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(content_filter, "MOST_HELD_BYTES", 10)
    filters = ContentFilter(after="http://x")
    for _ in range(2):
        with pytest.raises(CorruptError, match="too many bytes"):
            filters.hold(30)
    filters.hold(-30)
    filters.hold(-30)
    filters.hold(10)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [b'{"allowed": false}', b"junk"], ids=["withheld", "failed"])
def test_a_withheld_answer_counts_in_its_clients_quota(tmp_path, monkeypatch, stream, said):
    """The replica drew it, so a client that asks for what is withheld uses its quota."""
    key = hashlib.sha256(b"web-key").hexdigest()
    clients = ClientKeys({"web": ClientLimits(key, tokens_per_day=100)})

    @run_now
    async def scenario():
        async with OtherServer(said) as other:
            options = {"filters": ContentFilter(after=other.url), "clients": clients}
            async with serving(tmp_path, monkeypatch, **options) as at:
                await at.call(
                    "POST", "/v1/chat/completions", token="web-key",
                    json={"model": "m", "messages": [], "stream": stream, "max_tokens": 50},
                )  # fmt: skip
                await until(lambda: not clients._uses["web"].reserved)
                assert clients.used()["web"]["tokens_today"] == len(WORDS)


def test_the_end_of_a_stream_whose_filter_failed_is_stored(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer(b"no") as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                drawn = at.recorder.assign("u", "c")._replace(propensity=0.5)
                at.recorder.assign = lambda *_: drawn
                await at.ask("Hi", stream=True)
                (row,), _ = await at.uploaded()
                assert (row.finish, row.propensity, row.kept) == ("error", 1.0, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_filter_sees_all_choices_in_their_order(tmp_path, monkeypatch, stream):
    @run_now
    async def scenario():
        async with OtherServer({"allowed": False}) as other:
            filters = ContentFilter(after=other.url)
            async with serving(tmp_path, monkeypatch, filters=filters) as at:
                status, data, _ = await at.ask("Hi", n=3, stream=stream)
                assert status == 200
                assert other.asked[-1]["texts"] == [ANSWER] * 3
                assert data.count(b"content_filter") == 3, "each choice ends so"


def test_members_that_no_filter_saw_reach_no_operator_either(tmp_path, monkeypatch):
    """Next to a provider a filtered answer has known members only, with the admin token too."""

    class Talkative(Provider):
        async def chat(self, request):
            self.seen.append(await request.json())
            message = {"role": "assistant", "content": "ok"}
            rows = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return web.json_response({"id": "x", "choices": rows, "citations": ["SECRET"]})

    @run_now
    async def scenario():
        provider = Talkative()
        async with OtherServer({"allowed": True}) as other:
            options = {"filters": ContentFilter(after=other.url), **beside(provider)}
            async with live_serving(published(), tmp_path, monkeypatch, **options) as at:
                status, data, _ = await at.call(
                    "POST", "/v1/chat/completions", ADMIN,
                    json={"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]},
                )  # fmt: skip
                assert status == 200
                assert provider.seen
                assert b'"ok"' in data
                assert b"SECRET" not in data
        await provider.server.close()


def test_what_a_providers_own_filter_withheld_is_an_error_of_its_arm(tmp_path, monkeypatch):
    class Cautious(Provider):
        async def chat(self, request):
            self.seen.append(await request.json())
            message = {"role": "assistant", "content": "ok"}
            rows = [{"index": 0, "message": message, "finish_reason": "SAFETY"}]
            return web.json_response({"id": "x", "choices": rows})

    @run_now
    async def scenario():
        provider = Cautious()
        async with live_serving(published(), tmp_path, monkeypatch, **beside(provider)) as at:
            assert (await at.ask("Hi", model="gpt-x"))[0] == 200
            (row,), _ = await at.uploaded()
            assert row.finish == "content_filter"
            (window,) = at.recorder.figures.windows()
            assert [one.errors for one in window.counts] == [1]
        await provider.server.close()


def test_judges_get_no_answer_without_text_or_with_too_much(monkeypatch):
    monkeypatch.setattr(judges, "MOST_CHARACTERS", 10)
    found = Judges([Judge("j", "http://x")], lambda reports: None)
    for request, text in ((["hello"], " \n\t"), (["hello"], ""), (["hello"], "x" * 6)):
        found.offer(StoredAnswer(receipt(), request, text))
    assert queued(found) == 0
    assert found.counts == {"dropped": 1}, "an answer without text is not dropped, but no answer"
    found.offer(StoredAnswer(receipt(), ["hello"], "world"))
    assert queued(found) == 1


def test_judges_get_their_share_only():
    found = Judges(
        [Judge("all", "http://x"), Judge("none", "http://x", share=0.0)], lambda reports: None
    )
    for name in HUNDRED:
        found.offer(StoredAnswer(receipt(name), ["hello"], "world"))
    assert (queued(found, "all"), queued(found, "none")) == (100, 0)
    assert not found.counts


@pytest.mark.parametrize("said", [DEEP, LONG], ids=["deep", "long"])
def test_a_score_that_could_harm_is_none_and_is_named_once(tmp_path, monkeypatch, said, caplog):
    caplog.set_level(logging.ERROR, "deltawire.live")

    @run_now
    async def scenario():
        async with OtherServer(said) as other:
            judged = [Judge("my-judge", other.url)]
            async with serving(tmp_path, monkeypatch, judges=judged) as at:
                counts = at.recorder.judges.counts
                for number in range(3):
                    assert (await at.ask("Hi"))[0] == 200
                    await until(lambda n=number: counts["failed"] == n + 1)
                assert len([one for one in caplog.records if "gives no score" in one.message]) == 1
                other.says = {"value": 1}
                assert (await at.ask("Hi"))[0] == 200
                await until(lambda: counts["scored"] == 1)
                _, reports = await at.uploaded()
                kinds = {one.kind for one in reports if not one.kind.startswith("detected")}
                assert kinds == {"judged_my_judge"}
                tasks = at.recorder.judges._tasks
        assert all(task.done() for task in tasks), "no judge is asked after the gateway has ended"


def test_an_answer_that_could_not_be_stored_is_not_judged(tmp_path, monkeypatch):
    @run_now
    async def scenario():
        async with OtherServer({"value": 1}) as other:
            options = {"judges": [Judge("j", other.url)], "spool_bytes": 1}
            async with serving(tmp_path, monkeypatch, **options) as at:
                assert (await at.ask("Hi"))[0] == 200
                assert at.recorder.counts["unrecorded"] == 1
                await asyncio.sleep(0.1)
                assert not other.asked


def states_of(rewards, *reports, own=None):
    """The states of one answer with these reports, whose window is long over or not yet."""
    bucket = open_bucket("memory://")
    put_rows(bucket, 0, [answer(1)], reports)
    records = LiveRecords(bucket)
    records.poll()
    maker = GroupMaker(config_of(rewards=rewards), records)
    maker._own = own
    maker.matured(NOW + 100.0)
    return {state for state, count in maker.states.items() if count}


def test_a_judges_score_ends_no_wait_for_users():
    judged, thumbs = report(1, "judged_j", 0.5), report(1, "thumbs", 1.0)
    both = {"thumbs": 1.0, "judged_j": 0.5}
    assert states_of(both, judged, thumbs) == {"matured"}
    assert states_of(both, judged) == {"waiting"}, "the user may still report"
    assert states_of({"judged_j": 1.0}, judged) == {"matured"}, "nobody else is asked"
    own = lambda *_: 0.5  # noqa: E731
    assert states_of({"judged_j": 1.0}, judged, own=own) == {"waiting"}
    assert states_of({"judged_j": 1.0}, judged, thumbs, own=own) == {"matured"}
