"""Answers with receipts: whole and streamed, captured and not."""

import asyncio
import contextlib
import json
import re

import aiohttp
import openai
import pytest
from live_gateway import (
    ADMIN,
    GENERATION,
    KEYS,
    PROMPT,
    TOKEN,
    WORDS,
    SglangReplica,
    TokenReplica,
    live_serving,
    published,
)

from deltawire.live.feedback.client import RECEIPT_HEADER, receipt_of
from deltawire.live.gateway.engine_tokens import AnswerReader
from deltawire.testing.tiny import start_run
from deltawire.wire.captures import FAILED
from deltawire.wire.receipts import hash_tokens, read_receipt

RECEIPT = re.compile(rb"dw2\.[\w.-]+")


@pytest.fixture
def bucket():
    return published()


@pytest.fixture
def serve(bucket, tmp_path, monkeypatch):
    """Runs a scenario with a gateway."""

    def run(scenario, **options):
        async def whole():
            async with live_serving(bucket, tmp_path / "state", monkeypatch, **options) as at:
                await scenario(at)

        asyncio.run(whole())

    return run


def opened(text, bucket):
    return read_receipt(text, keys=KEYS, run=start_run(bucket).id)


def test_a_whole_answer_has_a_receipt_and_is_captured_with_the_engines_tokens(serve, bucket):
    async def scenario(at):
        status, data, headers = await at.ask()
        assert status == 200
        body = json.loads(data)
        text = headers[RECEIPT_HEADER]
        assert body["deltawire"] == {"receipt": text}
        assert receipt_of(body) == text
        assert "token_ids" not in data.decode()
        assert body["choices"][0]["logprobs"] is None
        receipt = opened(text, bucket)
        assert receipt.spans == [(0, 3)]
        assert receipt.tokens == hash_tokens(PROMPT, [100, 101, 102])
        assert (receipt.arm, receipt.propensity, receipt.turn) == ("serving", 1.0, 0)
        assert receipt.recorded
        assert receipt.user == GENERATION.pseudonyms.user("alice") != ""
        (row,), _ = await at.uploaded()
        assert row.answer == receipt.answer
        assert row.prompt_ids.tolist() == PROMPT
        assert row.token_ids.tolist() == [100, 101, 102]
        assert row.token_logprobs.tolist() == [-0.5] * 3
        assert row.token_versions.tolist() == [0] * 3
        assert (row.temperature, row.truncated, row.text) == (1.0, False, b"")
        assert at.fake.seen[0]["temperature"] == 1.0

    serve(scenario)


def test_a_stream_passes_text_on_and_ends_with_a_receipt(serve, bucket):
    async def scenario(at):
        client = openai.AsyncOpenAI(base_url=at.url("/v1"), api_key=TOKEN)
        async with client:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                user="alice",
                extra_headers={"x-deltawire-capture": "true"},
            )
            chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content for chunk in chunks]
        assert [text for text in texts if text] == WORDS
        assert not any(receipt_of(chunk) for chunk in chunks[:-1])
        assert chunks[-1].choices[0].finish_reason == "stop"
        receipt = opened(receipt_of(chunks[-1]), bucket)
        assert receipt.tokens == hash_tokens(PROMPT, [100, 101, 102])
        (row,), _ = await at.uploaded()
        assert row.token_ids.tolist() == [100, 101, 102]
        assert row.first_s > 0

    serve(scenario)


def test_the_first_token_does_not_wait_for_the_last(serve):
    async def scenario(at):
        async def slow(delay):
            await at.fake.finish.wait()

        import live_gateway

        seen = asyncio.Event()
        live_gateway.asyncio = type("Paused", (), {**vars(asyncio), "sleep": staticmethod(slow)})
        try:
            headers = {"Authorization": f"Bearer {TOKEN}", "x-deltawire-capture": "true"}
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
            async with at.client.post(
                at.url("/v1/chat/completions"), json=body, headers=headers
            ) as answer:
                got = b""
                async with asyncio.timeout(60):
                    async for piece in answer.content.iter_any():
                        got += piece
                        if b"Hello" in got and not seen.is_set():
                            seen.set()
                            assert b"there" not in got
                            at.fake.finish.set()
        finally:
            live_gateway.asyncio = asyncio
        assert seen.is_set()
        assert b'"receipt"' in got

    serve(scenario)


