"""Records the answers of one session, so that a client's conversation becomes trajectories.

A client sends the whole conversation each time, as text. If it continues one that was answered
here, the tokens of that answer, as they were drawn, begin the next prompt, and only the new
messages are encoded. So answers form a tree::

    prompt ─▶ answer 0 ─▶ answer 1 ─▶ answer 3        one segment: 0, 1, 3
                     └──▶ answer 2                    another, after the tokens up to answer 0

Every answer belongs to exactly one segment; the first that continues another extends its segment. A
conversation that was changed in between (summarized, edited) begins a new tree.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from deltawire.chat.messages import Message, Tool
from deltawire.chat.openai.chat import ChatRequest
from deltawire.chat.requests import RequestBuilder
from deltawire.chat.text import Text
from deltawire.chat.thinking import BoundedCompletion
from deltawire.engines.base import Completion

_Key = tuple[object, ...]


@dataclass
class Answer:
    """One answer: its tokens, and those between them and the answer that it continues."""

    before: Answer | None
    between: list[int]
    completion: Completion
    continued: bool = False

    @property
    def length(self) -> int:
        """The number of `tokens`."""
        before = 0 if self.before is None else self.before.length
        return before + len(self.between) + len(self.completion.tokens)

    @property
    def tokens(self) -> list[int]:
        """Everything from the prompt to the end of this answer."""
        parts: list[list[int]] = []
        answer: Answer | None = self
        while answer is not None:
            parts += [answer.completion.tokens, answer.between]
            answer = answer.before
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request: all its ``tokens``, of which those in ``between`` are new."""

    tokens: list[int]
    between: list[int]
    before: Answer | None


