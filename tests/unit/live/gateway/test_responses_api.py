"""OpenAI's Responses API at the gateway, by OpenAI's own client."""

import asyncio
import json

import aiohttp
import openai
import pytest
from live_gateway import TOKEN, WORDS, TokenReplica, live_serving, published

from deltawire.live.feedback.client import RECEIPT_HEADER, receipt_of
from deltawire.live.gateway.responses import ResponseForm, chat_of
from deltawire.serving.errors import RequestError

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


class CountingReplica(TokenReplica):
    """Counts tokens, ends by ``finish``, and calls a tool in streams too."""

    finish_reason = "stop"

    def stated(self, body):
        rows = body["choices"]
        for row in rows:
            if row.get("finish_reason"):
                row["finish_reason"] = self.finish_reason
            if self.mode == "calls" and row.get("delta", {}).get("content"):
                word = row["delta"].pop("content")
                call = {"index": 0, "function": {"arguments": json.dumps(word)}}
                if word == WORDS[0]:
                    call |= {"id": "call_1", "type": "function"}
                    call["function"]["name"] = "f"
                row["delta"]["tool_calls"] = [call]
        return body | ({} if "delta" in str(rows) else {"usage": USAGE})

    def last(self, body):
        return [{"id": "c", "choices": [], "usage": USAGE}]


USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Runs a scenario with a gateway and OpenAI's client."""

    def run(scenario, **options):
        async def whole():
            bucket = published()
            async with live_serving(
                bucket, tmp_path / "state", monkeypatch, replica=CountingReplica, **options
            ) as at:
                client = openai.AsyncOpenAI(
                    base_url=at.url("/v1"), api_key=TOKEN, max_retries=0,
                    default_headers={"x-deltawire-capture": "true", "x-deltawire-user": "alice"},
                )  # fmt: skip
                async with client:
                    await scenario(at, client)

        asyncio.run(whole())

    return run


def test_a_text_becomes_a_chat_and_its_answer_a_response(serve):
    async def scenario(at, client):
        answer = await client.responses.with_raw_response.create(
            model="m", input="Hi", instructions="Be brief.", max_output_tokens=9, temperature=0.5,
            metadata={"a": "b"},
        )  # fmt: skip
        found = answer.parse()
        assert found.output_text == "".join(WORDS)
        assert (found.status, found.model, found.instructions) == ("completed", "m", "Be brief.")
        assert (found.usage.input_tokens, found.usage.output_tokens) == (3, 3)
        assert found.metadata == {"a": "b"}
        assert receipt_of(found) == answer.headers[RECEIPT_HEADER]
        (seen,) = at.fake.seen
        assert seen["messages"] == [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        ]  # fmt: skip
        assert (seen["max_completion_tokens"], seen["temperature"]) == (9, 0.5)
        assert not {"input", "instructions", "metadata"} & seen.keys()
        (row,), _ = await at.uploaded()
        assert row.token_ids.tolist() == [100, 101, 102]
        assert (await at.report(receipt_of(found)))[0] == 200

    serve(scenario)


