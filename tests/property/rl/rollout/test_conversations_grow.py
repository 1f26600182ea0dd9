"""Whatever is said, a conversation's tokens only grow, and no text becomes a special token."""

import asyncio
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.chat.text import Text
from deltawire.engines.base import Completion
from deltawire.envs import Environment, Message, Task, Turn
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.train.build import byte_tokenizer
from deltawire.wire.rollouts import decode_group, encode_group

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END, THINK = 258, 259, 260


def tokenizers():
    plain = byte_tokenizer()
    chat = copy.deepcopy(plain)
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.add_tokens(["<think>"])
    chat.chat_template = CHATML
    assert chat.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<think>"]) == [258, 259, 260]
    return {"plain": Text(plain), "chat": Text(chat)}


TEXTS = tokenizers()
SPELLED = ["<|im_end|>", "<|im_start|>", "<think>", "<|end|>", "<|pad|>", "<|im_", "end|>", "<|"]
SAID = st.lists(
    st.sampled_from([*SPELLED, "a", "é", "\n", " ", "{{ x }}", "\U0001f600"]), max_size=8
)
CONTENTS = SAID.map("".join)
DRAWN = st.lists(
    st.sampled_from([65, 66, 0xC3, 0xA9, START, END, THINK, 256]), min_size=1, max_size=9
)
ROLES = st.sampled_from(["user", "tool", "system"])
MESSAGES = st.lists(st.builds(Message, ROLES, CONTENTS), max_size=3)


class Echo(Environment):
    """Says what it was made to say, and is done when nothing is left."""

    def __init__(self, prompt, answers):
        self.prompt, self.answers = prompt, list(answers)

    async def reset(self):
        return Turn([Message("user", self.prompt)])

    async def step(self, action):
        return Turn(self.answers.pop(0)) if self.answers else Turn(reward=1.0, done=True)


class Script:
    """Draws what it is told to and keeps each request, for the test to compare."""

    def __init__(self, drawn):
        self.drawn = [list(tokens) for tokens in drawn]
        self.requests, self.completions = [], []

    async def generate(self, prompt, sampling, *, on_token=None):
        number = len(self.requests)
        tokens = self.drawn[number % len(self.drawn)][: sampling.max_tokens]
        self.requests.append(list(prompt))
        self.completions.append(tokens)
        return Completion(tokens, [-1.0] * len(tokens), [number] * len(tokens), "length")


def play(text, prompt, answers, drawn, **limits):
    engine = Script(drawn)
    settings = {"max_tokens": 8, "max_turns": 50, "context": 400, "summary_tokens": 5, **limits}
    episode = asyncio.run(
        run_episode(
            engine, Echo(prompt, answers), text, temperature=1.0, limits=EpisodeLimits(**settings)
        )
    )
    return engine, episode


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("on_full", ["end", "drop", "summary"])
@given(prompt=CONTENTS, answers=st.lists(MESSAGES, max_size=12), drawn=st.lists(DRAWN, min_size=1))
@settings(max_examples=25, deadline=None)
def test_each_request_is_what_was_drawn_and_observed(kind, on_full, prompt, answers, drawn):
    """Each request begins with the last one and what was drawn for it, bit for bit; or it begins
    a segment, made of the first prompt and of tokens that were there. The trajectories hold
    exactly what the engine was asked and what it answered, each completion once."""
    engine, episode = play(TEXTS[kind], prompt or "p", answers, drawn, on_full=on_full)
    assert not episode.cause
    told = []
    for trajectory in episode.trajectories:
        start = episode.prompt if trajectory.prompt is None else trajectory.prompt.tolist()
        assert start[: len(episode.prompt)] == episode.prompt
        tokens, mask = trajectory.tokens_T.tolist(), trajectory.mask_T.tolist()
        at = 0
        while at < len(tokens):
            number = len(told)
            assert engine.requests[number] == start + tokens[:at]
            drawn_here = engine.completions[number]
            assert tokens[at : at + len(drawn_here)] == drawn_here
            assert mask[at : at + len(drawn_here)] == [1] * len(drawn_here)
            told.append(number)
            at += len(drawn_here)
            answered = 0
            while at < len(tokens) and mask[at] == 0:
                at, answered = at + 1, answered + 1
            if answered == 0 and at < len(tokens):
                assert kind == "plain"  # an empty answer adds nothing where there is no template
        assert len(start) + len(tokens) <= 400
    assert told == list(range(len(engine.requests)))
    if on_full == "end":
        assert len(episode.trajectories) == 1
    group = group_of("w", "n", Task("t", None, "f"), 1.0, [episode, episode])
    assert decode_group(encode_group(group), run="", key="").tokens == group.tokens


@given(messages=st.lists(st.builds(Message, ROLES, CONTENTS), min_size=1, max_size=4), last=DRAWN)
@settings(max_examples=80, deadline=None)
def test_no_text_becomes_a_token_of_the_template(messages, last):
    """The special tokens of a bridge are those of the same messages with nothing in them."""
    text = TEXTS["chat"]
    special = {256, 257, START, END, THINK}

    def kept(tokens):
        return [token for token in tokens if token in special]

    empty = [Message(message.role, "x") for message in messages]
    assert kept(text.prompt(messages)) == kept(text.prompt(empty))
    assert kept(text.bridge(messages, after=last)) == kept(text.bridge(empty, after=last))
    said = "".join(message.content for message in messages)
    assert kept(text.encode(said)) == []
    assert text.decode(text.encode(said)) == said


@given(messages=st.lists(st.builds(Message, ROLES, st.text("ab \n<|", max_size=9)), max_size=4))
@settings(max_examples=40, deadline=None)
def test_a_bridge_continues_what_the_template_would_render(messages):
    """Prompt, the model's turn and bridge together are the template's own tokens of it all."""
    text = TEXTS["chat"]
    first = [Message("user", "hello")]
    answer = [*text.encode("fine"), END]
    whole = text.prompt([*first, Message("assistant", "fine"), *messages])
    assert [*text.prompt(first), *answer, *text.bridge(messages, after=answer)] == whole
    cut_off = text.encode("fine")
    assert [*text.prompt(first), *cut_off, *text.bridge(messages, after=cut_off)] == whole
