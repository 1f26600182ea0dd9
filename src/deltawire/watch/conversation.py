"""Turns a trajectory's tokens back into messages, with their thinking and their tool calls.

A message begins at a special token of a chat template. The same characters as plain text are no
message: whoever writes text into a conversation must not be able to write a system message there.
Without special tokens, the prompt is one message, and what the model drew and what its environment
wrote are one each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from deltawire.chat.calls import HERMES
from deltawire.watch.tokens import TokenText

Kind = Literal["text", "thinking", "call", "answer"]

MAX_TEXT = 200_000
"""Characters of one block that are returned."""

_NAMED_UNTIL = {
    "<|im_start|>": "\n",
    "<start_of_turn>": "\n",
    "<|start_header_id|>": "<|end_header_id|>",
    "<|start|>": "<|message|>",
}
"""Special tokens that open a message, and the text that ends its header, which has the role."""

_ROLES = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
    "<｜User｜>": "user",
    "<｜Assistant｜>": "assistant",
    "<｜tool▁outputs▁begin｜>": "tool",
    "[INST]": "user",
    "[/INST]": "assistant",
    "[TOOL_RESULTS]": "tool",
}
"""Special tokens that open a message of a role."""

_CLOSING = frozenset(
    [
        *("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<｜end▁of▁sentence｜>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
        *("<｜tool▁outputs▁end｜>", "[/TOOL_RESULTS]"),
    ]
)

_MARKED = re.compile(
    r"(?P<thinking><think>(?P<thought>.*?)(?:</think>|\Z))"
    r"|(?P<call><tool_call>.*?(?:</tool_call>|\Z))"
    r"|(?P<answer><tool_response>(?P<answered>.*?)(?:</tool_response>|\Z))",
    re.DOTALL,
)


class MessageBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message: plain text, thinking, a tool call, or a tool's answer. ``title`` is the
    name of a called tool; ``left_out`` characters are missing at the end."""

    kind: Kind
    text: str
    title: str = ""
    left_out: int = 0


class MessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation. ``first`` and ``end`` are its tokens, counted from the first one
    of the completion; negative numbers are the prompt's. The model ``drew`` so many of them."""

    role: str
    blocks: list[MessageBlock]
    first: int
    end: int
    drew: int


class _TokenSpan(NamedTuple):
    role: str
    body: int
    start: int
    end: int


def messages_of(pieces: Sequence[TokenText], mask: Sequence[int], prompt: int) -> list[MessageView]:
    """Splits the tokens of prompt and completion into messages.

    ``pieces`` are all tokens, of which the first ``prompt`` are the prompt's; ``mask`` is 1 where
    the model drew a token of the completion.
    """
    drawn = [0] * prompt + [int(value) for value in mask]
    marked = any(piece.special and _opens(piece.text) for piece in pieces)
    spans = _by_template(pieces) if marked else _by_mask(drawn, prompt)
    views = []
    for span in spans:
        text = "".join(
            piece.text
            for piece in pieces[span.body : span.end]
            if not (piece.special and piece.text in _CLOSING)
        )
        if (
            not text.strip()
            and span.end - span.start <= 2
            and not any(drawn[span.start : span.end])
        ):
            continue
        views.append(
            MessageView(
                role=span.role,
                blocks=list(_blocks(text.strip("\n") if marked else text)),
                first=span.start - prompt,
                end=span.end - prompt,
                drew=sum(drawn[span.start : span.end]),
            )
        )
    return views


def _opens(text: str) -> bool:
    return text in _NAMED_UNTIL or text in _ROLES


def _by_template(pieces: Sequence[TokenText]) -> Iterator[_TokenSpan]:
    starts = [at for at, piece in enumerate(pieces) if piece.special and _opens(piece.text)]
    if starts and starts[0] > 0:
        yield _TokenSpan("", 0, 0, starts[0])
    for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
        opening = pieces[start].text
        if opening in _ROLES:
            yield _TokenSpan(_ROLES[opening], start + 1, start, end)
        else:
            role, body = _header(pieces, start + 1, end, _NAMED_UNTIL[opening])
            yield _TokenSpan(role, body, start, end)


def _header(pieces: Sequence[TokenText], start: int, end: int, until: str) -> tuple[str, int]:
    """The role in a message's header, and the first token of its body."""
    header = ""
    for at in range(start, min(end, start + 64)):
        header += pieces[at].text
        if until in header:
            role = header[: header.index(until)]
            return _role(role), at + 1
    return _role(header), end


def _role(header: str) -> str:
    words = re.sub(r"<\|[^|]*\|>", " ", header).split()
    role = words[0] if words else ""
    known = {"model": "assistant", "ipython": "tool", "developer": "system"}
    channel = f" ({words[1]})" if len(words) > 1 and role == "assistant" else ""
    return known.get(role, role)[:40] + channel[:40]


def _by_mask(drawn: Sequence[int], prompt: int) -> Iterator[_TokenSpan]:
    if prompt:
        yield _TokenSpan("prompt", 0, 0, prompt)
    start = prompt
    for at in range(prompt + 1, len(drawn) + 1):
        if at == len(drawn) or drawn[at] != drawn[start]:
            yield _TokenSpan("assistant" if drawn[start] else "environment", start, start, at)
            start = at


def _blocks(text: str) -> Iterator[MessageBlock]:
    end = 0
    closed = text.find("</think>")
    if closed >= 0 and "<think>" not in text[:closed]:
        # The template itself opened the thinking, in the part that it wrote.
        yield _block("thinking", text[:closed].strip())
        end = closed + len("</think>")
    for found in _MARKED.finditer(text, end):
        yield from _text_block(text[end : found.start()])
        end = found.end()
        if found["thinking"] is not None:
            if found["thought"].strip():
                yield _block("thinking", found["thought"].strip())
        elif found["answer"] is not None:
            yield _block("answer", found["answered"].strip())
        else:
            yield from _call(found["call"])
    yield from _text_block(text[end:])


def _text_block(text: str) -> Iterator[MessageBlock]:
    if text.strip():
        yield _block("text", text.strip("\n"))


def _call(text: str) -> Iterator[MessageBlock]:
    turn = HERMES.read(text)
    if not turn.calls:
        yield _block("call", text, "not a valid call")
    for call in turn.calls:
        shown = json.dumps(dict(call.arguments), indent=2, ensure_ascii=False)
        # JSON may spell halves of characters, which cannot be encoded.
        yield _block("call", shown.encode("utf-8", "replace").decode(), call.name)


def _block(kind: Kind, text: str, title: str = "") -> MessageBlock:
    return MessageBlock(
        kind=kind, text=text[:MAX_TEXT], title=title[:256], left_out=max(0, len(text) - MAX_TEXT)
    )
