"""Thinking budgets at the chat endpoint: an unmodified openai client asks for less thinking, sees
inserted tokens as they come, and a recorded session keeps the run's own budget."""

import asyncio

import msgspec
import openai
import pytest
from endpoint_policy import policy_of

from deltawire.chat.openai.endpoint import Endpoint, listening
from deltawire.chat.openai.recording import Recording
from deltawire.chat.text import Text
from deltawire.config import ThinkingConfig
from deltawire.engines.base import Completion

TOKEN, END = "a token", 256
THINKING = msgspec.convert(
    {"end": ")", "budgets": [8], "answer_tokens": 4, "closing": "so"}, ThinkingConfig
)


class Ponders:
    """Thinks the alphabet until it is closed, then answers yes."""

    version, slots, capacity, active = 7, 4, 4096, 0

    def __init__(self):
        self.asked = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.asked.append(sampling.max_tokens)
        closed = prompt[-1] == ord(")")
        text = [*b"yes", END] if closed else [97 + n % 26 for n in range(sampling.max_tokens)]
        tokens = text[: sampling.max_tokens]
        for token in tokens:
            await asyncio.sleep(0)
            if on_token is not None and on_token(token):
                break
        finish = "stop" if tokens[-1] == END else "length"
        return Completion(tokens, [-0.25] * len(tokens), [7] * len(tokens), finish)


def talk(byte_tokenizer, harness, *, recorded=False, thinking=THINKING):
    text, engine = Text(byte_tokenizer), Ponders()
    recording = Recording(text) if recorded else None
    policy = policy_of(max_tokens=64, capacity=4096, thinking=thinking, budget=8)
    endpoint = Endpoint(engine, text, policy, token=TOKEN, recording=recording)

    async def run():
        async with (
            listening(endpoint) as url,
            openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client,
        ):
            return await harness(client.chat.completions)

    return asyncio.run(run()), engine, recording


MESSAGES = [{"role": "user", "content": "ask"}]


@pytest.mark.parametrize(
    ("options", "thought"),
    [
        ({}, 8),
        ({"reasoning_effort": "high"}, 8),
        ({"reasoning_effort": "medium"}, 4),
        ({"reasoning_effort": "low"}, 2),
        ({"reasoning_effort": "minimal"}, 1),
        ({"extra_body": {"max_thinking_tokens": 3}}, 3),
        ({"extra_body": {"max_thinking_tokens": 300}}, 8),
    ],
)
def test_a_client_bounds_the_thinking(byte_tokenizer, options, thought):
    async def harness(chat):
        answer = await chat.create(model="policy", messages=MESSAGES, **options)
        return answer.choices[0].message.content

    said, engine, _ = talk(byte_tokenizer, harness)
    assert said == "abcdefgh"[:thought] + "so)yes"
    assert engine.asked[0] == thought


def test_inserted_tokens_are_streamed(byte_tokenizer):
    async def harness(chat):
        stream = await chat.create(model="policy", messages=MESSAGES, stream=True)
        return [c.choices[0].delta.content or "" async for c in stream if c.choices]

    parts, _, _ = talk(byte_tokenizer, harness)
    assert "".join(parts) == "abcdefghso)yes"
    assert len([part for part in parts if part]) >= 10


def test_a_stop_string_in_the_thinking_ends_the_answer(byte_tokenizer):
    async def harness(chat):
        return await chat.create(model="policy", messages=MESSAGES, stop=["cd"])

    answer, _, _ = talk(byte_tokenizer, harness)
    assert answer.choices[0].message.content == "ab"


def test_a_recorded_session_has_the_runs_budget(byte_tokenizer):
    async def harness(chat):
        return await chat.create(model="policy", messages=MESSAGES, reasoning_effort="low")

    answer, _, recording = talk(byte_tokenizer, harness, recorded=True)
    assert answer.choices[0].message.content == "abcdefghso)yes"
    (segment,) = recording.segments()
    assert segment.mask == [1] * 8 + [0] * 3 + [1] * 4
    assert segment.forced == [(8, 11)]
    assert segment.thoughts == [(8, "forced")]


@pytest.mark.parametrize(
    "options", [{"reasoning_effort": "low"}, {"extra_body": {"max_thinking_tokens": 3}}]
)
def test_a_policy_without_budgets_refuses_them(byte_tokenizer, options):
    async def harness(chat):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat.create(model="policy", messages=MESSAGES, **options)
        return str(caught.value)

    said, _, _ = talk(byte_tokenizer, harness, thinking=None)
    assert "the policy has no thinking budgets" in said
