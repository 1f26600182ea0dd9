"""Thinking budgets: bounds how many tokens a model thinks before it answers.

A turn of a model that reasons is thinking between two marks, then an answer::

    <think> t t t t </think> a a a ■          closed by the model
    <think> t t t t c c </think> a a a ■      closed by force: c and the mark are inserted

`generate_within` draws such a turn from any `Sampler`. It asks for at most the rest of the budget
at a time and closes the thinking itself once the budget is spent. So every token that was drawn has
the log-probability with which it was drawn, and inserted tokens are known by their place. An
engine's own budget is not used: engines force the end mark through the logits, which spoils its
log-probability, and some ignore the option.

The budget and the room for the answer are apart: thinking never takes the answer's room.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from deltawire.chat.text import Text
from deltawire.config.thinking import ThinkingConfig
from deltawire.engines.base import Completion, OnToken, Sampler, Sampling
from deltawire.errors import InputError

KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Marks of thinking that tokenizers have as added tokens: Qwen3 and DeepSeek-R1, Magistral,
Seed-OSS, Sky-T1."""

ThinkingEnd = Literal["answered", "forced", "cut", "stop_string", "limit", "stray_mark"]
"""How a turn with a budget ended: with an answer after thinking that the model closed, or that was
closed by force; ``cut`` while it thought; at a stop string; at the answer's ``limit``; or at an end
mark inside the answer."""


@dataclass(frozen=True)
class ThoughtTurn:
    """The thinking of one turn: how many tokens of it were drawn, the place of the answer in the
    turn's tokens, and how the turn ended."""

    thought: int
    answer_at: int
    ended: ThinkingEnd


@dataclass
class BoundedCompletion(Completion):
    """A turn with a budget. ``forced`` are half-open ranges of tokens that were inserted; their
    log-probability is 0, and their version that of the token before them."""

    forced: tuple[tuple[int, int], ...] = ()
    stopped: bool = False
    """A stop token was drawn."""
    thinking: ThoughtTurn = ThoughtTurn(0, 0, "answered")

    @property
    def thought_tokens(self) -> list[int]:
        """The tokens up to the answer, marks included; all of them if there is no answer."""
        cut = self.thinking.ended == "cut"
        return self.tokens if cut else self.tokens[: self.thinking.answer_at]

    @property
    def answer_tokens(self) -> list[int]:
        """The tokens after the thinking; none if the turn was cut while it thought."""
        cut = self.thinking.ended == "cut"
        return [] if cut else self.tokens[self.thinking.answer_at :]

    @property
    def thought_end(self) -> int:
        """The number of drawn tokens up to the end of the thinking: before what was inserted, and
        without a stop token that ended the turn there."""
        if self.thinking.ended == "cut":
            return len(self.tokens) - self.stopped
        return min([self.thinking.answer_at, *(start for start, _ in self.forced)])

    @property
    def mask(self) -> list[int]:
        """1 for each token that was drawn, 0 for each that was inserted."""
        mask = [1] * len(self.tokens)
        for start, end in self.forced:
            mask[start:end] = [0] * (end - start)
        return mask


def first_tokens(completion: Completion, count: int) -> Completion:
    """The first ``count`` tokens of a completion that ended at a stop string."""
    parts = {name: getattr(completion, name)[:count] for name in ("tokens", "logprobs", "versions")}
    if not isinstance(completion, BoundedCompletion):
        return Completion(**parts, finish="stop")
    forced = [(start, min(end, count)) for start, end in completion.forced if start < count]
    thinking = replace(completion.thinking, ended="stop_string")
    return BoundedCompletion(**parts, finish="stop", forced=tuple(forced), thinking=thinking)


