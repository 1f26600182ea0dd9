"""Another provider's model as a baseline and as an arm of a canary."""

import json

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from live_answers import answer, config_of
from live_decider import Decider, in_loop, until
from live_gateway import ADMIN, KEYS, live_serving, published

from deltawire.errors import InputError
from deltawire.launch.upstreams import read_upstreams
from deltawire.live.gateway import routing
from deltawire.live.release.outcomes import drawn_by_its_arm
from deltawire.serving.upstream import OpenAIUpstream
from deltawire.sync import read_run
from deltawire.wire.decisions import CANDIDATE, Decision, ServedVersion, fault_after
from deltawire.wire.receipts import SERVING, read_receipt

PROVIDER = ServedVersion.of_upstream("openai")
RELEASE = config_of(release={"stages": [0.5]}).live.release


class Provider:
    """A plain OpenAI server: one key, one model, no tokens, and its own words."""

    def __init__(self):
        self.seen, self.status, self.models = [], 200, 200
        app = web.Application()
        app.router.add_get("/base/v1/models", self.list)
        app.router.add_post("/base/v1/chat/completions", self.chat)
        self.server = TestServer(app)

    async def list(self, request):
        return web.json_response({"data": [{"id": "gpt-x"}, {"id": "gpt-y"}]}, status=self.models)

    async def chat(self, request):
        assert request.headers["Authorization"] == "Bearer provider-key"
        assert not request.query
        body = await request.json()
        self.seen.append(body)
        if self.status != 200:
            error = {"message": "provider says no to org-1", "type": "x", "code": "y"}
            return web.json_response({"error": error}, status=self.status)
        message = {"role": "assistant", "content": "From the provider."}
        if body.get("stream"):
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            for delta, finish in (({"content": "From "}, None), ({"content": "it."}, "stop")):
                row = {"index": 0, "delta": delta, "finish_reason": finish}
                chunk = {"id": "x", "model": "gpt-x-0613", "choices": [row]}
                await answer.write(b"data: %s\n\n" % json.dumps(chunk).encode())
            await answer.write(b"data: [DONE]\n\n")
            return answer
        rows = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response(
            {"id": "x", "object": "chat.completion", "model": "gpt-x-0613", "choices": rows,
             "usage": {"completion_tokens": 4}, "service_tier": "default"}
        )  # fmt: skip


def beside(provider):
    """Options of a gateway that has the provider too."""

    async def make(session):
        await provider.server.start_server()
        url = str(provider.server.make_url("/base/v1"))
        return [OpenAIUpstream("openai", url, session, model="gpt-x", key="provider-key")]

    return {"extra": make, "model_names": ("m", "gpt-x")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    monkeypatch.setattr(OpenAIUpstream, "poll_every_s", 0.02)


class Choosing(Decider):
    """Decides about upstreams too."""

    def choose(self, verdict, serving, candidate=None, **facts):
        self.log.poll()
        decision = Decision(
            number=self.log.next_number, run=self.run.id, verdict=verdict, at=0.0, by="ann",
            serving=serving, candidate=candidate, **facts,
        )  # fmt: skip
        assert self.log.append(decision)


def opened(data, bucket):
    text = json.loads(data)["deltawire"]["receipt"]
    return read_receipt(text, keys=KEYS, run=read_run(bucket).id)


def test_a_provider_serves_before_any_decision_and_its_answers_are_not_trained_on(
    tmp_path, monkeypatch
):
    @in_loop
    async def scenario():
        bucket, provider = published(), Provider()
        async with live_serving(
            bucket, tmp_path, monkeypatch, replicas=2, **beside(provider)
        ) as at:
            for stream in (False, True):
                status, data, _ = await at.ask("Hi", stream=stream, model="gpt-x")
                assert status == 200, data
                for word in (b"gpt-x-0613", b"service_tier", b'"id":"x"'):
                    assert word not in data
            assert not any(fake.seen for fake in at.fakes), "no version was chosen for users"
            sent = provider.seen[0]
            assert not sent.pop("stream")
            assert sent == {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]}
            status, data, _ = await at.ask("Hi")
            receipt = opened(data, bucket)
            assert (receipt.arm, receipt.spans, receipt.recorded) == (SERVING, [], True)
            assert (await at.report(json.loads(data)["deltawire"]["receipt"]))[0] == 200
            rows, reports = await at.uploaded()
            assert {row.upstream for row in rows} == {"openai"}
            assert {row.unusable for row in rows} == {"another provider's model drew it"}
            assert [row.drawn for row in rows] == [4, None, 4]
            assert [one.kind for one in reports if one.source == "client"] == ["thumbs"]
            _, data, _ = await at.call("GET", "/live/state", ADMIN)
            assert json.loads(data)["upstreams"] == {"openai": "gpt-x"}
            _, data, _ = await at.call("GET", "/hot_load/v1/models/hot_load", ADMIN)
            last = json.loads(data)["replicas"][-1]
            assert (last["upstream"], last["digest"]) == ("openai", "")
        await provider.server.close()

    scenario()


