"""An unmodified openai client talks to the endpoint; what it said and heard is on record, to the
token."""

import asyncio
import copy
import json
import threading

import aiohttp
import openai
import pytest
from endpoint_policy import policy_of

from deltawire.chat.messages import Message
from deltawire.chat.openai.chat import ChatRequest
from deltawire.chat.openai.endpoint import Endpoint, listening
from deltawire.chat.openai.recording import Recording
from deltawire.chat.requests import RequestBuilder, RequestSettings
from deltawire.chat.text import Text
from deltawire.engines.base import Completion
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Task
from deltawire.envs.chat import ChatTasks
from deltawire.rl.rollout.episode import play_all, run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.train.build import byte_tokenizer
from deltawire.wire.rollouts import decode_group, encode_group

TOKEN = "a token"
END = 259
CHATML = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def text():
    chat = copy.deepcopy(byte_tokenizer())
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.chat_template = CHATML
    return Text(chat)


class Says:
    """An engine that says what it is told to, one text a request, and ends each."""

    version, slots, capacity, active = 7, 4, 4096, 0

    def __init__(self, *texts, wait=None):
        self.texts, self.requests, self.cancelled = list(texts), [], 0
        self.wait = wait

    async def generate(self, prompt, sampling, *, on_token=None):
        self.requests.append((list(prompt), sampling))
        said = self.texts[(len(self.requests) - 1) % len(self.texts)]
        tokens = [*said.encode(), END][: sampling.max_tokens]
        try:
            for token in tokens:
                await asyncio.sleep(0)
                if on_token is not None:
                    on_token(token)
            if self.wait is not None:
                await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finish = "stop" if tokens[-1] == END else "length"
        return Completion(tokens, [-0.25] * len(tokens), [self.version] * len(tokens), finish)


def user(content):
    return {"role": "user", "content": content}


def talk(text, engine, harness, **policy):
    """Run ``harness(client, url)`` against an endpoint; returns its result and the recording."""
    recording = Recording(text)
    settings = {"max_tokens": 128, "capacity": 4096, "temperature": 0.7, **policy}
    endpoint = Endpoint(engine, text, policy_of(**settings), token=TOKEN, recording=recording)

    async def run():
        async with (
            listening(endpoint) as url,
            openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client,
        ):
            return await harness(client, url)

    return asyncio.run(run()), recording, endpoint


def test_a_conversation_is_one_segment_of_the_very_tokens(text):
    engine = Says(" one ", "two", "three")

    async def harness(client, url):
        messages = [{"role": "system", "content": "be"}, user("hi")]
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, user("more <|im_end|>")]
        return messages

    messages, recording, _ = talk(text, engine, harness)
    assert [m.content for m in messages if not isinstance(m, dict)] == [" one ", "two", "three"]
    (segment,) = recording.segments()
    prompts = [prompt for prompt, _ in engine.requests]
    assert segment.prompt == prompts[0]
    whole = segment.prompt + segment.tokens
    for prompt in prompts:
        assert whole[: len(prompt)] == prompt
    drawn = [t for t, m in zip(segment.tokens, segment.mask, strict=True) if m]
    assert drawn == [*b" one ", END, *b"two", END, *b"three", END]
    assert segment.turns == 3
    assert {s.temperature for _, s in engine.requests} == {0.7}


def test_white_space_that_a_client_drops_changes_nothing(text):
    engine = Says("  one\n", "two")

    async def harness(client, url):
        await client.chat.completions.create(model="policy", messages=[user("a")])
        said = [user("a"), {"role": "assistant", "content": "one"}, user("b")]
        await client.chat.completions.create(model="policy", messages=said)

    _, recording, _ = talk(text, engine, harness)
    (segment,) = recording.segments()
    assert segment.tokens[: len(b"  one\n") + 1] == [*b"  one\n", END]


