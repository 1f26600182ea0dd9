"""Training, evaluation and the gateway ask the engine for the same, byte for byte: chat template,
tools, sampling settings and prompt tokens."""

import asyncio
import copy
import json
import re
import tomllib

import msgspec
import numpy as np
import pytest
from live_gateway import TOKEN, LiveGateway, TokenReplica, live_serving, published

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.chat.openai.endpoint import Endpoint
from deltawire.chat.requests import RequestDefaults, RequestSettings, text_of
from deltawire.config import RunConfig
from deltawire.config.parsing import parse_config
from deltawire.engines.base import Completion
from deltawire.envs.base import Action, Environment, Task, Turn
from deltawire.live.gateway.embedded_replica import policy_of
from deltawire.rl.evaluate.evaluator import measure
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, with_budget
from deltawire.rl.rollout.policy_server import ServedPolicy
from deltawire.train.build import byte_tokenizer

END = 259
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ shout or '' }} {{ m.tool_call_id or '' }}\n"
    # As Qwen3's: the thinking of earlier turns is left out when text is rendered.
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name":  "add", "arguments": {"b": 3, "a": 2}}\n</tool_call>'
ADD = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
BASE = """
name = "agree"
[chat]
system = "Answer with a number."
template_kwargs = { shout = "!" }
[rollout]
max_tokens = 96
context = 2048
max_turns = 4
temperature = 0.7
[evaluate]
samples = 1
"""
THINKING = BASE + (
    '[rollout.thinking]\nbudgets = [6]\nanswer_tokens = 20\nstart = "<think>"\nend = "</think>"\n'
)
TELL = 'tell = " Think for {budget} tokens."\n'


def read(source):
    return parse_config(tomllib.loads(source), source="a test")


class Conversation(Environment):
    """A scripted environment: its turns do not depend on what the model says, but for the identity
    of its calls."""

    def __init__(self, *turns, tools=()):
        self.turns, self._tools = list(turns), tools

    @property
    def tools(self):
        return self._tools

    async def reset(self):
        return Turn([*self.turns.pop(0)])

    async def step(self, action):
        if not self.turns:
            return Turn(reward=1.0, done=True)
        calls = action.calls
        said = [
            Message(m.role, m.content, m.name, calls[0].identity if m.role == "tool" else "")
            for m in self.turns.pop(0)
        ]
        return Turn(said)


class Held:
    """Tasks of one scripted environment."""

    deterministic = True

    def __init__(self, open_):
        self._open = open_

    def draw(self, stream, index):
        return Task("one", 1)

    def heldout(self):
        return [Task("one", 1)]

    def open(self, task):
        return self._open()


class Recorder:
    """An engine that answers scripted texts, and keeps what it was asked for."""

    version, slots, capacity, active = 0, 1, 2048, 0

    def __init__(self, *texts):
        self.texts, self.asked, self._count = texts, [], 0
        self._encode = tokenizer_with_marks().encode

    async def advance(self):
        await asyncio.sleep(0)

    def cancel_all(self):
        return

    async def generate(self, prompt, sampling, *, on_token=None):
        if sampling.temperature:  # Evaluation also answers greedily.
            row = np.array(prompt, "<i4").tobytes(), msgspec.json.encode(sampling)
            self.asked.append(row)
        text = self.texts[self._count % len(self.texts)]
        said = [*self._encode(text, add_special_tokens=False), END]
        self._count += 1
        tokens = said[: sampling.max_tokens]
        for token in tokens:
            if on_token is not None:
                on_token(token)
        finish = "stop" if tokens[-1] == END else "length"
        return Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish)


def tokenizer_with_marks():
    tokenizer = copy.deepcopy(byte_tokenizer())
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def spied(config, *, chat=True):
    """A run's text, and the list of what its chat template was asked to render."""
    tokenizer, rendered = tokenizer_with_marks(), []
    tokenizer.chat_template = TEMPLATE if chat else None
    render = tokenizer.apply_chat_template

    def apply_chat_template(rows, **options):
        if options["add_generation_prompt"]:
            found = msgspec.json.encode([rows, options], order="sorted")
            rendered.append(re.sub(rb"stand[0-9a-f]{16}in", b"stand-in", found))
        return render(rows, **options)

    tokenizer.apply_chat_template = apply_chat_template
    return text_of(config, tokenizer, bucket=""), rendered


def trained(config, open_, engine, chat):
    text, rendered = spied(config, chat=chat)
    limits = with_budget(EpisodeLimits.of(config.rollout), version=0, group="g", episode=0)
    episode = asyncio.run(
        run_episode(engine, open_(), text, temperature=config.rollout.temperature, limits=limits)
    )
    assert not episode.cause
    return rendered


def evaluated(config, open_, engine, chat):
    text, rendered = spied(config, chat=chat)

    async def close():
        return

    served = ServedPolicy(engine, None, text, Held(open_), close)
    asyncio.run(measure(served, config))
    return rendered