class Mark:
    """A mark in token and in text form; a single token is recognized by its id, a longer mark in
    the text of the last tokens."""

    def __init__(self, text: Text, mark: str | Sequence[int]) -> None:
        self.tokens = tuple(text.spell(mark) if isinstance(mark, str) else mark)
        if not self.tokens:
            raise InputError("a mark of thinking is empty", hint="leave the key out")
        self._decode = text.decode_all
        self._text = mark if isinstance(mark, str) else text.decode_all(self.tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last of these tokens completes the mark."""
        if len(self.tokens) == 1:
            return bool(tokens) and tokens[-1] == self.tokens[0]
        tail = list(tokens[-len(self._text) - 1 :])
        return self._text in self._decode(tail) and self._text not in self._decode(tail[:-1])

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._decode(list(tokens)) if tokens else ""

    def place(self, tokens: Sequence[int]) -> int:
        """The number of tokens up to the last mark's end; 0 if there is none."""
        for end in range(len(tokens), 0, -1):
            if self.ends(tokens[:end]):
                return end
        return 0


@dataclass(frozen=True)
class ThinkingFormat:
    """The marks of a model's thinking and the sentence that closes it by force."""

    start: Mark | None
    """None if every turn begins with thinking."""
    end: Mark
    closing: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: Text, config: ThinkingConfig) -> ThinkingFormat:
        """The format that a configuration names, or that of the model's tokenizer.

        Raises `InputError` if neither has marks.
        """
        start, end = config.start, config.end
        if not end:
            known = next((pair for pair in KNOWN_MARKS if text.has_tokens(*pair)), None)
            if known is None:
                raise InputError(
                    "the model's template has no marks of thinking",
                    hint="set rollout.thinking.start and rollout.thinking.end, for instance to "
                    '"<think>" and "</think>"',
                )
            start, end = known
        closing = tuple(text.encode(config.closing)) if config.closing else ()
        return cls(Mark(text, start) if start else None, Mark(text, end), closing)

    @cached_property
    def forced(self) -> tuple[int, ...]:
        """The tokens that close thinking by force."""
        return (*self.closing, *self.end.tokens)

    def opens(self, prompt: Sequence[int]) -> bool:
        """Returns whether the turn after ``prompt`` begins with thinking: always without a start
        mark, otherwise if the prompt ends with one, as some templates do."""
        if self.start is None:
            return True
        tail = list(prompt[-TAIL:])
        place = self.start.place(tail)
        return bool(place) and not self.start.text_of(tail[place:]).strip()


def limits_of(text: Text, config: ThinkingConfig, budget: int) -> ThinkingLimits:
    """The bounds of a turn with this budget, in the model's own marks.

    Raises `InputError` if the model has no marks and the configuration names none.
    """
    known = _formats.setdefault(text, {})
    key = repr((config.start, config.end, config.closing))
    if key not in known:
        known[key] = ThinkingFormat.of(text, config)
    return ThinkingLimits(known[key], budget, config.answer_tokens)


_formats: WeakKeyDictionary[Text, dict[str, ThinkingFormat]] = WeakKeyDictionary()
"""The formats that were made, since encoding marks takes longer than a turn's other steps."""

TAIL = 32
"""Tokens at the end of a prompt in which a template's start mark is looked for."""


@dataclass(frozen=True)
class ThinkingLimits:
    """The bounds of one turn: tokens of thinking and tokens of the answer."""

    format: ThinkingFormat
    budget: int
    answer_tokens: int


class ThinkingWatch:
    """Follows a turn token by token: counts, and says when drawing must stop and why."""

    def __init__(self, limits: ThinkingLimits, prompt: Sequence[int]) -> None:
        self._limits = limits
        self._turn: list[int] = []
        self.thinking = limits.format.opens(prompt)
        self.thought = 0
        self.answered = 0
        self.answer_at = 0
        self.closed = False
        """Thinking was closed at least once in this turn."""
        self.stray = False
        """An end mark was drawn in the answer."""

    @property
    def room(self) -> int:
        """How many tokens may be drawn before something must be decided."""
        if self.stray:
            return 0
        limits = self._limits
        return (
            limits.budget - self.thought if self.thinking else limits.answer_tokens - self.answered
        )

    def draw(self, token: int) -> None:
        """Counts a drawn token, for which there is `room`."""
        self._turn.append(token)
        form = self._limits.format
        if self.thinking:
            if form.end.ends(self._turn):
                self._close()
            else:
                self.thought += 1
        elif self.closed and form.end.ends(self._turn):
            self.stray = True
        else:
            # Thinking may be opened again; what is left of the budget bounds it.
            self.thinking = form.start is not None and form.start.ends(self._turn)
            self.answered += self.closed or not self.thinking

    def force(self) -> tuple[int, ...]:
        """Closes the thinking; returns the tokens to insert."""
        tokens = self._limits.format.forced
        self._turn += tokens
        self._close()
        return tokens

    def _close(self) -> None:
        self.thinking, self.closed = False, True
        self.answer_at = len(self._turn)


