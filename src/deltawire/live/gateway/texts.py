"""Texts of a request: everything in it that a person may have typed and a replica may render.

A replica's chat template reads more than contents: names, calls of tools and their arguments,
reasoning, tools, documents, variables, and members that are not known here. All of them are texts.
A part that is no text is opaque: images, token ids, a template of the client, which may spell
anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

_UNRENDERED = frozenset(
    {
        *("messages", "prompt", "model", "user", "safety_identifier", "metadata"),
        *("prompt_cache_key", "service_tier", "request_id", "cache_salt", "stream_options"),
        "logit_bias",
    }
)
"""Members of a request that are read elsewhere, or never become part of a prompt."""
_OPAQUE = ("chat_template", "prompt_embeds")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class RequestTexts(NamedTuple):
    """The texts of a request, and whether part of it is no text."""

    texts: list[str]
    opaque: bool


def texts_of(body: dict[str, Any], *, chat: bool) -> RequestTexts:
    """Returns the texts of a request: a message's content is one, and its other members one.

    Example::

        texts_of({"messages": [{"role": "user", "content": "Hi", "name": "Ada"}]}, chat=True)
    """
    texts: list[str] = []
    opaque = any(body.get(name) is not None for name in _OPAQUE)
    if chat:
        messages = body.get("messages")
        opaque = opaque or not isinstance(messages, list)
        for message in messages if isinstance(messages, list) else ():
            if not isinstance(message, dict):
                opaque = True
                continue
            text = content_text(message.get("content"))
            opaque = opaque or text.opaque
            texts.append(text.shown)
            others = {
                name: value
                for name, value in message.items()
                if name != "content" and value is not None
            }
            if others.get("role") in _ROLES:
                del others["role"]
            if flat := flat_text(others):
                texts.append(flat)
    else:
        prompt = body.get("prompt")
        opaque = opaque or not isinstance(prompt, str)
        texts.append(prompt if isinstance(prompt, str) else "")
    for name, value in body.items():
        if name in _UNRENDERED or not isinstance(value, str | list | dict):
            continue
        each = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        flats = [flat_text(one) for one in (value if each else [{name: value}])]
        texts += [flat for flat in flats if flat]
    return RequestTexts(texts, opaque)


class ContentText(NamedTuple):
    """A message's content as text, and whether part of it is none."""

    shown: str
    opaque: bool


def content_text(content: Any) -> ContentText:
    """Returns a message's content, its text parts joined."""
    if isinstance(content, str) or content is None:
        return ContentText(content or "", opaque=False)
    texts, opaque = [], not isinstance(content, list)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
            opaque = opaque or part.get("type") not in _TEXT_PARTS
        else:
            opaque = True
    return ContentText("".join(texts), opaque)


def flat_text(value: Any) -> str:
    """Returns the keys, texts and numbers of a JSON value, one a line.

    Lines hold texts as they are, where JSON would hide words among its escapes. For that reason,
    JSON within a text is read too, as templates read the arguments of calls.

    Example::

        assert flat_text({"name": "f", "arguments": {"city": "Oslo"}}) == (
            "name: f\\narguments:\\ncity: Oslo"
        )
    """
    return "\n".join(_lines(value))


def _lines(value: Any) -> Iterator[str]:
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, one = waiting.pop()
        start = f"{name}: " if name else ""
        if isinstance(one, dict):
            waiting += reversed([(str(key), member) for key, member in one.items()])
        elif isinstance(one, list):
            waiting += reversed([("", member) for member in one])
        if isinstance(one, dict | list) or one is None or isinstance(one, bool):
            if name:
                yield f"{name}:"
            continue
        yield f"{start}{one}"
        if isinstance(one, str) and "\\" in one and one.lstrip()[:1] in ("{", "["):
            try:
                waiting.append(("", msgspec.json.decode(one)))
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                continue