@dataclass
class RecordedSegment:
    """Part of a conversation: a prompt, and the tokens after it, drawn by the model (``mask`` 1) or
    written by others (0)."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 0
    finish: str = ""
    forced: list[tuple[int, int]] = field(default_factory=list)
    thoughts: list[tuple[int, str]] = field(default_factory=list)
    """Ranges of tokens that closed thinking by force, and the thinking of each turn."""


class Recording:
    """The answers of one session.

    With ``remembered``, answers are kept only for conversations that go on, the newest ones: at
    most so many tokens, of which those of earlier turns count again for each answer.

    Example::

        recording = Recording(text)
        prompt = recording.prompt(request, builder)
        recording.add(request, prompt, completion, reply)
    """

    def __init__(self, text: Text, *, remembered: int | None = None) -> None:
        self._text = text
        self._answers: list[Answer] = []
        self._known: OrderedDict[_Key, Answer] = OrderedDict()
        self._remembered = remembered
        self._size = 0

    @property
    def turns(self) -> int:
        """The number of answers."""
        return len(self._answers)

    def prompt(self, request: ChatRequest, builder: RequestBuilder) -> Prompt:
        """The tokens for a request. Raises `InputError` if the chat template refuses it."""
        if request.messages:
            return self._chat_prompt(request, builder)
        if isinstance(request.prompt, str):
            return self._text_prompt(request.prompt)
        return self._token_prompt(list(request.prompt))

    def add(
        self,
        request: ChatRequest,
        prompt: Prompt,
        completion: Completion,
        reply: Message,
        *,
        kept: str | None = None,
    ) -> None:
        """Adds an answer. ``reply`` is what the client got; if that ends before a stop string,
        ``kept`` is the text of all tokens.

        If a client continues a text and echoes it including the stop string, it continues the
        recorded tokens; otherwise the text is encoded again. In a conversation, a turn that ended
        at a stop string is recognized in either form.
        """
        answer = Answer(prompt.before, prompt.between, completion)
        if request.messages:
            told = [reply] if kept is None else [reply, Message("assistant", kept)]
            for message in told:
                self._know(_chat_key(request.tools, [*request.messages, message]), answer)
        elif isinstance(request.prompt, str) and (completion.finish != "stop" or kept is not None):
            # A text that ended with a stop token is complete, and is not continued.
            said = reply.content if kept is None else kept
            self._know(("text", request.prompt + said), answer)
        if self._remembered is None:
            self._answers.append(answer)

    def _know(self, key: _Key, answer: Answer) -> None:
        """Keeps an answer for requests that continue it."""
        if self._remembered is not None and (before := self._known.pop(key, None)) is not None:
            self._size -= before.length
        self._known[key] = answer
        self._size += answer.length
        while self._remembered is not None and self._size > self._remembered:
            self._size -= self._known.popitem(last=False)[1].length

    def segments(self) -> list[RecordedSegment]:
        """The segments in the order of their first answers, with each answer once."""
        segments: list[RecordedSegment] = []
        place: dict[int, RecordedSegment] = {}
        for answer in self._answers:
            before = answer.before
            if before is not None and not before.continued:
                before.continued = True
                segment = place[id(before)]
                _others(segment, answer.between)
            else:
                prompt = [] if before is None else before.tokens
                segment = RecordedSegment([*prompt, *answer.between])
                segments.append(segment)
            _drawn(segment, answer.completion)
            place[id(answer)] = segment
        for answer in self._answers:
            answer.continued = False
        return segments

    def _chat_prompt(self, request: ChatRequest, builder: RequestBuilder) -> Prompt:
        messages = list(request.messages)
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1].role != "assistant":
                continue
            before = self._known.get(_chat_key(request.tools, messages[:count]))
            if before is not None:
                so_far = before.tokens
                between = builder.bridge(messages[count:], after=so_far)
                return Prompt([*so_far, *between], between, before)
        tokens = builder.prompt(messages, request.tools)
        return Prompt(tokens, tokens, None)

    def _text_prompt(self, prompt: str) -> Prompt:
        texts = [key[1] for key in self._known if key[0] == "text"]
        longest = max(
            (text for text in texts if isinstance(text, str) and prompt.startswith(text)),
            key=len,
            default=None,
        )
        if longest is None or longest == prompt:
            tokens = self._text.begin(prompt)
            return Prompt(tokens, tokens, None)
        before = self._known["text", longest]
        between = self._text.encode(prompt[len(longest) :])
        return Prompt([*before.tokens, *between], between, before)

    def _token_prompt(self, tokens: list[int]) -> Prompt:
        best: Answer | None = None
        length = 0
        for answer in self._answers:
            so_far = answer.tokens
            if length < len(so_far) < len(tokens) and tokens[: len(so_far)] == so_far:
                best, length = answer, len(so_far)
        return Prompt(tokens, tokens[length:], best)


def _chat_key(tools: Sequence[Tool], messages: Sequence[Message]) -> _Key:
    """A digest that is equal for equal conversations. Clients may strip white space from answers
    and reformat arguments."""
    schemas = json.dumps([tool.schema for tool in tools], sort_keys=True)
    rows = [
        (
            message.role,
            message.content.strip() if message.role == "assistant" else message.content,
            message.name if message.role != "tool" else "",
            message.call,
            tuple(
                (call.name, json.dumps(dict(call.arguments), sort_keys=True))
                for call in message.calls
            ),
        )
        for message in messages
    ]
    return ("chat", blake3(repr((schemas, rows)).encode("utf-8", "surrogatepass")).digest())


def _others(segment: RecordedSegment, tokens: list[int]) -> None:
    segment.tokens += tokens
    segment.logprobs += [0.0] * len(tokens)
    segment.versions += [segment.versions[-1]] * len(tokens)
    segment.mask += [0] * len(tokens)


def _drawn(segment: RecordedSegment, completion: Completion) -> None:
    segment.tokens += completion.tokens
    segment.logprobs += completion.logprobs
    segment.versions += completion.versions
    start = len(segment.mask)
    if isinstance(completion, BoundedCompletion):
        segment.mask += completion.mask
        segment.forced += [(start + first, start + end) for first, end in completion.forced]
        segment.thoughts.append((completion.thinking.thought, completion.thinking.ended))
    else:
        segment.mask += [1] * len(completion.tokens)
    segment.turns += 1
    segment.finish = completion.finish
