"""A turn with bounded thinking keeps its bounds whatever the model draws, on engines that stop at a
token and on those that draw on, and a recorded turn is drawn again as it was."""

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.chat.text import Text
from deltawire.chat.thinking import (
    ThinkingLimits,
    ThinkingWatch,
    drawn_budget,
    generate_within,
    limits_of,
)
from deltawire.config import ThinkingConfig
from deltawire.engines.base import Completion, Sampling
from deltawire.rl.evaluate.rescoring import RecordedSampler
from deltawire.wire.rollouts import Group, Thinking, Trajectory, decode_group, encode_group

STOP, START, END = 256, ord("("), ord(")")
PROMPT = list(b"ask")


class StreamEngine:
    """Draws one token of a stream after another; each has the log-probability -1 - its place."""

    def __init__(self, stream, *, stops_early):
        self.stream = stream
        self.stops_early = stops_early
        self.place = 0
        self.read = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.read.append(list(prompt))
        found, finish, enough = Completion(), "length", False
        first = self.place
        while len(found.tokens) < sampling.max_tokens:
            token = self.stream[self.place] if self.place < len(self.stream) else STOP
            found.tokens.append(token)
            found.logprobs.append(-1.0 - self.place)
            found.versions.append(7)
            self.place += 1
            enough = self.stops_early and on_token is not None and bool(on_token(token))
            if enough or token == STOP:
                finish = "stop"
                break
        # A token that was one too many is not kept: another is drawn after what is inserted.
        self.place -= enough
        if not self.stops_early and on_token is not None:
            # All tokens are told at the end, as a server in another process does.
            wanted = next((n for n, t in enumerate(found.tokens) if on_token(t)), None)
            self.place = self.place if wanted is None else first + wanted
        found.finish = finish
        return found


def config_of(marks, closing=""):
    start, end = ("(", ")") if marks == "one" else ("<t>", "</t>")
    if marks == "end only":
        start, end = "", ")"
    return ThinkingConfig(start=start, end=end, closing=closing, budgets=[4], answer_tokens=3)


def draw(engine, limits, room=1000, prompt=PROMPT):
    return asyncio.run(generate_within(engine, prompt, Sampling(room), limits))


streams = st.lists(st.sampled_from([START, END, ord("x"), ord("y"), STOP]), max_size=40)


@pytest.fixture(scope="module")
def text(byte_tokenizer):
    return Text(byte_tokenizer)


def naive(stream, budget, answer, forced, *, begins):
    """The slow twin: the turn as a list of (token, was drawn), written down from the rules."""
    turn, thinking, closed, thought, answered = [], begins, False, 0, 0
    for token in [*stream, *[STOP] * 100]:
        if thinking and thought == budget:
            turn += [(t, False) for t in forced]
            thinking, closed = False, True
        if not thinking and answered == answer:
            break
        turn.append((token, True))
        if thinking and token == END:
            thinking, closed = False, True
        elif thinking:
            thought += 1
        elif token == START:
            thinking, answered = True, answered + closed
        elif closed and token == END:
            break
        else:
            answered += 1
        if token == STOP:
            break
    return turn


@given(
    stream=streams,
    budget=st.integers(1, 12),
    answer=st.integers(1, 8),
    closing=st.sampled_from(["", "so:"]),
    marks=st.sampled_from(["one", "end only"]),
    stops_early=st.booleans(),
)
def test_a_turn_is_that_of_the_rules(text, stream, budget, answer, closing, marks, stops_early):
    form = limits_of(text, config_of(marks, closing), budget).format
    limits = ThinkingLimits(form, budget, answer)
    engine = StreamEngine(stream, stops_early=stops_early)
    found = draw(engine, limits)
    if marks == "end only":  # Nothing opens thinking a second time.
        expected = _end_only(stream, budget, answer, form.forced)
    else:
        expected = naive(stream, budget, answer, form.forced, begins=False)
    assert list(zip(found.tokens, map(bool, found.mask), strict=True)) == expected
    drawn = [logprob for logprob, mask in zip(found.logprobs, found.mask, strict=True) if mask]
    assert drawn == [-1.0 - place for place in range(len(drawn))]
    assert all(not logprob for logprob, m in zip(found.logprobs, found.mask, strict=True) if not m)
    assert len(found.tokens) == len(found.logprobs) == len(found.versions)
    assert found.thinking.thought <= budget
    assert found.finish == ("length" if found.thinking.ended in ("limit", "cut") and
                            found.tokens[-1] != STOP else "stop")  # fmt: skip