def test_a_branch_and_a_changed_conversation_are_segments_of_their_own(text):
    engine = Says("first", "second", "third", "fourth")

    async def harness(client, url):
        ask = client.chat.completions.create
        start = [user("q")]
        first = (await ask(model="policy", messages=start)).choices[0].message
        await ask(model="policy", messages=[*start, first, user("left")])
        await ask(model="policy", messages=[*start, first, user("right")])
        edited = {"role": "assistant", "content": "never said"}
        await ask(model="policy", messages=[*start, edited, user("left")])

    _, recording, _ = talk(text, engine, harness)
    main, branch, other = recording.segments()
    assert sum(main.mask) == len(b"first") + len(b"second") + 2
    assert branch.prompt[: len(main.prompt) + 6] == [*main.prompt, *b"first", END]
    assert bytes(branch.tokens[:-1]) == b"third"
    assert (sum(branch.mask), sum(other.mask)) == (6, 7)
    assert other.prompt[: len(main.prompt)] == main.prompt
    assert b"never said" in bytes(t for t in other.prompt if t < 256)


def test_simultaneous_requests_each_keep_their_own_tokens(text):
    engine = Says("a", "b", "c", "d")

    async def harness(client, url):
        ask = client.chat.completions.create
        first = (await ask(model="policy", messages=[user("q")])).choices[0].message
        again = [user("q"), first]
        await asyncio.gather(
            *(ask(model="policy", messages=[*again, user(f"{n}")]) for n in range(3))
        )

    _, recording, _ = talk(text, engine, harness)
    segments = recording.segments()
    assert len(segments) == 3
    assert sum(sum(segment.mask) for segment in segments) == 4 * 2


def test_requests_at_the_same_time_have_no_more_turns_than_others(text):
    engine = Says("a", wait=asyncio.Event())

    async def harness(client, url):
        ask = client.chat.completions.create
        asked = [
            asyncio.ensure_future(ask(model="policy", messages=[user(f"{n}")])) for n in range(5)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        engine.wait.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [one.code for one in found if isinstance(one, openai.BadRequestError)]

    codes, recording, _ = talk(text, engine, harness, turns=2)
    assert codes == ["turn_limit_exceeded"] * 3
    assert recording.turns == 2


def test_tools_are_offered_called_and_answered(text):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine = Says(f"thinking {call}", "<tool_call>{broken</tool_call>")

    async def harness(client, url):
        ask = client.chat.completions.create
        messages = [user("q")]
        first = (await ask(model="policy", messages=messages, tools=TOOLS)).choices[0]
        made = first.message.tool_calls[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", "thinking")
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        messages += [
            first.message,
            {"role": "tool", "content": "2", "tool_call_id": made.id},
        ]
        second = (await ask(model="policy", messages=messages, tools=TOOLS)).choices[0]
        assert second.message.tool_calls is None
        return second.message.content

    said, recording, _ = talk(text, engine, harness)
    assert said == "<tool_call>{broken</tool_call>"
    (segment,) = recording.segments()
    assert segment.turns == 2
    assert bytes(segment.prompt[:7]) == b"1 tools"


@pytest.mark.parametrize("said", ["plain", "é\U0001f600 ü", "half \ufffd", ""])
def test_a_stream_says_the_same(text, said):
    engine = Says(said)

    async def harness(client, url):
        ask = client.chat.completions.create
        options = {"include_usage": True}
        stream = await ask(
            model="policy", messages=[user("q")], stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        heard = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        follow = [user("q"), {"role": "assistant", "content": heard}, user("r")]
        await ask(model="policy", messages=follow)
        return heard, chunks

    (heard, chunks), recording, _ = talk(text, engine, harness)
    assert heard == said
    assert chunks[-1].usage.completion_tokens == len(said.encode()) + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len(recording.segments()) == 1


def test_a_stream_holds_tool_calls(text):
    engine = Says('so <tool_call>{"name": "add", "arguments": {}}</tool_call>')

    async def harness(client, url):
        stream = await client.chat.completions.create(
            model="policy", messages=[user("q")], stream=True, tools=TOOLS
        )
        return [chunk.choices[0] async for chunk in stream]

    choices, _, _ = talk(text, engine, harness)
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["add"]
    assert choices[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in choices) == "so"


def test_completions_of_text_and_of_tokens_continue_each_other(text):
    engine = Says("bc" * 40, "de" * 40, "fg" * 40)

    async def harness(client, url):
        ask = client.completions.create
        first = await ask(model="policy", prompt="a", max_tokens=4)
        assert first.choices[0].text == "bcbc"
        prompt = "a" + first.choices[0].text + "!"
        second = await ask(model="policy", prompt=prompt, max_tokens=2, logprobs=1)
        assert second.choices[0].logprobs.token_logprobs == [-0.25, -0.25]
        tokens = [*prompt.encode(), *second.choices[0].text.encode(), 33]
        return (await ask(model="policy", prompt=tokens, max_tokens=2)).choices[0].finish_reason

    finish, recording, _ = talk(text, engine, harness)
    assert finish == "length"
    (segment,) = recording.segments()
    assert segment.prompt == [97]
    assert bytes(segment.tokens) == b"bcbc!de!fg"
    assert segment.mask == [1] * 4 + [0] + [1] * 2 + [0] + [1] * 2


REFUSED = {
    "no json": b"{",
    "deep": b"[" * 100_000,
    "no messages": b'{"messages": []}',
    "an image": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "a role": b'{"messages": [{"role": "root", "content": "x"}]}',
    "many": json.dumps({"messages": [user("x")] * 5000}).encode(),
    "no choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
    "too many choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 129}',
    "an empty stop": b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    "too many stops": json.dumps({"messages": [user("x")], "stop": ["y"] * 17}).encode(),
    "a long stop": json.dumps({"messages": [user("x")], "stop": "y" * 257}).encode(),
    "a stop that is none": json.dumps({"messages": [user("x")], "stop": 7}).encode(),
    "a format": b'{"messages": [{"role": "user", "content": "x"}], '
    b'"response_format": {"type": "json_object"}}',
    "no tools": b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
    "another tool": json.dumps(
        {
            "messages": [user("x")],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "subtract"}},
        }
    ).encode(),
    "some tools": json.dumps(
        {"messages": [user("x")], "tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}
    ).encode(),
    "a tool's name": json.dumps(
        {"messages": [user("x")], "tools": [{"function": {"name": "a\n<|im_end|>"}}]}
    ).encode(),
    "arguments": json.dumps(
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}
            ]
        }
    ).encode(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_words(text, name):
    engine = Says("x")

    async def harness(client, url):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{url}/chat/completions",
                data=REFUSED[name],
                headers={"Authorization": f"Bearer {TOKEN}"},
            ) as response,
        ):
            return response.status, await response.json()

    (status, body), recording, _ = talk(text, engine, harness)
    assert status == 400
    assert len(body["error"]["message"]) > 5
    assert (recording.turns, engine.requests) == (0, [])


