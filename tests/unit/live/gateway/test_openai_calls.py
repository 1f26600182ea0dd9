"""The gateway's API as OpenAI's own clients expect it: errors, models, options."""

import asyncio
import json

import openai
import pytest
from aiohttp import web
from live_gateway import ADMIN, TOKEN, SglangReplica, TokenReplica, live_serving, published

from deltawire.chat.requests import RequestDefaults
from deltawire.config import parse_config
from deltawire.live.gateway import model_names
from deltawire.live.gateway.options import HONORED, check_option_values, refuse_options
from deltawire.serving.errors import RequestError
from deltawire.testing.tiny import start_run


class NamedReplica(TokenReplica):
    """Lists one model."""

    listed = ("m",)

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": one} for one in self.listed]})


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Runs a scenario with a gateway and OpenAI's client."""
    monkeypatch.setattr(model_names, "RETRY_EVERY_S", 0.01)

    def run(scenario, **options):
        async def whole():
            options.setdefault("replica", NamedReplica)
            bucket = published()
            async with live_serving(bucket, tmp_path / "state", monkeypatch, **options) as at:
                client = openai.AsyncOpenAI(base_url=at.url("/v1"), api_key=TOKEN, max_retries=0)
                async with client, asyncio.timeout(60):
                    while not at.names.names():
                        await asyncio.sleep(0.01)
                    await scenario(at, client)

        asyncio.run(whole())

    return run


def ask(client, **more):
    messages = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(**({"model": "m", "messages": messages} | more))


def test_a_wrong_model_is_refused_and_right_ones_are_listed(serve):
    async def scenario(at, client):
        run = start_run(at.bucket).name
        with pytest.raises(openai.NotFoundError) as error:
            await ask(client, model="gpt-none")
        assert (error.value.code, error.value.param) == ("model_not_found", "model")
        assert error.value.type == "invalid_request_error"
        assert "'m'" in error.value.message
        assert not at.fake.seen
        assert [one.id async for one in client.models.list()] == ["m", run]
        assert (await client.models.retrieve(run)).id == run
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve("gpt-none")
        assert error.value.code == "model_not_found"
        answer = await ask(client, model=run)
        assert answer.model == run
        assert at.fake.seen[-1]["model"] == "m"  # Its own name for the model.

    serve(scenario)


def test_names_that_the_operator_gives_replace_those_of_replicas(serve):
    async def scenario(at, client):
        assert (await ask(client, model="support/bot")).model == "support/bot"
        assert at.fake.seen[-1]["model"] == "m"
        assert (await client.models.retrieve("support/bot")).id == "support/bot"
        with pytest.raises(openai.NotFoundError):
            await ask(client, model="m")

    serve(scenario, model_names=["support/bot"])


def test_every_name_is_taken_if_the_operator_says_so(serve):
    async def scenario(at, client):
        assert (await ask(client, model="whatever")).model == "whatever"
        assert at.fake.seen[-1]["model"] == "m"

    serve(scenario, model_names=["*"])


def test_a_list_of_models_that_is_too_long_or_none_teaches_no_name(serve):
    odd = [b"x" * ((1 << 20) + 1), b"[]", b'{"data":[{"id":""}]}', b"[" * 100_000, b'{"data":1}']

    class Long(NamedReplica):
        async def models(self, request):
            return web.Response(body=odd.pop(0)) if odd else await super().models(request)

    async def scenario(at, client):
        assert at.names.names() == ["m", start_run(at.bucket).name]
        assert not odd

    serve(scenario, replica=Long)


