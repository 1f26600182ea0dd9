"""Converts text to tokens and back. Text that was encoded once is never encoded again.

The tokens of a conversation only grow: `Text.prompt` begins them, the model's own tokens follow as
they were drawn, then `Text.bridge` adds the answer and the start of the model's next turn. Only new
messages are rendered, after a placeholder for the model's text.

Text from others may contain ``<|im_end|>``. It is encoded as those characters: no text of a message
becomes one of the template's special tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

from deltawire.chat.calls import (
    HERMES,
    SAMPLE_CALL,
    CallFormat,
    Dialect,
    ParsedTurn,
    call_format_of,
)
from deltawire.chat.messages import Message, Tool
from deltawire.chat.template_process import TemplateProcess
from deltawire.chat.time_limit import within
from deltawire.errors import InputError

RENDER_WITHIN_S = 5.0
"""The most that one rendering of a chat template may take."""

_RESERVED = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
        *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of `apply_chat_template` that are not variables of a template."""


class Text:
    """A Hugging Face tokenizer as the loop uses it.

    With a chat template, messages are rendered in its form, followed by the start of an answer.
    Without one, their contents follow each other after the token that begins sequences, if the
    tokenizer has one.

    ``system`` is put before every conversation that does not begin with a system prompt.
    ``template`` replaces the model's chat template, and ``template_kwargs`` are further variables
    of it, such as ``enable_thinking``; without a template they are refused by `InputError`.

    ``origin`` names whom an untrusted chat template comes from, such as the bucket of a run: it is
    rendered in a process with limits (`deltawire.chat.template_process`). Without an origin it is
    trusted, and rendered in this process.

    Example::

        text = Text(tokenizer)
        tokens = text.prompt([Message("user", "What is 2 + 3?")])
        turn = text.read_calls(text.decode(drawn))
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str = "",
        template: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
        origin: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._process = TemplateProcess(origin) if origin else None
        self._system = system
        self._template = {"chat_template": template} if template else {}
        self._variables = dict(template_kwargs or {})
        self._chat = bool(template or getattr(tokenizer, "chat_template", None))
        if reserved := sorted(self._variables.keys() & _RESERVED):
            raise InputError(f"chat.template_kwargs cannot set {reserved[0]}")
        if self._variables and not self._chat:
            raise InputError(
                "chat.template_kwargs are variables of a chat template, and the model has none",
                hint="set chat.template, or leave them out",
            )
        self._nonce = secrets.token_hex(8)
        self._mark = re.compile(f"mark{self._nonce}x([0-9]+)x")
        by_id = tokenizer.added_tokens_decoder
        added = by_id.values()
        self._special_texts = {n: token.content for n, token in by_id.items() if token.special}
        self._added = _any_of([token.content for token in added])
        self._special = _any_of([token.content for token in added if token.special])
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def prompt(self, said: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The tokens that begin a conversation. A string stands for one message of a user.

        Raises `InputError` if the chat template refuses the messages.
        """
        messages = [Message("user", said)] if isinstance(said, str) else list(said)
        if self._system and not (messages and messages[0].role == "system"):
            messages.insert(0, Message("system", self._system))
        if not self._chat:
            return self.begin("".join(message.content for message in messages))
        return self._encode(*self._render(messages, tools))

    def begin(self, text: str) -> list[int]:
        """The tokens of a text that begins a sequence: those of a base model's training begin with
        its BOS token."""
        return [*self._prefix, *self.encode(text)]

    def bridge(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """The tokens between the model's last token ``after[-1]`` and its next turn: the end of its
        turn, unless that token has ended it, the messages, and the start of an answer.

        Raises `InputError` if the chat template refuses the messages.
        """
        if not self._chat:
            return self.encode("".join(message.content for message in messages))
        stand_in = f"stand{self._nonce}in"
        before = [Message("user", "."), Message("assistant", stand_in)]
        rendered, contents = self._render([*before, *messages], ())
        cut = rendered.rfind(stand_in)
        if cut < 0:
            raise InputError("the model's chat template leaves out the assistant's messages")
        tokens = self._encode(rendered[cut + len(stand_in) :], contents)
        ended = bool(after and tokens) and (
            tokens[0] == after[-1] or {tokens[0], after[-1]} <= self._ends
        )
        return tokens[1:] if ended else tokens

    @property
    def variables(self) -> dict[str, Any]:
        """The further variables of the chat template."""
        return dict(self._variables)

    @property
    def has_template(self) -> bool:
        """Returns whether a chat template writes something between two turns."""
        return self._chat

    @property
    def end(self) -> int | None:
        """The token with which the template ends a final answer, or else the tokenizer's EOS."""
        final = self._final_end
        eos = getattr(self._tokenizer, "eos_token_id", None)
        return final if final is not None else eos

    @property
    def structured(self) -> bool:
        """Returns whether a turn's text marks parts that are not content; see `Dialect`."""
        return self._dialect.structured

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        tokens: list[int] = []
        for piece in self._cut(_without_halves(text)):
            found = list(self._tokenizer.encode(piece, add_special_tokens=False))
            if not self._special_ids.isdisjoint(found):  # an alias that only the tokenizer knows
                found = [
                    token
                    for character in piece
                    for token in self._tokenizer.encode(character, add_special_tokens=False)
                ]
            tokens += found
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that the model drew, without special tokens except those that mark
        where a call or a part of the turn begins or ends."""
        if self._marks.keys().isdisjoint(tokens):
            return self._decode(tokens)
        parts = [
            "".join(self._marks[token] for token in run) if marks else self._decode(list(run))
            for marks, run in groupby(tokens, key=self._marks.__contains__)
        ]
        return "".join(parts)

    def spell(self, text: str) -> list[int]:
        """The tokens of a text of the run's owner, in which special tokens are spelled out.

        Texts of others go through `encode`, which never makes special tokens of them.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def has_tokens(self, *texts: str) -> bool:
        """Returns whether each of the texts is one added token of the tokenizer."""
        known = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        return known.issuperset(texts)

    def read_calls(self, text: str, *, turn: int = 0, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Parses a turn's text in the dialect of the model's chat template; see
        `deltawire.chat.calls.Dialect.read`."""
        return self._dialect.read(text, turn=turn, tools=tools)

    def opening(self, name: str | None) -> tuple[str, list[int]]:
        """The beginning of a call of the tool ``name``, or of any: its text, and its tokens in the
        template's spelling.

        Raises `InputError` if the template does not define one, or if the name contains one of the
        template's special tokens.
        """
        text = self._call_format.opening(name) if self._call_format else ""
        if not text:
            raise InputError(
                "this model's chat template does not define how a call begins",
                hint='ask with tool_choice "auto"',
            )
        if name is not None and self._added is not None and self._added.search(name):
            raise InputError(f"the tool's name {name!r} spells a token of the template")
        return text, list(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _prefix(self) -> list[int]:
        """The BOS token, if the tokenizer puts one before a text."""
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is None:
            return []
        return [bos] if list(self._tokenizer.encode("a"))[:1] == [bos] else []

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The special tokens with which the template ends an assistant's turn: before another
        message, at the end of a conversation, or after a call."""
        return frozenset(
            token
            for token in (self._end_before_message, self._final_end, self._end_of_call)
            if token is not None
        )

    @cached_property
    def _end_before_message(self) -> int | None:
        return self._end_after([Message("user", ".")])

    @cached_property
    def _final_end(self) -> int | None:
        return self._end_after([])

    def _end_after(self, following: list[Message]) -> int | None:
        """The special token that follows an assistant's message."""
        stand_in = f"stand{self._nonce}in"
        rows = [_row(m) for m in (Message("user", "."), Message("assistant", stand_in), *following)]
        return self._special_after(rows, stand_in) if self._chat else None

    @cached_property
    def _end_of_call(self) -> int | None:
        if not self._chat:
            return None
        rows = [_row(Message("user", ".")), _row(Message("assistant", "", calls=(SAMPLE_CALL,)))]
        return self._special_after(rows, "shown value")

    def _special_after(self, rows: list[dict[str, Any]], text: str) -> int | None:
        """The last special token of the assistant's turn that holds ``text``, if a special token
        follows it in the rendered conversation."""
        try:
            rendered = self._apply(rows, None, answer=False)
        except Exception:  # templates raise through jinja2 whatever they like
            return None
        cut = rendered.rfind(text)
        tail = rendered[cut + len(text) :] if cut >= 0 else ""
        for token in self._tokenizer.encode(tail, add_special_tokens=False):
            if token in self._special_texts and token not in self._marks_of_calls:
                return int(token)
        return None

    @cached_property
    def _marks_of_calls(self) -> frozenset[int]:
        """Marks of calls that end no turn."""
        closing = {"<|call|>", "<|return|>", "<|end|>"}
        return frozenset(n for n, text in self._marks.items() if text not in closing)

    @cached_property
    def _call_format(self) -> CallFormat | None:
        if not self._chat:
            return None
        asked, shown = Message("user", "."), Message("assistant", "", calls=(SAMPLE_CALL,))
        rows = [_row(asked), _row(shown)]
        try:
            return call_format_of(self._apply(rows, None), self._apply(rows[:1], None))
        except Exception:  # templates raise through jinja2 whatever they like
            return None

    @cached_property
    def _dialect(self) -> Dialect:
        return self._call_format.dialect if self._call_format else HERMES

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Special tokens that carry meaning."""
        texts = self._special_texts.items()
        return {token: text for token, text in texts if text in self._dialect.markers}

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _render(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[str, list[str]]:
        """Renders messages; texts that contain special tokens are replaced by marks, and returned
        in the order of the marks."""
        contents: list[str] = []
        try:
            schemas = [self._held_in(tool.schema, contents, self._added) for tool in tools] or None
            rows = [self._row(message, contents) for message in messages]
            return self._apply(rows, schemas), contents
        except InputError:  # a limit, which messages in another form would reach too
            raise
        except Exception as error:  # templates raise through jinja2 whatever they like
            if any(message.role == "tool" for message in messages):
                # Templates that know no tools get their answers as a user's.
                return self._render([_as_user(message) for message in messages], ())
            roles = ", ".join(message.role for message in messages)
            raise InputError(
                f"the model's chat template refuses messages of {roles}: {error}"
            ) from error

    def _row(self, message: Message, contents: list[str]) -> dict[str, Any]:
        """A message for the template; texts that contain its tokens are added to ``contents``."""
        danger = self._special if message.role == "assistant" else self._added

        def held(text: str) -> str:
            return self._held(text, contents, danger)

        calls = [
            replace(
                call,
                name=held(call.name),
                arguments=self._held_in(call.arguments, contents, danger),
            )
            for call in message.calls
        ]
        name, call = held(message.name), held(message.call)
        return _row(
            replace(message, content=held(message.content), name=name, call=call, calls=(*calls,))
        )

    def _held(
        self, text: str, contents: list[str], danger: re.Pattern[str] | None, kept: str = ""
    ) -> str:
        """A mark for a text with tokens of the template, which is added to ``contents``."""
        if danger is None or not danger.search(text):
            return text
        contents.append(kept or text)
        return f"mark{self._nonce}x{len(contents) - 1}x"

    def _held_in(self, value: Any, contents: list[str], danger: re.Pattern[str] | None) -> Any:
        """Arguments, or the schema of a tool, with marks: templates write them as JSON."""
        if isinstance(value, str):
            return self._held(value, contents, danger, json.dumps(value, ensure_ascii=False)[1:-1])
        if isinstance(value, Mapping):
            return {
                self._held_in(name, contents, danger): self._held_in(inner, contents, danger)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self._held_in(inner, contents, danger) for inner in value]
        return value

    def _apply(
        self,
        rows: list[dict[str, Any]],
        schemas: list[dict[str, Any]] | None,
        *,
        answer: bool = True,
    ) -> str:
        def apply(rows: list[dict[str, Any]]) -> str:
            if self._process is not None:
                template = self._tokenizer.get_chat_template(tools=schemas, **self._template)
                arguments = {
                    **self._tokenizer.special_tokens_map,
                    **self._variables,
                    "tools": schemas,
                    "add_generation_prompt": answer,
                }
                return self._process.render(template, rows, arguments, within_s=RENDER_WITHIN_S)
            rendered = within(
                RENDER_WITHIN_S,
                lambda: self._tokenizer.apply_chat_template(
                    rows,
                    tools=schemas,
                    tokenize=False,
                    add_generation_prompt=answer,
                    **self._template,
                    **self._variables,
                ),
                name="the model's chat template",
            )
            return str(rendered)

        try:
            return apply(rows)
        except TypeError:
            # DeepSeek's templates concatenate the arguments, which must be JSON text for that.
            return apply([_with_json_arguments(row) for row in rows])

    def _encode(self, rendered: str, contents: list[str]) -> list[int]:
        tokens: list[int] = []
        for number, piece in enumerate(self._mark.split(rendered)):
            if number % 2:
                tokens += self.encode(contents[int(piece)])
            elif piece:
                tokens += self._tokenizer.encode(_without_halves(piece), add_special_tokens=False)
        return tokens

    def _cut(self, text: str) -> list[str]:
        """Cuts a text inside every occurrence of an added token."""
        pieces: list[str] = []
        start = 0
        while self._added is not None and (found := self._added.search(text, start)):
            pieces.append(text[start : found.start() + 1])
            start = found.start() + 1
        pieces.append(text[start:])
        return [piece for piece in pieces if piece]


def _without_halves(text: str) -> str:
    """Replaces lone surrogates, which JSON can spell and no tokenizer accepts."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    # A token of one character cannot be cut.
    longer = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longer)) if longer else None


def _as_user(message: Message) -> Message:
    return Message("user", message.content) if message.role == "tool" else message


def _row(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        row["name"] = message.name
    if message.call:
        row["tool_call_id"] = message.call
    if message.calls:
        row["tool_calls"] = [
            {
                "id": call.identity,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.calls
        ]
    return row


def _with_json_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls hold their arguments as JSON text."""
    if "tool_calls" not in row:
        return row
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in row["tool_calls"]
    ]
    return {**row, "tool_calls": calls}