def _end_only(stream, budget, answer, forced):
    turn, thinking, thought, answered = [], True, 0, 0
    for token in [*stream, *[STOP] * 100]:
        if thinking and thought == budget:
            turn += [(t, False) for t in forced]
            thinking = False
        if not thinking and answered == answer:
            break
        turn.append((token, True))
        if token == END:
            if not thinking:
                break
            thinking = False
        elif thinking:
            thought += 1
        else:
            answered += 1
        if token == STOP:
            break
    return turn


@given(stream=streams, room=st.integers(1, 30), closing=st.sampled_from(["", "so:"]))
def test_a_turn_fits_its_room(text, stream, room, closing):
    limits = limits_of(text, config_of("one", closing), 6)
    found = draw(StreamEngine(stream, stops_early=True), limits, room)
    assert 1 <= len(found.tokens) <= room
    assert found.thinking.thought <= 6
    assert found.thinking.answer_at <= len(found.tokens)


@given(stream=streams, marks=st.sampled_from(["one", "end only"]), budget=st.integers(1, 9))
def test_a_recorded_turn_is_drawn_again(text, stream, marks, budget):
    """The trainer plays a sample of groups again: the same rules must insert the same tokens."""
    limits = limits_of(text, config_of(marks, "so:"), budget)
    first = draw(StreamEngine(stream, stops_early=True), limits)
    thinking = Thinking(
        budget, ((first.thinking.thought, first.thinking.ended),), tuple(first.forced)
    )
    t = Trajectory(
        np.array(first.tokens, np.int32),
        np.array(first.logprobs, np.float32),
        np.array(first.versions, np.int32),
        np.array(first.mask, np.uint8),
        1.0,
        first.finish,
        thinking=thinking,
    )
    group = Group("w0", "n", "task", 1.0, np.array(PROMPT, np.int32), [t])
    again = decode_group(encode_group(group), run="r", key="k")
    assert again.trajectories[0].thinking == thinking
    assert bool(again.trajectories[0].turn_mask.all())
    sampler = RecordedSampler(again, again.trajectories, [STOP])
    second = asyncio.run(generate_within(sampler, PROMPT, Sampling(1000), limits))
    assert (second.tokens, second.mask) == (first.tokens, first.mask)
    assert second.thinking == first.thinking


@given(stream=streams)
def test_marks_of_several_tokens_are_found_in_the_text(text, stream):
    config = config_of("text")
    spelled = {START: b"<t>", END: b"</t>"}
    longer = [t for one in stream for t in (spelled.get(one) or [one])]
    limits = ThinkingLimits(limits_of(text, config, 1000).format, 1000, 1000)
    watch = ThinkingWatch(limits, PROMPT)
    for token in longer:
        if watch.room < 1:
            break
        watch.draw(token)
    depth = naive(stream, 1000, 1000, [], begins=False)
    closes = any(token == END for token, _ in depth) and START in [t for t, _ in depth]
    opened = START in stream and END in stream[stream.index(START) :]
    if STOP not in stream:
        assert watch.closed == opened == (closes and opened)


@given(st.integers(0, 50), st.integers(0, 7), st.sampled_from(["group", "episode"]))
def test_a_budget_can_be_drawn_again(version, episode, per):
    later = [{"from_version": 10, "budgets": [7]}, {"from_version": 20, "budgets": [8, 9]}]
    config = msgspec.convert(
        {"budgets": [4, 5, 6], "weights": [1.0, 2.0, 3.0], "per": per, "schedule": later},
        ThinkingConfig,
    )
    found = drawn_budget(config, version, "nonce/task", episode)
    assert found == drawn_budget(config, version, "nonce/task", episode)
    assert found in ([4, 5, 6] if version < 10 else [7] if version < 20 else [8, 9])
    if per == "group":
        assert found == drawn_budget(config, version, "nonce/task", episode + 1)
    assert found in config.allowed