@pytest.mark.parametrize("path", ["models", "chat/completions", "completions", "else"])
@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer other", f"Basic {TOKEN}", "Bearer é"])
def test_a_token_is_needed_for_everything(text, path, header):
    async def harness(client, url):
        headers = {} if header is None else {"Authorization": header}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/{path}", headers=headers) as response,
        ):
            return response.status

    status, _, _ = talk(text, Says("x"), harness)
    assert status == 401


def test_a_body_that_is_too_large_is_refused(text):
    async def harness(client, url):
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model="policy", messages=[user("x" * (17 << 20))])
        return error.value.status_code

    status, _, _ = talk(text, Says("x"), harness)
    assert status == 413


def test_a_full_context_is_the_error_that_clients_know(text):
    async def harness(client, url):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="policy", messages=[user("x" * 200)])
        return error.value.code

    code, _, endpoint = talk(text, Says("x"), harness, capacity=100)
    assert (code, endpoint.refused) == ("context_length_exceeded", "context")


def test_a_client_that_hangs_up_cancels_its_request(text):
    async def harness(client, url):
        engine.wait = asyncio.Event()
        asking = asyncio.ensure_future(
            client.chat.completions.create(model="policy", messages=[user("x")])
        )
        while not engine.requests:
            await asyncio.sleep(0.005)
        asking.cancel()
        while not engine.cancelled:
            await asyncio.sleep(0.005)
        return [model.id async for model in client.models.list()]

    engine = Says("x")
    models, recording, _ = talk(text, engine, harness)
    assert models == ["policy"]
    assert recording.turns == 0


# As an environment.


def source(harness, **settings):
    return ChatTasks(harness, [{"id": 1}], heldout=[{"id": 2}], seed=0, **settings)


def play(text, engine, harness, **limits):
    settings = {"max_tokens": 64, "max_turns": 4, "context": 4096, "step_s": 60, **limits}
    tasks = source(harness)
    return asyncio.run(
        run_episode(
            engine,
            tasks.open(tasks.draw("w", 0)),
            text,
            temperature=1.0,
            limits=EpisodeLimits(**settings),
        )
    )


