"""Text to tokens and back. Tokens, once made, are never made again from text.

A conversation's tokens only grow: `Text.prompt` begins them, the model's own tokens follow as they
were drawn, then `Text.bridge` adds what was answered and the start of the model's next turn. Only
new messages are ever rendered, behind a stand-in for what the model wrote.

What others wrote may spell ``<|im_end|>``. It is encoded as those characters: no text of a message
becomes a token of the template's own.
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

from deltawire.chat.calls import HERMES, SHOWN, Dialect, Spelling, Written, spelling_of
from deltawire.chat.messages import Message, Tool
from deltawire.errors import InputError


class Text:
    """A Hugging Face tokenizer as the loop uses it.

    A tokenizer with a chat template gets messages in its form, followed by the start of an answer;
    one without gets their contents one after another.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chat = bool(getattr(tokenizer, "chat_template", None))
        self._nonce = secrets.token_hex(8)
        self._mark = re.compile(f"mark{self._nonce}x([0-9]+)x")
        by_id = tokenizer.added_tokens_decoder
        added = by_id.values()
        self._special_texts = {n: token.content for n, token in by_id.items() if token.special}
        self._added = _any_of([token.content for token in added])
        self._special = _any_of([token.content for token in added if token.special])
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def prompt(self, said: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The tokens a conversation begins with. A string stands for one message of a user's.

        Raises `InputError` if the chat template refuses the messages.
        """
        messages = [Message("user", said)] if isinstance(said, str) else list(said)
        if not self._chat:
            return self.plain("".join(message.content for message in messages))
        return self._encode(*self._render(messages, tools))

    def bridge(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """The tokens between what the model wrote and its next turn: the end of its own, if its
        last token ``after[-1]`` is not that already, the messages, and the start of an answer.

        Raises `InputError` if the chat template refuses the messages.
        """
        if not self._chat:
            return self.plain("".join(message.content for message in messages))
        stand_in = f"stand{self._nonce}in"
        before = [Message("user", "."), Message("assistant", stand_in)]
        rendered, contents = self._render([*before, *messages], ())
        cut = rendered.rfind(stand_in)
        if cut < 0:
            raise InputError("the model's chat template leaves out what an assistant said")
        tokens = self._encode(rendered[cut + len(stand_in) :], contents)
        return tokens[1:] if after and tokens[:1] == [after[-1]] else tokens

    def plain(self, text: str) -> list[int]:
        """The tokens of a text, none of them special, with none added."""
        tokens: list[int] = []
        for piece in self._cut(_whole(text)):
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
        """The text of tokens that the model drew, without special ones, but for those that say
        where a call begins or ends."""
        if self._marks.keys().isdisjoint(tokens):
            return self._decode(tokens)
        parts = [
            "".join(self._marks[token] for token in run) if marks else self._decode(list(run))
            for marks, run in groupby(tokens, key=self._marks.__contains__)
        ]
        return "".join(parts)

    def read_calls(self, text: str, *, turn: int = 0) -> Written:
        """Take a turn's text apart, in the dialect of the model's chat template; see
        `deltawire.chat.calls.Dialect.read`."""
        return self._dialect.read(text, turn=turn)

    def opening(self, name: str | None) -> tuple[str, list[int]]:
        """How a call of the tool ``name`` begins, or of any: its text, and its tokens, which are
        the template's own. Raises `InputError` if the template does not say so, or the name spells
        one of its tokens."""
        text = self._spelling.opening(name) if self._spelling else ""
        if not text:
            raise InputError(
                "this model's chat template does not say how a call begins",
                hint='ask with tool_choice "auto"',
            )
        if name is not None and self._added is not None and self._added.search(name):
            raise InputError(f"the tool's name {name!r} spells a token of the template's own")
        return text, list(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _spelling(self) -> Spelling | None:
        if not self._chat:
            return None
        asked, shown = Message("user", "."), Message("assistant", "", calls=(SHOWN,))
        rows = [_row(asked), _row(shown)]
        try:
            return spelling_of(self._apply(rows, None), self._apply(rows[:1], None))
        except Exception:  # templates raise through jinja2 whatever they like
            return None

    @cached_property
    def _dialect(self) -> Dialect:
        return self._spelling.dialect if self._spelling else HERMES

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Special tokens that say something."""
        told = self._special_texts.items()
        return {token: text for token, text in told if text in self._dialect.markers}

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _render(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[str, list[str]]:
        """The template's text, marks in place of what spells tokens of its own, and the texts that
        the marks stand for."""
        contents: list[str] = []
        schemas = [tool.schema for tool in tools] or None
        try:
            rows = [self._row(message, contents) for message in messages]
            return self._apply(rows, schemas), contents
        except Exception as error:  # templates raise through jinja2 whatever they like
            if any(message.role == "tool" for message in messages):
                # Templates that know no tools take their answers as a user's.
                return self._render([_as_user(message) for message in messages], ())
            roles = ", ".join(message.role for message in messages)
            raise InputError(
                f"the model's chat template refuses messages of {roles}: {error}"
            ) from error

    def _row(self, message: Message, contents: list[str]) -> dict[str, Any]:
        """A message for the template; what it says that spells tokens goes to ``contents``."""
        danger = self._special if message.role == "assistant" else self._added

        def held(text: str, kept: str | None = None) -> str:
            if danger is None or not danger.search(text):
                return text
            contents.append(text if kept is None else kept)
            return f"mark{self._nonce}x{len(contents) - 1}x"

        def within(value: Any) -> Any:
            """Arguments: templates write them as JSON."""
            if isinstance(value, str):
                return held(value, json.dumps(value, ensure_ascii=False)[1:-1])
            if isinstance(value, Mapping):
                return {within(name): within(inner) for name, inner in value.items()}
            return [within(inner) for inner in value] if isinstance(value, list) else value

        calls = [
            replace(call, name=held(call.name), arguments=within(call.arguments))
            for call in message.calls
        ]
        name, call = held(message.name), held(message.call)
        return _row(
            replace(message, content=held(message.content), name=name, call=call, calls=(*calls,))
        )

    def _apply(self, rows: list[dict[str, Any]], schemas: list[dict[str, Any]] | None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                rows, tools=schemas, tokenize=False, add_generation_prompt=True
            )
        )

    def _encode(self, rendered: str, contents: list[str]) -> list[int]:
        tokens: list[int] = []
        for number, piece in enumerate(self._mark.split(rendered)):
            if number % 2:
                tokens += self.plain(contents[int(piece)])
            elif piece:
                tokens += self._tokenizer.encode(_whole(piece), add_special_tokens=False)
        return tokens

    def _cut(self, text: str) -> list[str]:
        """Pieces of a text, cut inside whatever spells an added token."""
        pieces: list[str] = []
        start = 0
        while self._added is not None and (found := self._added.search(text, start)):
            pieces.append(text[start : found.start() + 1])
            start = found.start() + 1
        pieces.append(text[start:])
        return [piece for piece in pieces if piece]


def _whole(text: str) -> str:
    """A text without halves of characters, which JSON can spell and no tokenizer takes."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    # A token of one character cannot be cut, and spells nothing but itself.
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
