"""Pages of listed origins may call a gateway, and find a stream's receipt by its headers."""

import asyncio
import json

import pytest
from live_gateway import KEYS, live_serving, published

from deltawire.errors import InputError
from deltawire.live.gateway.answer_ids import ANSWER_HEADER, AnswerIds
from deltawire.serving import app as serving_app
from deltawire.serving.cors import add_cors, check_origins
from deltawire.wire.receipts import read_receipt

APP, OTHER = "https://app.example.com", "https://evil.example.com"
PREFLIGHT = {
    "Origin": APP,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    def run(scenario, origins=(), **options):
        build = serving_app.build_runner

        def build_runner(app):
            add_cors(app, origins, exposed=[ANSWER_HEADER])
            return build(app)

        monkeypatch.setattr("live_gateway.build_runner", build_runner)

        async def whole():
            async with live_serving(published(), tmp_path / "state", monkeypatch, **options) as at:
                await scenario(at)

        asyncio.run(whole())

    return run


def test_a_listed_origin_may_ask_and_read_the_headers(serve):
    async def scenario(at):
        path = "/v1/chat/completions"
        status, _, headers = await at.call("OPTIONS", path, "no token", headers=PREFLIGHT)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == APP
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        for token, wanted in (("wrong", 401), ("sampling-secret", 200)):
            status, _, headers = await at.call(
                "POST", path, token, headers={"Origin": APP},
                json={"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
            )  # fmt: skip
            assert status == wanted
            assert headers["Access-Control-Allow-Origin"] == APP, "a page can read the error too"
            assert headers["Vary"] == "Origin"
            assert ANSWER_HEADER in headers["Access-Control-Expose-Headers"]

    serve(scenario, [APP])


@pytest.mark.parametrize("origins", [(), (APP,)])
def test_other_origins_get_no_permission(serve, origins):
    async def scenario(at):
        for origin in (OTHER, "null", f"{APP}.evil.com", APP.upper()):
            status, _, headers = await at.call(
                "OPTIONS", "/v1/feedback", headers=PREFLIGHT | {"Origin": origin}
            )
            assert status != 204
            assert "Access-Control-Allow-Origin" not in headers
            _, _, headers = await at.call("GET", "/livez", headers={"Origin": origin})
            assert "Access-Control-Allow-Origin" not in headers

    serve(scenario, origins)


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://app.example.com/", "app.example.com", "HTTPS://a.b", "ftp://a"]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(InputError, match="no origin"):
        check_origins([origin])
    check_origins([APP, "http://localhost:3000"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_in_the_headers_is_exchanged_for_the_receipt(serve, stream):
    async def scenario(at):
        status, data, headers = await at.ask(stream=stream, n=2)
        assert status == 200
        name = headers[ANSWER_HEADER]
        status, found, _ = await at.call("GET", f"/v1/receipts/{name}")
        assert status == 200
        found = json.loads(found)
        assert len(found["receipts"]) == 2
        assert all(receipt.encode() in data for receipt in found["receipts"])
        assert read_receipt(found["receipt"], keys=KEYS, run=at.recorder._run.id) is not None
        assert (await at.report(found["receipt"]))[0] == 200
        assert (await at.call("GET", f"/v1/receipts/{name}", "wrong"))[0] == 401
        for other in ("0" * 32, "x"):
            assert (await at.call("GET", f"/v1/receipts/{other}"))[0] == 404

    serve(scenario)


def test_an_answer_that_failed_or_is_under_way_has_no_receipt(serve):
    async def scenario(at):
        at.fake.mode = "stall"
        async with at.client.post(
            at.url("/v1/chat/completions"),
            headers={"Authorization": "Bearer sampling-secret"},
            json={"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]},
        ) as answer:
            name = answer.headers[ANSWER_HEADER]
            assert (await at.call("GET", f"/v1/receipts/{name}"))[0] == 409
        async with asyncio.timeout(10):
            while (await at.call("GET", f"/v1/receipts/{name}"))[0] != 404:
                await asyncio.sleep(0.01)

    serve(scenario)


def test_the_receipts_that_are_kept_are_bounded_not_the_answers():
    """One answer may have 128 receipts."""
    ids = AnswerIds(most=10)
    names = [ids.new() for _ in range(4)]
    for name in names[:3]:
        ids.ended(name, ["dw2.x"] * 4)
    assert [len(ids.receipts(name) or ()) for name in names] == [0, 4, 4, 0]
    assert ids.receipts(names[0]) is None
    assert ids.receipts(names[3]) == [], "it is under way"
    ids.dropped(names[3])
    name = ids.new()
    ids.ended(name, ["dw2.x"] * 2)
    assert [len(ids.receipts(one) or ()) for one in (*names, name)] == [0, 4, 4, 0, 2]
    ids.ended(ids.new(), ["dw2.x"] * 11)
    assert [ids.receipts(one) for one in (*names, name)] == [None] * 5


def test_the_oldest_ids_are_forgotten():
    ids = AnswerIds(most=2)
    names = [ids.new() for _ in range(3)]
    for name in names:
        ids.ended(name, ["dw2.x"])
    assert [ids.receipts(name) for name in names] == [None, ["dw2.x"], ["dw2.x"]]
    ids.dropped(names[2])
    assert ids.receipts(names[2]) == ["dw2.x"], "an answer that has ended keeps its receipts"