def test_a_canary_of_a_version_against_a_provider(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        bucket, provider = published(), Provider()
        decider = Choosing(bucket)
        decider.choose("serve", PROVIDER)
        async with live_serving(
            bucket,
            tmp_path,
            monkeypatch,
            replicas=1,
            **beside(provider),
            release=RELEASE,
        ) as at:
            decider.choose("gate", PROVIDER, decider.served(2))
            decider.choose("canary", PROVIDER, decider.served(2), share=0.5, salt="s")
            await until(lambda: at.fake.mirror.version == 2)
            arms = {}
            for number in range(40):
                status, data, _ = await at.ask(user=f"u{number}")
                assert status == 200
                receipt = opened(data, bucket)
                arms.setdefault(receipt.arm, []).append((receipt.spans, receipt.propensity))
                assert json.loads(data)["model"] == "m"
            assert arms.keys() == {SERVING, CANDIDATE}
            assert {p for rows in arms.values() for _, p in rows} == {0.5}
            assert all(spans == [(2, 3)] for spans, _ in arms[CANDIDATE])
            assert all(spans == [] for spans, _ in arms[SERVING])
            assert len(provider.seen) == len(arms[SERVING])
            decider.choose("promote", decider.served(2))
            await until(lambda: at.replicas.wanted.version == 2)
            before = len(provider.seen)
            for number in range(10):
                _, data, _ = await at.ask(user=f"u{number}")
                assert opened(data, bucket).spans == [(2, 3)]
            assert len(provider.seen) == before, "it serves nobody any more"
            await at.fake.server.close()
            status, _, _ = await at.ask()
            assert status == 503, "no user's text goes to a provider because a replica failed"
            assert len(provider.seen) == before
        await provider.server.close()

    scenario()


def test_a_provider_as_a_candidate_and_a_candidate_that_is_left_out(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        bucket, provider = published(), Provider()
        decider = Choosing(bucket)
        decider.decide("serve", 0)
        async with live_serving(
            bucket,
            tmp_path,
            monkeypatch,
            replicas=1,
            **beside(provider),
            release=RELEASE,
        ) as at:
            decider.choose("gate", decider.served(0), PROVIDER)
            decider.choose("canary", decider.served(0), PROVIDER, share=0.5, salt="s")
            await until(lambda: at.replicas.aimed)
            await until(lambda: at.decision().share == 0.5)
            for number in range(20):
                await at.ask(user=f"u{number}")
            assert provider.seen
            assert at.fake.seen
            provider.status = 401  # The gateway's own key.
            for number in range(20):
                status, data, _ = await at.ask(user=f"u{number}")
                assert status == 200, "the version that serves answers for it"
                assert b"org-1" not in data
            rows, _ = await at.uploaded()
            decision = at.decision()
            lost = [row for row in rows if row.arm == CANDIDATE and not row.upstream]
            assert lost
            assert not any(drawn_by_its_arm(row, decision) for row in lost)
            kept = [row for row in rows if row.arm == CANDIDATE and row.upstream]
            assert all(drawn_by_its_arm(row, decision) for row in kept)
            assert all(drawn_by_its_arm(row, decision) for row in rows if row.arm == SERVING)
        await provider.server.close()

    scenario()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(400, 400), (422, 400), (401, 503), (404, 400), (429, 503), (500, 503), (302, 503)],
)
def test_a_providers_refusals_are_told_without_its_words(tmp_path, monkeypatch, theirs, ours):
    @in_loop
    async def scenario():
        provider = Provider()
        provider.status = theirs
        async with live_serving(published(), tmp_path, monkeypatch, **beside(provider)) as at:
            status, data, _ = await at.ask()
            assert status == ours
            assert b"org-1" not in data
            if theirs == 400:
                _, data, _ = await at.call(
                    "POST", "/v1/chat/completions", ADMIN, json={"messages": []}
                )
                assert b"org-1" in data
        await provider.server.close()

    scenario()


