"""Nothing that a client can read tells a provider's answers from those of the run's replicas."""

import json
import re

import pytest
from aiohttp import web
from live_answers import config_of
from live_decider import Decider, in_loop, until
from live_gateway import WORDS, TokenReplica, live_serving, published
from test_clients_are_blind import asked

from deltawire.live.gateway import routing
from deltawire.live.gateway.common_form import CommonForm
from deltawire.live.gateway.responses import ResponseForm
from deltawire.serving.upstream import OpenAIUpstream
from deltawire.wire.decisions import Decision, ServedVersion

NAME = "0" * 32
RANDOM = (
    (rb"(chatcmpl-)[0-9a-f]{32}", rb"\1ID"), (rb"(call_)[0-9a-f]{20}", rb"\1ID"),
    (rb'"(created(?:_at)?)":\d+', rb'"\1":0'), (rb"((?:resp|msg|fc)_)[0-9a-f]{48}", rb"\1ID"),
)  # fmt: skip


class TellingProvider:
    """States what a provider may, in its own order, with its own words, headers and statuses."""

    def __init__(self):
        self.status, self.mode, self.types, self.seen = 200, "text", set(), 0
        app = web.Application()
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = web.AppRunner(app)

    async def list(self, _):
        return web.json_response({"data": [{"id": "gpt-x"}]})

    async def chat(self, request):
        self.seen += 1
        self.types.add(request.headers["Content-Type"])
        body = await request.json()
        if self.status != 200:
            return web.json_response({"error": {"message": "org-1"}}, status=self.status)
        if body.get("stream"):
            head = {"Content-Type": "text/event-stream", "Cache-Control": "private"}
            answer = web.StreamResponse(headers=head)
            await answer.prepare(request)
            await answer.write(b": PROVIDER PROCESSING\n\n")
            for place, word in enumerate([*WORDS, None]):
                delta = {"role": "assistant", "content": word, "refusal": None} if word else {}
                row = {"delta": delta, "index": 0, "finish_reason": None if word else "end_turn"}
                chunk = {"choices": [row], "id": f"x{place}", "provider": "p", "model": "gpt-x"}
                await answer.write(b"data: %s\n\n" % json.dumps(chunk).encode())
            await answer.write(b"data: [DONE]\n\n")
            return answer
        message = {"content": "".join(WORDS), "role": "assistant", "annotations": []}
        if self.mode == "calls":
            function = {"arguments": "{]", "name": "f"}
            message["tool_calls"] = [{"function": function, "id": "toolu_1", "x": 1}]
        rows = [{"finish_reason": "end_turn", "message": message}]
        usage = {"total_tokens": 9, "prompt_tokens": 6, "completion_tokens": 3}
        return web.json_response(
            {"usage": usage, "choices": rows, "provider": "p", "id": "gen-1"},
            content_type="application/json", headers={"Cache-Control": "private"},
        )  # fmt: skip

    def beside(self):
        async def make(session):
            await self.server.setup()
            await web.TCPSite(self.server, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{self.server.addresses[0][1]}/v1"
            return [OpenAIUpstream("openai", url, session, model="gpt-x")]

        return {"extra": make, "model_names": ("m",)}


def test_answers_and_refusals_of_a_provider_and_of_a_replica_look_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    release = config_of(release={"stages": [0.5]}).live.release
    theirs = ServedVersion.of_upstream("openai")

    @in_loop
    async def scenario():
        bucket, provider = published(), TellingProvider()
        decider = Decider(bucket)

        def choose(verdict, candidate=None, **facts):
            decider.log.poll()
            decision = Decision(
                number=decider.log.next_number, run=decider.run.id, verdict=verdict, at=0.0,
                by="ann", serving=theirs, candidate=candidate, **facts,
            )  # fmt: skip
            assert decider.log.append(decision)

        choose("serve")
        choose("gate", decider.served(0))
        choose("canary", decider.served(0), share=0.5, salt="s")
        async with live_serving(
            bucket, tmp_path, monkeypatch, replica=TokenReplica, release=release,
            **provider.beside(),
        ) as gateway:  # fmt: skip
            await until(lambda: gateway.replicas.aimed)

            async def alike(**body):
                seen, before = set(), (provider.seen, len(gateway.fake.seen))
                for number in range(12):
                    text, *_ = await asked(gateway, f"u{number}", **body)
                    for pattern, word in RANDOM:
                        text = re.sub(pattern, word, text)
                    seen.add(text)
                after = provider.seen, len(gateway.fake.seen)
                assert all(b > a for a, b in zip(before, after, strict=True)), "both answered"
                assert len(seen) == 1, seen
                return seen.pop()

            await until(lambda: gateway.decision().share == 0.5)
            assert b"usage" not in await alike()
            assert b"Hello" in await alike(stream=True, stream_options={"include_usage": True})
            provider.mode = gateway.fake.mode = "calls"
            assert b'"finish_reason":"tool_calls"' in await alike()
            for status, mode, ours in ((422, "error", b"400"), (500, "fail", b"503")):
                provider.status, gateway.fake.mode = status, mode
                assert (await alike()).startswith(ours)
            assert provider.types == {"application/json"}
            text, *_ = await asked(gateway, "u", logprobs=True)
            assert text.startswith(b"400"), "log-probabilities tell whose tokens they are"
        await provider.server.cleanup()

    scenario()


def events(*deltas, finish="stop", **more):
    rows = [{"index": 0, "delta": one, "finish_reason": None, **more} for one in deltas]
    return [*rows, {"index": 0, "delta": {}, "finish_reason": finish, **more}]


@pytest.mark.parametrize("joined", [False, True])
def test_streams_with_calls_of_two_servers_are_the_same(joined):
    """Ids, indices, members and words differ; what the client gets does not."""
    first = {"id": "chatcmpl-tool-1", "type": "function", "index": 0}
    vllm = events(
        {"role": "assistant", "content": ""},
        {"content": "Look."},
        {"tool_calls": [{**first, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{**first, "index": 1, "function": {"name": "g", "arguments": "{}"}}]},
        finish="tool_calls",
        token_ids=[1],
    )
    other = events(
        {"content": "Look.", "role": "assistant", "refusal": None},
        {"tool_calls": [{"function": {"arguments": "", "name": "f"}, "index": 1, "id": "toolu_x"}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}, "extra": 1}],
         "role": "assistant"},
        {"tool_calls": [{"index": 4, "function": {"name": "g", "arguments": {}}, "id": "toolu_y"}]},
        finish="end_turn",
    )  # fmt: skip
    if joined:  # The end comes with the last call.
        other[-2:] = [other[-2] | {"finish_reason": "end_turn"}]
    found, responses = [], []
    for rows in (vllm, other):
        form = CommonForm(NAME, model="m", chat=True)
        shown = [one for row in rows for one in form.chunks({"choices": [row], "usage": {}})]
        found.append([json.dumps(one | {"created": 0}) for one in shown])
        response = ResponseForm({"model": "m"})
        texts = b"".join([*map(response.chunk, shown[:-1]), response.end(shown[-1:], {})])
        for pattern, word in RANDOM:
            texts = re.sub(pattern, word, texts)
        assert b"toolu" not in texts
        responses.append(texts)
    assert found[0] == found[1]
    assert responses[0] == responses[1]
    calls = [json.loads(one)["choices"][0]["delta"].get("tool_calls") for one in found[0]]
    ids = [one["id"] for rows in calls if rows for one in rows if "id" in one]
    assert len(set(ids)) == 2
    assert json.loads(found[0][-1])["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_no_object_of_an_answer_is_passed_over():
    form = CommonForm(NAME, model="m", chat=True)
    odd = {"choices": [1, {"index": -1, "message": 3}, {"message": {"tool_calls": [None, {}]}}]}
    one, two = form.whole(odd)["choices"]
    assert one["message"] == {"role": "assistant", "content": ""}
    assert (two["index"], two["message"]["content"]) == (2, None)
    assert list(form.chunks({"choices": {"a": 1}})) == []
    cut = form.whole({"choices": [{"message": {"content": "Hel"}, "finish_reason": "error"}]})
    assert cut["choices"][0]["finish_reason"] == "length", "it is no whole answer"
    text = CommonForm(NAME, model="m", chat=False).whole({"choices": [{"text": "a", "x": 1}]})
    assert list(text["choices"][0].items()) == [
        ("index", 0), ("text", "a"), ("logprobs", None), ("finish_reason", "stop")
    ]  # fmt: skip


def test_the_providers_own_name_of_its_model_is_not_listed(tmp_path, monkeypatch):
    from deltawire.live.gateway import model_names

    class Replica(TokenReplica):
        length = 4096

        def __init__(self, *given):
            super().__init__(*given)
            self.server.app.router.add_get("/v1/models", self.models)

        async def models(self, _):
            row = {"id": "m", "max_model_len": self.length}
            return web.json_response({"data": [row]})

    monkeypatch.setattr(model_names, "POLL_EVERY_S", 0.02)
    monkeypatch.setattr(model_names, "RETRY_EVERY_S", 0.02)

    @in_loop
    async def scenario():
        bucket, provider = published(), TellingProvider()
        beside = provider.beside() | {"model_names": ()}
        async with live_serving(
            bucket, tmp_path / "a", monkeypatch, replica=Replica, **beside
        ) as at:
            await until(lambda: "m" in at.names.names())
            assert b"gpt-x" not in (await at.call("GET", "/v1/models"))[1]
            assert (await at.ask(model="gpt-x"))[0] == 404
        await provider.server.cleanup()
        async with live_serving(
            published(), tmp_path / "b", monkeypatch, replica=Replica, replicas=2
        ) as at:
            await until(lambda: at.names.listed()[0].get("max_model_len") == 4096)
            at.fakes[0].length = 2048
            await until(lambda: "max_model_len" not in at.names.listed()[0])

    scenario()
