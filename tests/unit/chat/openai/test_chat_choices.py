"""An unmodified openai client gets more than one plain answer: several choices, stop strings, a
choice of tools. The record stays what was drawn, to the token.
"""

import asyncio
import copy
import json

import openai
import pytest
import torch
from endpoint_policy import policy_of

from deltawire.chat.openai.chat import read_chat, read_completion
from deltawire.chat.openai.endpoint import Endpoint, listening
from deltawire.chat.openai.recording import Recording
from deltawire.chat.text import Text
from deltawire.engines.base import Completion
from deltawire.engines.transformers import TransformersEngine
from deltawire.errors import InputError
from deltawire.train.build import byte_tokenizer

TOKEN = "a token"
END = 259
HERMES = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    HERMES.replace("<tool_call>\n", "")
    .replace("\n</tool_call>", "")
    .replace('"arguments"', '"parameters"')
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "add_all")
]


def text_of(template):
    chat = copy.deepcopy(byte_tokenizer())
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.chat_template = template
    return Text(chat)


@pytest.fixture(scope="module")
def text():
    return text_of(HERMES)


class Says:
    """An engine that answers scripted texts, one for each request, each token with a distinct
    log-probability; it stops where the endpoint asks it to."""

    version, slots, capacity, active = 7, 4, 4096, 0

    def __init__(self, *texts, deaf=False):
        self.texts, self.requests, self.drawn = list(texts), [], []
        self.deaf = deaf
        self.fails_at = None

    async def generate(self, prompt, sampling, *, on_token=None):
        number = len(self.requests)
        self.requests.append((list(prompt), sampling))
        completion = Completion()
        self.drawn.append(completion)
        if number == self.fails_at:
            raise RuntimeError("the engine broke")
        for token in [*self.texts[number % len(self.texts)].encode(), END][: sampling.max_tokens]:
            await asyncio.sleep(0)
            completion.tokens.append(token)
            completion.logprobs.append(-0.001 * (1000 * number + len(completion.tokens)))
            completion.versions.append(self.version + number)
            enough = on_token is not None and on_token(token)
            if token == END or (enough and not self.deaf):
                completion.finish = "stop"
                break
        return completion


def user(content):
    return {"role": "user", "content": content}


def talk(text, engine, harness, **policy):
    """Run ``harness(client)`` against an endpoint; returns its result and the recording."""
    recording = Recording(text)
    settings = {"max_tokens": 128, "capacity": 4096, "temperature": 0.7, **policy}
    endpoint = Endpoint(engine, text, policy_of(**settings), token=TOKEN, recording=recording)

    async def run():
        async with (
            listening(endpoint) as url,
            openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client,
        ):
            return await harness(client)

    return asyncio.run(run()), recording, endpoint


def drawn_of(segment):
    """(tokens, log-probabilities, versions) of what the model drew of a segment."""
    rows = zip(segment.tokens, segment.logprobs, segment.versions, segment.mask, strict=True)
    return [(token, logprob, version) for token, logprob, version, mask in rows if mask]


def rows_of(completion, count=None):
    rows = zip(completion.tokens, completion.logprobs, completion.versions, strict=True)
    return list(rows)[:count]


# Several choices.


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_a_separate_segment(text, stream):
    engine = Says("one", "é two", "three")

    async def harness(client):
        ask = client.chat.completions.create
        if not stream:
            return await ask(model="policy", messages=[user("q")], n=3, logprobs=True)
        options = {"include_usage": True}
        answer = await ask(
            model="policy", messages=[user("q")], n=3, stream=True, stream_options=options
        )
        return [chunk async for chunk in answer]

    answer, recording, _ = talk(text, engine, harness)
    if stream:
        said = dict.fromkeys(range(3), "")
        for chunk in answer[:-1]:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        finishes = [c.choices[0].finish_reason for c in answer[:-1]]
        assert said == {0: "one", 1: "é two", 2: "three"}
        assert [f for f in finishes if f] == ["stop"] * 3
        # The choices are interleaved: neither waits for the other.
        first = [c.choices[0].index for c in answer if c.choices and c.choices[0].delta.content]
        assert len(set(first[:3])) > 1
        usage = answer[-1].usage
    else:
        assert [c.message.content for c in answer.choices] == ["one", "é two", "three"]
        assert [c.index for c in answer.choices] == [0, 1, 2]
        for choice, completion in zip(answer.choices, engine.drawn, strict=True):
            assert [row.logprob for row in choice.logprobs.content] == completion.logprobs
        usage = answer.usage
    segments = recording.segments()
    assert [drawn_of(s) for s in segments] == [rows_of(c) for c in engine.drawn]
    assert len({tuple(s.prompt) for s in segments}) == 1
    assert usage.completion_tokens == sum(len(c.tokens) for c in engine.drawn)
    assert usage.prompt_tokens == len(segments[0].prompt)


STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]


@pytest.mark.parametrize("tools", [[], STRICT], ids=["text", "tools"])
def test_a_stream_ends_with_the_log_probabilities_of_each_choice(text, tools):
    """The client's own accumulator of streams finds all of them."""
    engine = Says("one", "é two")

    async def harness(client):
        options = {"tools": tools} if tools else {}
        async with client.chat.completions.stream(
            model="policy", messages=[user("q")], n=2, logprobs=True, **options
        ) as stream:
            return await stream.get_final_completion()

    answer, recording, _ = talk(text, engine, harness)
    assert [choice.message.content for choice in answer.choices] == ["one", "é two"]
    for choice, completion in zip(answer.choices, engine.drawn, strict=True):
        assert [row.logprob for row in choice.logprobs.content] == completion.logprobs
    assert [drawn_of(s) for s in recording.segments()] == [rows_of(c) for c in engine.drawn]


def test_alternatives_of_tokens_are_refused(text):
    async def harness(client):
        with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported"):
            await client.chat.completions.create(
                model="policy", messages=[user("q")], logprobs=True, top_logprobs=3
            )
        return await client.chat.completions.create(
            model="policy", messages=[user("q")], logprobs=True, top_logprobs=0
        )

    answer, _, _ = talk(text, Says("one"), harness)
    assert len(answer.choices[0].logprobs.content) == 4


def test_a_conversation_continues_the_chosen_answer(text):
    engine = Says("left", "right", "more")

    async def harness(client):
        ask = client.chat.completions.create
        first = await ask(model="policy", messages=[user("q")], n=2)
        taken = first.choices[1].message
        await ask(model="policy", messages=[user("q"), taken, user("r")])

    _, recording, _ = talk(text, engine, harness)
    left, right = recording.segments()
    assert drawn_of(left) == rows_of(engine.drawn[0])
    assert drawn_of(right) == [*rows_of(engine.drawn[1]), *rows_of(engine.drawn[2])]
    assert engine.requests[2][0] == [*right.prompt, *right.tokens[: right.mask[6:].index(1) + 6]]


def test_choices_count_as_turns_before_any_is_drawn(text):
    async def harness(client):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="policy", messages=[user("x")], n=3)
        return error.value.code

    engine = Says("x")
    code, recording, endpoint = talk(text, engine, harness, turns=2)
    assert (code, endpoint.refused) == ("turn_limit_exceeded", "turns")
    assert (recording.turns, engine.requests) == (0, [])


def test_a_choice_that_fails_ends_the_others_and_none_is_on_record(text):
    engine = Says("x" * 100)
    engine.fails_at = 1

    async def harness(client):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="policy", messages=[user("x")], n=3)

    _, recording, _ = talk(text, engine, harness)
    assert recording.turns == 0
    assert all(len(completion.tokens) < 100 for completion in engine.drawn)


def test_the_embedded_engine_draws_choices_that_differ(tiny, text):
    """Greedy choices are alike, drawn ones are not; each is what the engine reports."""
    torch.manual_seed(0)
    engine = TransformersEngine(tiny, stop_tokens=[END], slots=8, capacity=128)

    async def harness(client):
        ask = client.chat.completions.create
        task = asyncio.ensure_future(_drive(engine))
        try:
            return await ask(model="policy", messages=[user("q")], n=6, max_tokens=12)
        finally:
            task.cancel()

    _, recording, _ = talk(text, engine, harness, temperature=1.0)
    segments = recording.segments()
    assert len(segments) == 6
    assert len({tuple(s.tokens) for s in segments}) > 1
    assert {len(s.logprobs) for s in segments} <= set(range(1, 13))
    _, greedy, _ = talk(text, engine, harness, temperature=0.0)
    assert len({tuple(s.tokens) for s in greedy.segments()}) == 1


async def _drive(engine):
    while True:
        await engine.advance()