def test_options_that_a_provider_does_not_know_are_refused(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        provider = Provider()
        async with live_serving(published(), tmp_path, monkeypatch, **beside(provider)) as at:
            for name, value in {"top_k": 5, "min_tokens": 2, "return_token_ids": True}.items():
                status, data, _ = await at.ask(**{name: value})
                assert (status, json.loads(data)["error"]["param"]) == (400, name)
            assert provider.seen == []
        await provider.server.close()

    scenario()


def test_a_provider_that_refuses_the_key_or_is_away_says_so(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        provider = Provider()
        provider.models = 403
        async with live_serving(
            published(),
            tmp_path,
            monkeypatch,
            **beside(provider),
            wait=False,
        ) as at:
            await until(lambda: at.replicas.state().replicas[-1].loading_state.stage == "error")
            message = at.replicas.state().replicas[-1].loading_state.message
            assert "refuses the key" in message
            assert (await at.ask())[0] == 503
            provider.models = 404  # It lists no models, and may answer all the same.
            await until(lambda: at.replicas.state().replicas[-1].readiness)
            assert (await at.ask())[0] == 200
            provider.models = 500
            await until(lambda: not at.replicas.state().replicas[-1].readiness)
        await provider.server.close()

    scenario()


def test_an_upstream_in_a_decision_is_the_one_that_it_names():
    facts = {"number": 0, "run": "0" * 32, "at": 0.0, "by": "ann", "verdict": "serve"}
    forged = ServedVersion(PROVIDER.version, PROVIDER.digest, "other")
    for odd in (forged, ServedVersion(-5, "0" * 32), ServedVersion(3, "0" * 32, "openai")):
        assert fault_after(None, Decision(serving=odd, **facts))
    assert not fault_after(None, Decision(serving=PROVIDER, **facts))
    assert PROVIDER.words == "upstream openai"
    assert ServedVersion.of_upstream("other").version != PROVIDER.version


@pytest.mark.parametrize(
    ("urls", "models", "files", "words"),
    [
        (["openai"], [], [], "NAME=VALUE"),
        (["Open AI=https://x/v1"], [], [], "NAME=VALUE"),
        (["a=ftp://x"], ["a=m"], [], "no http"),
        (["a=https://user:pw@x/v1"], ["a=m"], [], "credentials"),
        (["a=https://x/v1"], [], [], "name for its model"),
        (["a=https://x/v1", "a=https://y/v1"], ["a=m"], [], "twice"),
        (["a=https://x/v1"], ["a=m", "b=m"], [], "no --upstream does"),
        (["a=https://x/v1"], ["a=m"], ["a=/no/such/file"], "cannot read"),
        ([f"a{n}=https://x/v1" for n in range(17)], [], [], "at most"),
    ],
)
def test_upstreams_that_cannot_be_are_refused(urls, models, files, words):
    with pytest.raises(InputError, match=words):
        read_upstreams(urls, models, files)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("DELTAWIRE_UPSTREAM_KEY_MY_ONE", "from-environment")
    urls, models = ["my-one=https://x/v1", "b=https://y/v1"], ["my-one=m", "b=n"]
    first, second = read_upstreams(urls, models, [f"b={tmp_path / 'key'}"])
    assert (first.key, second.key) == ("from-environment", "from-file")


@pytest.mark.parametrize(
    ("arm", "upstream", "spans", "mine"),
    [
        (SERVING, "openai", [], True),
        (SERVING, "other", [], False),
        (SERVING, "", [(2, 3)], False),  # The candidate's replica answered for the provider.
        (CANDIDATE, "", [(2, 3)], True),
        (CANDIDATE, "openai", [], False),  # The provider answered for the candidate.
        (CANDIDATE, "", [], True),  # It is not stated what drew it.
    ],
)
def test_an_answer_of_another_arms_server_counts_for_no_arm(arm, upstream, spans, mine):
    decision = Decision(
        number=0, run="0" * 32, verdict="canary", serving=PROVIDER, share=0.5, at=0.0, by="ann",
        candidate=ServedVersion(2, "2" * 32),
    )  # fmt: skip
    row = answer(0, arm=arm, propensity=0.5)
    row = msgspec.structs.replace(row, upstream=upstream, spans=spans)
    assert drawn_by_its_arm(row, decision) is mine