def test_errors_have_the_class_type_and_code_of_openais(serve):
    async def scenario(at, client):
        cases = [
            (client.with_options(api_key="wrong"), {}, openai.AuthenticationError,
             "invalid_request_error", "invalid_api_key"),
            (client, {"extra_body": {"no_such_option": 1}}, openai.BadRequestError,
             "invalid_request_error", "unknown_parameter"),
            (client, {"extra_body": {"guided_regex": "a+"}}, openai.BadRequestError,
             "invalid_request_error", "unsupported_parameter"),
        ]  # fmt: skip
        for one, more, kind, type_, code in cases:
            with pytest.raises(kind) as error:
                await ask(one, **more)
            assert (error.value.type, error.value.code) == (type_, code)
        at.fake.mode = "error"
        with pytest.raises(openai.BadRequestError) as error:
            await ask(client)
        assert (error.value.type, error.value.message) == (
            "invalid_request_error", f"Error code: 400 - {error.value.response.json()}"
        )  # fmt: skip
        assert error.value.response.json()["error"]["message"] == "no"
        at.fake.mode = "fail"
        with pytest.raises(openai.InternalServerError) as error:
            await ask(client)
        assert (error.value.type, error.value.code) == ("server_error", "internal_error")
        status, data, _ = await at.call("GET", "/v1/no/such/path")
        assert (status, json.loads(data)["error"]["code"]) == (404, "not_found")
        status, data, _ = await at.call("DELETE", "/v1/chat/completions")
        assert (status, json.loads(data)["error"]["code"]) == (405, "method_not_supported")
        status, data, _ = await at.call("GET", "/live/state")
        assert (status, json.loads(data)["error"]["code"]) == (403, "insufficient_permissions")

    serve(scenario)


def test_an_error_in_a_stream_is_raised_by_the_client(serve):
    class Failing(NamedReplica):
        def stated(self, body):
            if any(row.get("delta", {}).get("content") for row in body["choices"]):
                return {"error": {"message": f"version {self.mirror.version} ran out of memory"}}
            return super().stated(body)

    async def scenario(at, client):
        with pytest.raises(openai.APIError, match="the replica failed") as error:
            async for _ in await ask(client, stream=True):
                pass
        assert error.value.type == "server_error"

    serve(scenario, replica=Failing)


OPTIONS = {
    "seed": 7, "min_tokens": 3, "ignore_eos": True, "bad_words": ["no"], "top_k": 5,
    "stop_token_ids": [3], "reasoning_effort": "low", "logit_bias": {"5": 1}, "echo": True,
}  # fmt: skip


@pytest.mark.parametrize("replica", [NamedReplica, SglangReplica])
def test_options_reach_an_engine_that_honors_them_or_are_refused_by_name(serve, replica):
    async def scenario(at, client):
        honored = HONORED[at.fake.engine] | {"seed"}
        for name, value in OPTIONS.items():
            if name in honored:
                assert (await ask(client, extra_body={name: value})).choices
                assert at.fake.seen[-1][name] == value
                continue
            with pytest.raises(openai.BadRequestError, match=name) as error:
                await ask(client, extra_body={name: value})
            assert (error.value.param, error.value.code) == (name, "unsupported_parameter")

    named = {"models": NamedReplica.models, "listed": NamedReplica.listed}
    serve(scenario, replica=type("Named", (replica,), named))


@pytest.mark.parametrize(
    ("name", "neutral", "active"),
    [
        ("min_tokens", 0, 1),
        ("ignore_eos", False, True),
        ("bad_words", [], ["a"]),
        ("presence_penalty", 0, 0.1),
        ("store", False, True),
        ("metadata", {}, {"a": "b"}),
        ("service_tier", "auto", "flex"),
        ("functions", [], [{"name": "f"}]),
        ("lora_path", None, "other"),
        ("logits_processors", [], ["module.f"]),
        ("bootstrap_host", None, "10.0.0.1"),
        ("request_id", None, "mine"),
    ],
)
def test_an_option_must_be_honored_by_every_upstream(name, neutral, active):
    refuse_options({name: neutral, "prompt_cache_key": "k"}, {"vllm", "embedded"})
    with pytest.raises(RequestError, match=name):
        refuse_options({name: active}, {"vllm", "embedded"})
    refuse_options({name: active}, ())  # No upstream is known yet.


def test_an_engine_that_says_nothing_counts_as_vllm():
    refuse_options({"bad_words": ["a"]}, {""})
    with pytest.raises(RequestError):
        refuse_options({"regex": "a"}, {""})
    with pytest.raises(RequestError):
        refuse_options({"bad_words": ["a"]}, {"another"})