# Stop strings.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "told", "kept"),
    [
        ("one\nObservation: two", ["Observation:"], "one\n", "one\nObservation:"),
        ("aXbYc", ["Y", "X"], "a", "aX"),
        ("ab", "ab", "", "ab"),
        ("abcabd", "abd", "abc", "abcabd"),
        ("ünd ö!", "ö", "ünd ", "ünd ö"),
        ("nothing", ["else"], "nothing", None),
        ("almost stopp", ["stopped"], "almost stopp", None),
    ],
)
def test_a_stop_string_cuts_the_text_and_leaves_the_tokens(
    text, stream, deaf, said, stop, told, kept
):
    """With an engine that ends there, and with one that hears of its tokens too late."""
    engine = Says(said, deaf=deaf)

    async def harness(client):
        ask = client.chat.completions.create
        answer = await ask(model="policy", messages=[user("q")], stop=stop, stream=stream)
        if not stream:
            return answer.choices[0].message.content or "", answer.choices[0].finish_reason
        chunks = [chunk.choices[0] async for chunk in answer]
        return "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason

    found, recording, _ = talk(text, engine, harness)
    assert found == (told, "stop")
    (segment,) = recording.segments()
    expected = list(kept.encode()) if kept is not None else [*said.encode(), END]
    assert drawn_of(segment) == rows_of(engine.drawn[0], len(expected))
    assert segment.tokens == expected
    if not deaf and kept is not None:
        assert engine.drawn[0].tokens == expected


def test_a_chat_continues_after_a_stop_as_after_any_turn(text):
    engine = Says("a STOP b", "c")

    async def harness(client):
        ask = client.chat.completions.create
        first = await ask(model="policy", messages=[user("q")], stop="STOP")
        said = [user("q"), first.choices[0].message, user("r")]
        await ask(model="policy", messages=said)

    _, recording, _ = talk(text, engine, harness)
    (segment,) = recording.segments()
    assert bytes(segment.tokens[:6]) == b"a STOP"
    assert segment.tokens[6] == END
    assert segment.mask[:7] == [1] * 6 + [0]


def test_a_text_continues_after_a_stop_only_if_the_client_repeats_it(text):
    engine = Says("a Obs: b", "c", "d", "e")

    async def harness(client):
        ask = client.completions.create
        first = (await ask(model="policy", prompt="p", stop="Obs:")).choices[0]
        assert (first.text, first.finish_reason) == ("a ", "stop")
        await ask(model="policy", prompt="pa Obs: 42\n", max_tokens=1)
        await ask(model="policy", prompt="pa and so on", max_tokens=1)

    _, recording, _ = talk(text, engine, harness)
    one, other = recording.segments()
    assert bytes(one.tokens) == b"a Obs: 42\nc"
    assert one.mask == [1] * 6 + [0] * 4 + [1]
    assert bytes(other.prompt) == b"pa and so on"


def test_the_embedded_engine_ends_at_a_stop_and_frees_its_place(tiny, text):
    engine = TransformersEngine(tiny, stop_tokens=[END], slots=1, capacity=200)

    def ask(**settings):
        async def harness(client):
            task = asyncio.ensure_future(_drive(engine))
            try:
                answer = await client.chat.completions.create(
                    model="policy", messages=[user("q")], max_tokens=40, **settings
                )
                return answer.choices[0]
            finally:
                task.cancel()

        return talk(text, engine, harness, temperature=0.0)

    whole, recording, _ = ask()
    (segment,) = recording.segments()
    place = len(segment.tokens) // 2
    stop = text.decode(segment.tokens[place : place + 2])
    assert stop
    assert "\ufffd" not in stop
    said = text.decode(segment.tokens)
    cut, again, _ = ask(stop=[stop])
    (shorter,) = again.segments()
    count = len(shorter.tokens)
    assert cut.message.content or said[: said.index(stop)] == ""
    assert (cut.finish_reason, count < len(segment.tokens)) == ("stop", True)
    assert shorter.tokens == segment.tokens[:count]
    torch.testing.assert_close(shorter.logprobs, segment.logprobs[:count])
    assert engine.active == 0
    assert whole.message.content == said


# A choice of tools.


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ask_with(choice, **settings):
    async def harness(client):
        answer = await client.chat.completions.create(
            model="policy", messages=[user("q")], tools=TOOLS, tool_choice=choice, **settings
        )
        return answer.choices[0]

    return harness


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_with_none_a_call_is_text_and_the_prompt_stays(text):
    engine = Says(CALL, CALL)
    choice, _, _ = talk(text, engine, ask_with("none"))
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert choice.message.tool_calls is None
    other, _, _ = talk(text, engine, ask_with("auto"))
    assert other.message.tool_calls
    assert engine.requests[0] == engine.requests[1]