def test_a_stream_has_the_events_of_the_api_and_ends_with_a_receipt(serve):
    async def scenario(at, client):
        events = []
        async with client.responses.stream(model="m", input="Hi") as stream:
            events += [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "".join(WORDS)
        assert final.usage.total_tokens == 6
        kinds = [event.type for event in events]
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.content_part.added", *["response.output_text.delta"] * 3,
            "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
        (row,), _ = await at.uploaded()
        assert row.token_ids.tolist() == [100, 101, 102]
        assert (await at.report(receipt_of(events[-1].response)))[0] == 200

    serve(scenario)


def test_calls_of_tools_come_whole_and_streamed(serve):
    async def scenario(at, client):
        at.fake.mode = "calls"
        found = await client.responses.create(
            model="m", input="Hi", tools=[TOOL], tool_choice={"type": "function", "name": "f"}
        )
        (call,) = [one for one in found.output if one.type == "function_call"]
        assert (call.name, call.arguments, call.call_id) == ("f", "{]", "1")
        seen = at.fake.seen[-1]
        assert seen["tools"][0]["function"]["name"] == "f"
        assert seen["tool_choice"] == {"type": "function", "function": {"name": "f"}}
        async with client.responses.stream(model="m", input="Hi", tools=[TOOL]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        (call,) = final.output
        assert (call.name, call.call_id) == ("f", "call_1")
        assert call.arguments == "".join(map(json.dumps, WORDS))
        answered = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            *[one.model_dump() for one in final.output],
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ]
        at.fake.mode = "tokens"
        await client.responses.create(model="m", input=answered, tools=[TOOL])
        said = at.fake.seen[-1]["messages"]
        assert [one["role"] for one in said] == ["user", "assistant", "tool"]
        assert said[1]["tool_calls"][0]["id"] == said[2]["tool_call_id"] == "call_1"

    serve(scenario)


def test_an_answer_that_was_cut_off_is_incomplete(serve):
    async def scenario(at, client):
        at.fake.finish_reason = "length"
        found = await client.responses.create(model="m", input="Hi")
        assert (found.status, found.incomplete_details.reason) == (
            "incomplete", "max_output_tokens"
        )  # fmt: skip
        async with client.responses.stream(model="m", input="Hi") as stream:
            kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.incomplete"

    serve(scenario)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"no_such": 1}, "no_such"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content",
        ),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"instructions": ["x"]}, "instructions"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"tools": {}}, "tools"),
        ({"text": []}, "text"),
        ({"reasoning": "high"}, "reasoning"),
        ({"stream_options": {"x": 1}}, "stream_options"),
    ],
)
def test_what_no_chat_says_is_refused_by_name(more, param):
    with pytest.raises(RequestError) as error:
        chat_of({"model": "m", "input": "Hi"} | more)
    assert error.value.param == param


def test_what_means_nothing_is_taken():
    chat = chat_of(
        {
            "input": "Hi", "store": False, "truncation": "disabled", "service_tier": "auto",
            "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "tools": [],
            "include": [], "previous_response_id": None, "parallel_tool_calls": True,
        }
    )  # fmt: skip
    assert chat == {
        "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low", "tools": [],
        "parallel_tool_calls": True,
    }  # fmt: skip
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    assert chat_of({"input": "Hi", "text": {"format": schema}})["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}
    }  # fmt: skip


def test_a_hostile_replicas_chunks_break_no_form():
    odd = [
        {"choices": [{"delta": {"content": 3, "tool_calls": [None, 3, {"function": 3}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 7, "function": {"name": 1}}]}}]},
        {"choices": [{"index": 1, "delta": {"content": "other choice"}}, "x"]},
        {"choices": [{"delta": 3}], "usage": {"prompt_tokens": "x"}},
    ]
    form = ResponseForm({"model": "m"})
    data = b"".join(map(form.chunk, odd)) + form.end([], {"receipt": "r"})
    last = json.loads(data.strip().rpartition(b"data: ")[2])
    assert last["response"]["usage"] is None
    assert {item["type"] for item in last["response"]["output"]} == {"function_call"}


def test_a_stream_whose_replica_breaks_off_does_not_look_complete(serve):
    async def scenario(at, client):
        at.fake.mode = "break"
        body = {"model": "m", "input": "Hi", "stream": True}
        with pytest.raises(aiohttp.ClientError):
            await at.call("POST", "/v1/responses", json=body)

    serve(scenario)


def test_a_wrong_length_is_named_as_the_client_named_it():
    for value in (0, "5", True):
        with pytest.raises(RequestError) as error:
            chat_of({"model": "m", "input": "Hi", "max_output_tokens": value})
        assert error.value.param == "max_output_tokens"