def test_options_that_change_tokens_make_an_answer_unusable_for_training(serve):
    async def scenario(at, client):
        await at.ask(min_tokens=3)
        await at.ask(seed=3)
        rows, _ = await at.uploaded()
        assert [row.truncated for row in rows] == [True, False]

    serve(scenario)


def test_the_name_of_a_missing_model_is_not_that_of_a_replica(serve):
    async def scenario(at, client):
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        _, data, _ = await at.call("POST", "/v1/chat/completions", json=body)
        assert json.loads(data)["model"] == "bot"
        status, data, _ = await at.call("POST", "/v1/chat/completions", json=body | {"model": 3})
        assert (status, json.loads(data)["error"]["param"]) == (400, "model")
        _, data, _ = await at.call("POST", "/v1/chat/completions", ADMIN, json=body)
        assert json.loads(data)["model"] == "m"

    serve(scenario, model_names=["bot"])


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("n", 0, "invalid_value"), ("n", -1, "invalid_value"), ("n", 129, "invalid_value"),
        ("n", "2", "invalid_type"), ("n", 1.5, "invalid_type"), ("n", True, "invalid_type"),
        ("max_tokens", 0, "invalid_value"), ("max_tokens", 10**30, "invalid_value"),
        ("max_tokens", "5", "invalid_type"), ("max_completion_tokens", 5.0, "invalid_type"),
        ("seed", 1.5, "invalid_type"), ("temperature", "1", "invalid_type"),
        ("temperature", True, "invalid_type"), ("top_p", [], "invalid_type"),
        ("stream", "false", "invalid_type"), ("stream", 1, "invalid_type"),
    ],
)  # fmt: skip
def test_a_value_that_no_api_takes_reaches_no_replica_and_blames_no_arm(
    tmp_path, monkeypatch, name, value, code
):
    """Replicas differ in what they make of it: some fail, or answer in another form."""

    async def scenario():
        async with live_serving(published(), tmp_path, monkeypatch) as at:
            status, data, _ = await at.ask("Hi", **{name: value})
            error = json.loads(data)["error"]
            assert (status, error["code"], error["param"]) == (400, code, name)
            assert error["type"] == "invalid_request_error"
            assert not at.fake.seen
            assert not at.recorder.counts["failed"]
            for fine in (None, 1):
                if name != "stream":
                    assert (await at.ask("Hi", **{name: fine}))[0] == 200

    asyncio.run(scenario())


def test_more_answers_than_are_served_reach_no_replica(tmp_path, monkeypatch):
    """Also those that a long list of prompts asks for: the answer would be refused as too long."""

    async def scenario():
        async with live_serving(published(), tmp_path, monkeypatch) as at:

            async def complete(**body):
                return await at.call("POST", "/v1/completions", json={"model": "m"} | body)

            status, data, _ = await complete(prompt=["x"] * 1025, n=2)
            error = json.loads(data)["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_value", "prompt")
            assert not at.fake.seen
            assert not at.recorder.counts["failed"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "chat", "fine"),
    [
        ({"max_tokens": 0, "echo": True}, False, True),
        ({"max_tokens": 0, "echo": True}, True, False),
        ({"max_tokens": 0}, False, False),
        ({"max_tokens": -1, "echo": True}, False, False),
    ],
)
def test_only_a_completion_that_scores_its_prompt_may_ask_for_no_token(body, chat, fine):
    if fine:
        check_option_values(body, chat=chat)
    else:
        with pytest.raises(RequestError, match="max_tokens"):
            check_option_values(body, chat=chat)
    config = parse_config({"name": "x", "rollout": {"max_tokens": 16}}, source="test")
    assert RequestDefaults.of(config).filled_in(body, chat=chat)["max_tokens"] == body["max_tokens"]


def test_a_request_without_a_length_gets_the_runs():
    config = parse_config({"name": "x", "rollout": {"max_tokens": 16}}, source="test")
    for body in ({}, {"max_tokens": None}):
        assert RequestDefaults.of(config).filled_in(body, chat=False)["max_tokens"] == 16
    found = RequestDefaults.of(config).filled_in({"max_completion_tokens": 3}, chat=True)
    assert "max_tokens" not in found