async def converse(base_url, api_key, task, turns=3):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [user(f"task {task['id']}")]
        for _ in range(turns):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, user("go on")]
    return float(len(messages))


def test_an_unmodified_harness_is_an_episode(text):
    episode = play(text, Says("one", "two", "three"), converse)
    assert (episode.cause, episode.trajectory.reward, episode.trajectory.turns) == ("", 7.0, 3)
    group = group_of("w", "n", Task("t", None), 1.0, [episode, episode])
    assert decode_group(encode_group(group), run="", key="").tokens == 2 * (3 + 3 + 5 + 3)


def test_a_harness_that_waits_runs_in_a_thread(text):
    def harness(base_url, api_key, task):
        assert threading.current_thread() is not threading.main_thread()
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model="policy", messages=[user("q")])
            return float(answer.choices[0].message.content == "yes")

    assert play(text, Says("yes"), harness).solved


def test_too_many_turns_or_tokens_earn_nothing_and_are_no_failure(text):
    episode = play(text, Says("one"), converse, max_turns=2)
    assert (episode.cause, episode.trajectory.finish) == ("", "turns")
    assert (episode.trajectory.turns, episode.trajectory.reward) == (2, 0.0)
    episode = play(text, Says("one" * 20), converse, context=140)
    assert (episode.cause, episode.trajectory.finish) == ("", "context")


async def raises(base_url, api_key, task):
    await converse(base_url, api_key, task, turns=1)
    raise KeyError("grade")


async def never(base_url, api_key, task):
    await converse(base_url, api_key, task, turns=1)
    await asyncio.sleep(3600)


async def silent(base_url, api_key, task):
    return 1.0


async def nan(base_url, api_key, task):
    await converse(base_url, api_key, task, turns=1)
    return float("nan")


async def nothing(base_url, api_key, task):
    await converse(base_url, api_key, task, turns=1)


HARNESSES = {
    raises: "the harness raised KeyError: 'grade'",
    never: "the harness took longer than 1 s",
    silent: "the harness never called the model",
    nan: "the harness gave the reward nan",
    nothing: "the harness raised TypeError",
}


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_harness_that_fails_has_its_cause(text, harness):
    episode = play(text, Says("one"), harness, episode_s=1 if harness is never else 100)
    assert HARNESSES[harness] in episode.cause
    group = group_of("w", "n", Task("t", None), 1.0, [episode])
    assert decode_group(encode_group(group), run="", key="").trajectories[0].cause


def test_many_harnesses_share_the_embedded_engine(tiny, text):
    """Sixteen clients at once; each records what the policy draws for a single client."""
    limits = EpisodeLimits(6, 3, 200, step_s=60)
    tasks = source(converse)

    async def run(count, slots):
        engine = TransformersEngine(tiny, stop_tokens=[END], slots=slots, capacity=200)

        def one():
            episode = tasks.open(tasks.draw("w", 0))
            return run_episode(engine, episode, text, temperature=0.0, limits=limits)

        return await play_all(engine, [one] * count, concurrent=count)

    together = asyncio.run(run(16, 5))
    (separate,) = asyncio.run(run(1, 1))
    for episode in together:
        assert episode.cause == ""
        assert episode.prompt == separate.prompt
        assert [t.tokens_T.tolist() for t in episode.trajectories] == [
            t.tokens_T.tolist() for t in separate.trajectories
        ]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_tokens_and_their_versions_are_stated_where_they_are_asked_for(text, chat):
    engine = Says("one")

    async def harness(client, url):
        shared = {"model": "policy", "logprobs": True if chat else 0}
        if chat:
            shared["messages"] = [{"role": "user", "content": "hi"}]
        else:
            shared["prompt"] = "hi"
        found = []
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            for more in ({"return_token_ids": True}, {}):
                path = f"{url}/{'chat/' if chat else ''}completions"
                async with session.post(path, json=shared | more) as answer:
                    found.append([await answer.json()])
                async with session.post(path, json=shared | more | {"stream": True}) as answer:
                    events = (await answer.text()).split("\n\n")[:-2]
                    found.append([json.loads(event.removeprefix("data: ")) for event in events])
        return found

    (whole, stream, silent, silent_stream), _, _ = talk(text, engine, harness)
    drawn = [*b"one", END]
    prompt = engine.requests[0][0]
    for chunks in (whole, stream):
        assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt]
        last = chunks[-1]["choices"][0]
        assert (last["token_ids"], last["token_versions"]) == (drawn, [7] * 4)
        listed = last["logprobs"]["content"] if chat else last["logprobs"]["token_logprobs"]
        assert len(listed) == 4
        for chunk in chunks[:-1]:
            assert chunk["choices"][0]["tokens_follow"]
            assert "token_ids" not in chunk["choices"][0]
    for chunks in (silent, silent_stream):
        assert "token_ids" not in json.dumps(chunks)
        assert "tokens_follow" not in json.dumps(chunks)