async def generate_within(
    sampler: Sampler,
    prompt: Sequence[int],
    sampling: Sampling,
    limits: ThinkingLimits,
    *,
    on_token: OnToken | None = None,
    on_forced: Callable[[Sequence[int]], None] = lambda _: None,
) -> BoundedCompletion:
    """Draws a turn with bounded thinking.

    ``sampling.max_tokens`` bounds the whole turn, inserted tokens included. If it leaves too little
    room for budget and answer, the answer shrinks first, then the budget. Without room for closing
    the thinking, the turn is cut. ``on_token`` is called with drawn tokens only, ``on_forced`` with
    those that are inserted. Raises `InputError` as `Sampler.generate` does.
    """
    limits = _fitted(limits, sampling.max_tokens)
    watch = ThinkingWatch(limits, prompt)
    whole, forced, parts = BoundedCompletion(), list[tuple[int, int]](), 0
    ended: ThinkingEnd | None = None
    while ended is None:
        left = sampling.max_tokens - len(whole.tokens)
        if watch.thinking and watch.room < 1 and left > len(limits.format.forced):
            forced.append(_insert(whole, watch.force()))
            on_forced(limits.format.forced)
        elif min(watch.room, left) < 1:
            ended = _when_full(watch)
        else:
            asked = replace(sampling.numbered(parts), max_tokens=min(watch.room, left))
            parts += 1
            ended = await _draw(sampler, prompt, asked, watch, whole, on_token)
    if ended == "answered" and forced:
        ended = "forced"
    whole.finish = (
        "length" if ended == "limit" or (ended == "cut" and not whole.stopped) else "stop"
    )
    whole.forced = tuple(forced)
    whole.thinking = ThoughtTurn(watch.thought, watch.answer_at, ended)
    return whole


async def _draw(
    sampler: Sampler,
    prompt: Sequence[int],
    sampling: Sampling,
    watch: ThinkingWatch,
    whole: BoundedCompletion,
    on_token: OnToken | None,
) -> ThinkingEnd | None:
    """Draws up to the next decision; returns how the turn ended, None if it goes on."""
    kept, caller_stops = 0, False

    def listen(token: int) -> bool:
        nonlocal kept, caller_stops
        # A token beyond the room says that the one before it was no stop token; it is not kept.
        if caller_stops or watch.room < 1:
            return True
        kept += 1
        watch.draw(token)
        caller_stops = on_token is not None and bool(on_token(token))
        return caller_stops or watch.stray

    part = await sampler.generate([*prompt, *whole.tokens], sampling, on_token=listen)
    whole.tokens += part.tokens[:kept]
    whole.logprobs += part.logprobs[:kept]
    whole.versions += part.versions[:kept]
    # Every part reads all tokens from the prompt's first on; the last token drawn is not read.
    read = len(prompt) + len(whole.tokens) - 1
    whole.experts = part.experts
    whole.routes = [np.concatenate(part.routes)[:read]] if part.routes else []
    if caller_stops:
        return "stop_string"
    if part.finish == "stop" and kept == len(part.tokens) and not watch.stray:
        whole.stopped = True
        return "cut" if watch.thinking else "answered"
    return None


def _when_full(watch: ThinkingWatch) -> ThinkingEnd:
    """How a turn ended in which nothing more may be drawn."""
    if watch.stray:
        return "stray_mark"
    return "cut" if watch.thinking else "limit"


def _fitted(limits: ThinkingLimits, room: int) -> ThinkingLimits:
    """The limits of a turn that may have ``room`` tokens."""
    forced = len(limits.format.forced)
    if room >= limits.budget + forced + limits.answer_tokens:
        return limits
    if room < forced + 2:
        return replace(limits, answer_tokens=1, budget=min(limits.budget, max(1, room)))
    answer = min(limits.answer_tokens, max(1, room - forced - limits.budget))
    return replace(limits, answer_tokens=answer, budget=min(limits.budget, room - forced - answer))


def _insert(whole: BoundedCompletion, tokens: Sequence[int]) -> tuple[int, int]:
    """Adds tokens that nobody drew; returns their range."""
    start = len(whole.tokens)
    whole.tokens += tokens
    whole.logprobs += [0.0] * len(tokens)
    whole.versions += [whole.versions[-1] if whole.versions else 0] * len(tokens)
    return start, len(whole.tokens)


def drawn_budget(config: ThinkingConfig, version: int, group: str, episode: int) -> int:
    """The budget of an episode: the same for all of a ``group``, or drawn for each; or, per prefix,
    those of each thought in order, the largest first.

    ``version`` is that of the weights when the group starts; the group's secret nonce makes the
    draw unpredictable, and the trainer can repeat it.
    """
    if config.per == "prefix":
        ordered = sorted(config.budgets, reverse=True)
        return ordered[episode % config.answers_a_thought // config.answers]
    stage = config.stage_at(version)
    place = f"{group}/{episode if config.per == 'episode' else 0}"
    weights = stage.weights or [1.0] * len(stage.budgets)
    return random.Random(place).choices(stage.budgets, weights)[0]