def test_usage_and_what_the_client_asked_for_are_kept(serve):
    async def scenario(at):
        _, data, _ = await at.ask(
            stream=True, logprobs=True, return_token_ids=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        lines = [line for line in data.decode().splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2][6:])
        assert last["usage"] == {"total_tokens": 6}
        assert receipt_of(last)
        assert data.count(b'"token_ids"') == 3
        assert data.count(b'"logprob"') == 3

    serve(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_answers_are_captured_and_look_like_vllms(serve, bucket, stream):
    shown = []

    async def scenario(at):
        status, data, _ = await at.ask(stream=stream)
        assert status == 200
        text = RECEIPT.sub(b"RECEIPT", data)
        shown.append(text)
        (*_, row), _ = await at.uploaded()
        assert not row.unusable
        assert row.prompt_ids.tolist() == PROMPT
        assert row.token_ids.tolist() == [100, 101, 102]
        assert row.token_logprobs.tolist() == [-0.5] * 3
        assert row.token_versions.tolist() == [0] * 3

    serve(scenario, replica=TokenReplica)
    serve(scenario, replica=SglangReplica)
    assert shown[0] == shown[1]


def test_versions_that_sglang_states_count_more_than_what_it_held(serve, bucket):
    class Swapping(SglangReplica):
        def whole(self, body, count, ids):
            found = super().whole(body, count, ids)
            spans = [("0", 0, 1), ("2", 1, 3)]
            found["metadata"]["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in spans
            ]
            return found

    async def scenario(at):
        at.fake.swap_to = 2
        assert opened(await at.receipt(), bucket).spans == [(0, 1), (2, 2)]

    serve(scenario, replica=Swapping)


@pytest.mark.parametrize(
    "spans",
    [
        "x", ["x"], [{"version": "default", "start": 0, "end": 3}],
        [{"version": "1", "start": 1, "end": 3}], [{"version": "1", "start": 0, "end": 1 << 40}],
        [{"version": "9" * 99, "start": 0, "end": 3}], [{"version": "1", "start": 0, "end": -2}],
    ],
)  # fmt: skip
def test_spans_that_contradict_the_tokens_do_not_count(spans):
    reader = AnswerReader()
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    reader.read(
        body | {"sglext": {"output_ids": [[1, 2, 3]]}, "metadata": {"weight_versions": spans}}
    )
    assert reader.choices[0].versions == []
    assert reader.choices[0].ids == [1, 2, 3]


@pytest.mark.parametrize("ids", [5, [5], ["x"], [None], {"0": [1]}, "x"])
def test_ids_that_are_no_lists_are_missing(ids):
    reader = AnswerReader()
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    reader.read(body | {"sglext": {"output_ids": ids}})
    assert reader.choices[0].fault() == "the engine stated no tokens"


def test_without_consent_nothing_is_stored_and_the_receipt_says_so(serve, bucket):
    async def scenario(at):
        for stream in (False, True):
            status, data, _ = await at.ask(capture="", stream=stream)
            assert status == 200
            line = data.decode().splitlines()[-4][6:] if stream else data.decode()
            receipt = opened(receipt_of(json.loads(line)), bucket)
            assert not receipt.recorded
            assert (receipt.spans, receipt.tokens) == ([(0, 1)], "")
        assert not any("return_token_ids" in body for body in at.fake.seen)
        assert await at.uploaded() == [[], []]

    serve(scenario)


def test_an_answer_without_tokens_is_served_and_unusable(serve):
    async def scenario(at):
        at.fake.mode = "no tokens"
        for stream in (False, True):
            assert (await at.ask(stream=stream))[0] == 200
        rows, _ = await at.uploaded()
        assert [row.unusable for row in rows] == ["the engine stated no tokens"] * 2
        assert not any(row.tokens or row.prompt for row in rows)

    serve(scenario)


def test_weights_that_changed_meanwhile_make_an_answer_unusable(serve, bucket):
    async def scenario(at):
        at.fake.swap_to = 2
        text = await at.receipt()
        assert opened(text, bucket).spans == []
        (row,), _ = await at.uploaded()
        assert "weights may have changed" in row.unusable

    serve(scenario)


def test_each_of_several_choices_has_a_receipt(serve, bucket):
    async def scenario(at):
        for stream in (False, True):
            _, data, _ = await at.ask(n=2, stream=stream)
            body = data.decode().splitlines()[-4][6:] if stream else data.decode()
            found = json.loads(body)["deltawire"]
            assert found["receipt"] == found["receipts"][0]
            assert len({opened(one, bucket).answer for one in found["receipts"]}) == 2
        rows, _ = await at.uploaded()
        assert len(rows) == 4
        assert not any(row.unusable for row in rows)

    serve(scenario)


def test_a_broken_call_and_other_sampling_are_noted(serve):
    async def scenario(at):
        at.fake.mode = "calls"
        await at.ask(temperature=0.2, top_p=0.5)
        (row,), _ = await at.uploaded()
        assert (row.calls, row.broken_calls) == (1, 1)
        assert (row.temperature, row.truncated) == (pytest.approx(0.2), True)

    serve(scenario)


def test_an_error_of_the_replica_is_passed_on_without_a_receipt(serve):
    async def scenario(at):
        at.fake.mode = "error"
        status, data, headers = await at.ask()
        error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
        assert (status, json.loads(data)) == (400, {"error": error})
        assert RECEIPT_HEADER not in headers

    serve(scenario)


@pytest.mark.parametrize(("mode", "stream"), [("fail", False), ("fail", True), ("break", True)])
def test_an_answer_that_a_replica_failed_to_give_is_recorded(serve, mode, stream):
    async def scenario(at):
        at.fake.mode = mode
        with contextlib.suppress(aiohttp.ClientError):
            status, _, headers = await at.ask(stream=stream)
            assert (status, RECEIPT_HEADER in headers) == (500, False)
        (row,), _ = await at.uploaded()
        assert (row.finish, row.arm, row.tokens) == (FAILED, "serving", b"")
        assert "the replica failed" in row.unusable
        assert at.recorder.counts["failed"] == 1

    serve(scenario)


def test_conversations_stay_on_one_replica_and_turns_count(serve, bucket):
    async def scenario(at):
        messages = [{"role": "user", "content": "a question"}]
        receipts = []
        for _ in range(4):
            text = await at.receipt(messages=messages)
            receipts.append(opened(text, bucket))
            messages += [
                {"role": "assistant", "content": "".join(WORDS)},
                {"role": "user", "content": "and then?"},
            ]
        assert len({one.conversation for one in receipts}) == 1
        assert [one.turn for one in receipts] == [0, 1, 2, 3]
        assert sorted(len(fake.seen) for fake in at.fakes) == [0, 0, 4]
        other = opened(await at.receipt(messages=messages[:1], user="bob"), bucket)
        assert other.conversation != receipts[0].conversation

    serve(scenario, replicas=3)


def test_signals_without_a_call_are_stored_with_their_rates(serve, bucket):
    async def scenario(at):
        first = [{"role": "user", "content": "write a poem"}]
        await at.receipt(messages=first)
        again = opened(await at.receipt(messages=first), bucket)
        follow = [
            *first,
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "No, that is wrong."},
        ]
        await at.receipt(messages=follow)
        _, rows = await at.uploaded()
        found = {(row.kind, row.value) for row in rows if row.answer == again.answer}
        assert ("detected_dissatisfaction", 1.0) in found
        assert ("detected_retry", 0.0) in found
        (kept,) = [value for kind, value in found if kind == "detected_edit"]
        assert 0 < kept < 1
        assert ("detected_retry", 1.0) in {
            (row.kind, row.value) for row in rows if row.answer != again.answer
        }
        assert {row.source for row in rows} == {"detector"}
        _, data, _ = await at.call("GET", "/live/state", token=ADMIN)
        state = json.loads(data)
        assert state["rates"]["retry"] == 0.5
        assert state["counts"]["recorded"] == 3
        assert (await at.call("GET", "/live/state", token=TOKEN))[0] == 403

    serve(scenario)