def served(config, open_, engine, chat, folder, monkeypatch):
    """Plays the conversation as a client of a gateway, whose replica has the engine."""
    text, rendered = spied(config, chat=chat)
    bucket = published(versions=1)
    endpoint = Endpoint(engine, text, policy_of(config), token=TOKEN)

    class EngineReplica(TokenReplica):
        async def chat(self, request):
            return await endpoint._chat(request)

    async def talk(gateway: LiveGateway):
        environment = open_()
        tools = [tool.schema for tool in environment.tools]
        turn, messages = await environment.reset(), []
        while not turn.done:
            messages += [spelled(message) for message in turn.messages]
            body = {"messages": messages, **({"tools": tools} if tools else {})}
            status, data, _ = await gateway.ask(**body)
            assert status == 200, data
            said = json.loads(data)["choices"][0]["message"]
            messages.append(said)
            calls = [
                ToolCall(
                    one["function"]["name"], json.loads(one["function"]["arguments"]), one["id"]
                )
                for one in said.get("tool_calls") or ()
            ]
            turn = await environment.step(Action(said["content"] or "", calls=tuple(calls)))

    async def scenario():
        defaults = RequestDefaults.of(config)
        async with live_serving(
            bucket, folder, monkeypatch, replica=EngineReplica, defaults=defaults
        ) as gateway:
            await talk(gateway)

    asyncio.run(scenario())
    return rendered


def spelled(message):
    row = {"role": message.role, "content": message.content}
    return row | ({"tool_call_id": message.call} if message.call else {})


def user(text):
    return [Message("user", text)]


CASES = {
    "single turn": (BASE, lambda: Conversation(user("2+2?")), ["4"], True),
    "multi-turn": (
        BASE, lambda: Conversation(user("2+2?"), user("and 3+3?"), user("Thanks")),
        ["4", " 6 ", "Bye"], True,
    ),
    "tools": (
        BASE, lambda: Conversation(user("2+3?"), [Message("tool", "5")], tools=(ADD,)),
        [CALL, "It is 5."], True,
    ),
    "thinking, told in a message": (
        THINKING + TELL, lambda: Conversation(user("2+2?"), user("Sure?")),
        ["<think>well, let me see", "4", "<think>hm</think>yes"], True,
    ),
    "thinking, told by tokens": (
        THINKING + TELL + 'tell_as = "tokens"\n', lambda: Conversation(user("2+2?")),
        ["<think>2</think>4"], True,
    ),
    "no chat template": (
        BASE.replace('template_kwargs = { shout = "!" }\n', ""),
        lambda: Conversation(user("2+2="), user(" 3+3=")), ["4", "6"], False,
    ),
    "long messages, truncated sampling": (
        BASE.replace("temperature = 0.7", "top_p = 0.9\ntop_k = 40\nmax_characters = 64"),
        lambda: Conversation(user("a" * 200), user("b" * 200)), ["x", "y"], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_paths_ask_for_the_same_byte_for_byte(case, tmp_path, monkeypatch):
    source, open_, texts, chat = CASES[case]
    config = read(source)
    assert isinstance(config, RunConfig)
    engines = [Recorder(*texts) for _ in range(3)]
    rendered = [
        trained(config, open_, engines[0], chat),
        evaluated(config, open_, engines[1], chat),
        served(config, open_, engines[2], chat, tmp_path, monkeypatch),
    ]
    assert len(engines[0].asked) == len(texts)
    assert engines[1].asked == engines[0].asked
    assert engines[2].asked == engines[0].asked
    assert bool(rendered[0]) is chat
    assert set(rendered[1]) == set(rendered[0])
    assert set(rendered[2]) == set(rendered[0])


def test_a_request_that_states_nothing_gets_the_runs_settings():
    config = read(THINKING)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"function": {"name": "f"}}]}
    found = RequestDefaults.of(config).filled_in(body, chat=True)
    settings = RequestSettings.of(config.rollout)
    assert found["messages"][0] == {"role": "system", "content": "Answer with a number."}
    assert found["tools"] == [Tool("f", "").schema]
    assert found["chat_template_kwargs"] == {"shout": "!"}
    assert (found["temperature"], found["max_tokens"]) == (0.7, settings.max_tokens)
    assert (found["top_p"], found["top_k"], found["min_p"]) == tuple(settings.truncation)
    assert body == {"messages": body["messages"], "tools": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "Hi", "tools": "f"},
        {"messages": [], "tools": [None, {"function": []}, {"function": {"name": 3}}]},
        {"messages": [7], "tools": [{"function": {"name": "f", "parameters": "odd"}}]},
        {"messages": None, "chat_template_kwargs": [1]},
    ],
)
def test_malformed_members_are_left_for_the_replica_to_refuse(body):
    found = RequestDefaults.of(read(BASE)).filled_in(body, chat=True)
    assert found.get("tools") == body.get("tools")
    if not isinstance(body["messages"], list):
        assert found["messages"] == body["messages"]
    assert found["chat_template_kwargs"] == (body.get("chat_template_kwargs") or {"shout": "!"})


def test_what_a_client_states_is_kept():
    own = {"temperature": 0.0, "top_p": 0.5, "max_completion_tokens": 9}
    body = {"messages": [{"role": "developer", "content": "x"}], **own}
    found = RequestDefaults.of(read(BASE)).filled_in(body, chat=True)
    assert found["messages"] == body["messages"]
    assert {name: found[name] for name in own} == own
    assert "max_tokens" not in found