def test_a_client_chooses_truncation_where_it_chooses_the_temperature(text):
    engine = Says("one")

    async def harness(client, url):
        await client.chat.completions.create(
            model="policy", messages=[user("hi")], top_p=0.5, extra_body={"top_k": -1, "min_p": 0.1}
        )

    talk(text, engine, harness, temperature=None)
    talk(text, engine, harness)
    assert [tuple(s.truncation) for _, s in engine.requests] == [(0.5, 0, 0.1), (1.0, 0, 0.0)]


MEANINGLESS = {
    "a temperature below 0": ({"temperature": -1}, "temperature is -1"),
    "a temperature that overflows": ({"temperature": 1e-9}, "temperature is 1e-09"),
    "top_p of 0": ({"top_p": 0}, "top_p is 0"),
    "top_p of 2": ({"top_p": 2}, "top_p is 2"),
    "top_k of -2": ({"extra_body": {"top_k": -2}}, "top_k is -2"),
    "min_p of 3": ({"extra_body": {"min_p": 3}}, "min_p is 3"),
    "a seed of 65 bits": ({"seed": 1 << 64}, "seed"),
    "more tokens than there are": ({"max_tokens": 129}, "an answer has at most 128 tokens"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
@pytest.mark.parametrize("temperature", [None, 0.7], ids=["client", "run"])
def test_settings_that_mean_nothing_are_refused(text, name, temperature):
    settings, words = MEANINGLESS[name]
    engine = Says("one")

    async def harness(client, url):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(model="policy", messages=[user("hi")], **settings)

    talk(text, engine, harness, temperature=temperature)
    assert engine.requests == []


def test_a_seed_is_honored_or_refused(text):
    """Each choice draws from a seed of its own; a recorded policy is trained on its own draws."""
    engine = Says("one")

    async def harness(client, url):
        ask = client.chat.completions.create
        for seed in (3, 3, 4):
            await ask(model="policy", messages=[user("hi")], n=2, seed=seed)

    async def recorded(client, url):
        with pytest.raises(openai.BadRequestError, match="seed is not supported here"):
            await client.chat.completions.create(model="policy", messages=[user("hi")], seed=3)

    talk(text, engine, harness, temperature=None)
    first, second, again, _, other, _ = (sampling.seed for _, sampling in engine.requests)
    assert (first, again, other) == (3, 3, 4)
    assert second not in (3, 4, None)
    talk(text, engine, recorded)


def test_an_unknown_model_is_refused(text):
    engine = Says("one")

    async def harness(client, url):
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-9' here"):
            await client.chat.completions.create(model="gpt-9", messages=[user("hi")])

    _, _, endpoint = talk(text, engine, harness)
    assert (engine.requests, endpoint.refused) == ([], "")


def test_an_endpoint_without_a_recording_remembers_the_newest_conversations(text):
    """A client's text is encoded again once its tokens are forgotten; memory stays bounded."""
    recording = Recording(text, remembered=100)
    builder = RequestBuilder(text, RequestSettings(64, 4096))

    def talk_about(name):
        request = ChatRequest(messages=(Message("user", name),))
        prompt = recording.prompt(request, builder)
        drawn = Completion([*b"yes  "], [-1.0] * 5, [0] * 5, "stop")
        recording.add(request, prompt, drawn, Message("assistant", "yes  "))
        return (*request.messages, Message("assistant", "yes"), Message("user", "Sure?"))

    def continued(messages):
        return recording.prompt(ChatRequest(messages=messages), builder).before is not None

    first, second = talk_about("a"), talk_about("b")
    assert continued(first)
    assert continued(second)
    for number in range(50):
        last = talk_about(f"c{number}")
        assert sum(answer.length for answer in recording._known.values()) <= 100
    assert not continued(first)
    assert continued(last)
    assert recording.turns == 0