BEGUN = '<tool_call>\n{"name":'
REST = ' {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "choice", "lead", "rest"),
    [
        (HERMES, "required", BEGUN, f' "add", "arguments":{REST}'),
        (HERMES, named("add"), f'{BEGUN} "add", "arguments":', REST),
        (LLAMA, "required", '{"name":', ' "add", "parameters": {"a": 1}}'),
        (LLAMA, named("add"), '{"name": "add", "parameters":', ' {"a": 1}}'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_begun_for_the_model_and_not_trained_on(
    template, choice, lead, rest, stream
):
    text = text_of(template)
    engine = Says(rest, "fine")

    async def harness(client):
        ask = client.chat.completions.create
        answer = await ask(
            model="policy", messages=[user("q")], tools=TOOLS, tool_choice=choice, stream=stream
        )
        if stream:
            choices = [chunk.choices[0] async for chunk in answer]
            (call,) = [call for c in choices for call in c.delta.tool_calls or []]
            finish = choices[-1].finish_reason
        else:
            (call,) = answer.choices[0].message.tool_calls
            finish = answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        made = {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        messages = [
            user("q"),
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "content": "2", "tool_call_id": call.id},
        ]
        await ask(model="policy", messages=messages, tools=TOOLS)
        return call, finish

    (call, finish), recording, _ = talk(text, engine, harness)
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert finish == "tool_calls"
    (segment,) = recording.segments()
    assert segment.prompt[-len(lead) :] == list(lead.encode())
    assert segment.prompt == engine.requests[0][0]
    assert drawn_of(segment) == [*rows_of(engine.drawn[0]), *rows_of(engine.drawn[1])]
    assert bytes(segment.tokens[: len(rest)]) == rest.encode()


def test_a_call_forced_in_the_middle_of_a_conversation_is_masked_out(text):
    engine = Says("hello", ' {"a": 1}}\n</tool_call>')

    async def harness(client):
        ask = client.chat.completions.create
        first = await ask(model="policy", messages=[user("q")], tools=TOOLS)
        said = [user("q"), first.choices[0].message, user("r")]
        await ask(model="policy", messages=said, tools=TOOLS, tool_choice=named("add"))

    _, recording, _ = talk(text, engine, harness)
    (segment,) = recording.segments()
    lead = list(b'<tool_call>\n{"name": "add", "arguments":')
    start = len(segment.tokens) - len(engine.drawn[1].tokens)
    assert segment.tokens[start - len(lead) : start] == lead
    assert segment.mask[start - len(lead) : start] == [0] * len(lead)
    assert drawn_of(segment) == [*rows_of(engine.drawn[0]), *rows_of(engine.drawn[1])]


def test_a_malformed_forced_call_is_returned_unchanged(text):
    choice, recording, _ = talk(text, Says(" nonsense"), ask_with("required"))
    assert choice.message.tool_calls is None
    assert choice.message.content == '<tool_call>\n{"name": nonsense'
    assert choice.finish_reason == "stop"
    assert recording.turns == 1


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [PLAIN, None])
def test_a_call_cannot_be_forced_if_its_beginning_is_undefined(template):
    async def harness(client):
        with pytest.raises(openai.BadRequestError) as error:
            await ask_with("required")(client)
        return str(error.value)

    engine = Says("x")
    said, recording, _ = talk(text_of(template), engine, harness)
    assert "does not define how a call begins" in said
    assert (recording.turns, engine.requests) == (0, [])


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("logit_bias", {"5": -100}, {}),
        ("presence_penalty", 0.5, 0),
        ("frequency_penalty", 0.5, 0.0),
        ("repetition_penalty", 1.1, 1.0),
        ("guided_json", {"type": "object"}, None),
        ("guided_regex", "a+", None),
        ("structured_outputs", {"json": {}}, None),
        ("min_tokens", 2, 0),
        ("ignore_eos", True, False),
        ("bad_words", ["x"], []),
        ("allowed_token_ids", [5], []),
        ("stop_token_ids", [5], []),
        ("use_beam_search", True, False),
        ("typical_p", 0.9, 1),
        ("logits_processors", ["x"], []),
    ],
)
def test_options_that_would_change_what_is_drawn_are_refused(name, value, neutral):
    """Silently ignored, they would train on answers to another request."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(InputError, match=f"{name} is not supported"):
        read_chat(json.dumps({**body, name: value}).encode())
    with pytest.raises(InputError, match=f"{name} is not supported"):
        read_completion(json.dumps({"prompt": "hi", name: value}).encode())
    assert read_chat(json.dumps({**body, name: neutral}).encode()).messages


@pytest.mark.parametrize(("given", "status"), [({"shout": True}, 200), ({"shout": False}, 400)])
def test_template_variables_must_be_those_of_the_run(byte_tokenizer, given, status):
    """Silently ignored, they would train on answers to another prompt."""
    text = Text(byte_tokenizer, template=HERMES, template_kwargs={"shout": True})

    async def harness(client):
        try:
            await client.chat.completions.create(
                model="policy", messages=[user("q")], extra_body={"chat_template_kwargs": given}
            )
        except openai.BadRequestError as error:
            return 400, str(error)
        return 200, ""

    found, message = talk(text, Says("x"), harness)[0]
    assert found == status
    assert ("chat_template_kwargs is not supported" in message) is (status == 400)
