"""Tool calls in what a model wrote, in the form that its chat template spells them.

======== ==================================================================== ===================
dialect  a call                                                               of
======== ==================================================================== ===================
hermes   ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``             Qwen, Hermes
llama    ``{"name": …, "parameters": {…}}``, the whole of a turn              Llama 3.1 to 3.3
mistral  ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or               Mistral, Mixtral
         ``[TOOL_CALLS]name[ARGS]{…}`` for each call
======== ==================================================================== ===================

Which one it is, is not guessed from a model's name: its template is shown a call, and what it
makes of it is read back (`spelling_of`). A model whose template knows no calls, or that has none,
may be taught the first form, which is read in every dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deltawire.chat.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""Calls of one turn; any further ones count as broken."""

_CALL = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\\Z)", re.DOTALL)
_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?\[ARGS\]")
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:')
_SPACE = re.compile(r"[\s;]*")


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(frozen=True)
class Written:
    """A turn's text, taken apart: what stands outside the calls, the calls, and what began as
    one and is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


@dataclass
class _Found:
    """What was found so far."""

    turn: int
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)

    def take(self, name: object, arguments: object) -> bool:
        """Add a call; False if it is none, or one too many."""
        right = isinstance(name, str) and name and isinstance(arguments, dict)
        if not right or len(self.calls) >= MAX_CALLS:
            return False
        identity = f"t{self.turn % 100_000:05}c{len(self.calls):02}"
        self.calls.append(ToolCall(name, arguments, identity))  # type: ignore[arg-type]
        return True

    def written(self, text: str) -> Written:
        """All of it; a text without calls is left as it is."""
        if not (self.calls or self.broken):
            return Written(text)
        content = "".join(self.content).strip()
        return Written(content, tuple(self.calls), tuple(self.broken))


@dataclass(frozen=True)
class Dialect:
    """A way to spell calls. ``markers`` are texts that may be special tokens and yet say
    something."""

    name: str
    markers: tuple[str, ...]
    reader: Callable[[str, _Found], None]

    def read(self, text: str, *, turn: int = 0) -> Written:
        """Take a turn's text apart. Calls get identities of nine letters and digits, as Mistral's
        templates want them: ``t<turn>c<number>``."""
        found = _Found(turn)
        self.reader(text, found)
        if self is not HERMES and OPEN in text and not (found.calls or found.broken):
            return HERMES.read(text, turn=turn)
        return found.written(text)


def _hermes(text: str, found: _Found) -> None:
    end = 0
    for match in _CALL.finditer(text):
        found.content.append(text[end : match.start()])
        end = match.end()
        raw = _json(match.group(1)) if match.group(0).endswith(CLOSE) else None
        if not (isinstance(raw, dict) and found.take(raw.get("name"), raw.get("arguments", {}))):
            found.broken.append(match.group(0))
    found.content.append(text[end:])


def _llama(text: str, found: _Found) -> None:
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    while _BEGUN.match(text, at):
        value, end = _json_at(text, at)
        if not isinstance(value, dict) or not found.take(
            value.get("name"), value.get("parameters", value.get("arguments"))
        ):
            found.broken.append(text[at : end or len(text)])
        at = _SPACE.match(text, end or len(text)).end()  # type: ignore[union-attr]
    found.content.append(text[at:])


def _mistral(text: str, found: _Found) -> None:
    before, *parts = text.split(_MARK)
    found.content.append(before)
    for part in parts:
        named = _NAMED.match(part)
        start = named.end() if named else len(part) - len(part.lstrip())
        value, end = _json_at(part, start)
        if named:
            rows: Any = [{"name": named.group(1), "arguments": value}]
        else:
            rows = value if isinstance(value, list) else [value]
        whole = True
        for row in rows:
            taken = isinstance(row, dict) and found.take(row.get("name"), row.get("arguments", {}))
            whole = whole and taken
        if end is None or not rows or not whole:
            found.broken.append(_MARK + part[:end])
        found.content.append(part[end:] if end is not None else "")


HERMES = Dialect("hermes", (OPEN, CLOSE), _hermes)
LLAMA = Dialect("llama", (), _llama)
MISTRAL = Dialect("mistral", (_MARK, "[ARGS]", "[CALL_ID]"), _mistral)


@dataclass(frozen=True)
class Spelling:
    """How a chat template spells a call: its dialect, what stands ``before`` the tool's name, and
    ``between`` it and the arguments. These are empty where the arguments come first, or where
    something else that a call does not always have stands among them; that a call begins is then
    all that can be said."""

    dialect: Dialect
    before: str = ""
    between: str = ""

    def opening(self, name: str | None) -> str:
        """How a call of the tool ``name`` begins, or of any; empty if nobody can say.

        It ends where a tokenizer cuts as well: the model's own next token begins with the space or
        the quotation mark that is left out.
        """
        if not self.before:
            return "" if name is not None else self.dialect.markers[0]
        if name is None:
            return self.before.rstrip().rstrip('"').rstrip()
        return f"{self.before}{name}{self.between}".rstrip()


SHOWN = ToolCall("shown_tool", {"shown_key": "shown value"}, "shown0001")
"""The call that templates are shown. Some want names of nine letters and digits for calls."""


def spelling_of(rendered: str, prompt: str) -> Spelling | None:
    """How calls are spelt in what a template made of a conversation that ends with `SHOWN`; None
    if it spelt none, or in another form than those known here. ``prompt`` is what it made of the
    messages before that, up to where an answer begins."""
    for dialect, start in ((HERMES, OPEN), (MISTRAL, _MARK), (LLAMA, "{")):
        at = rendered.rfind(start, 0, rendered.rfind(SHOWN.name))
        # A form without a mark of its own must be all of the turn, not a part of another form.
        if at < 0 or (dialect is LLAMA and rendered[:at].rstrip() != prompt.rstrip()):
            continue
        found = dialect.read(rendered[at:]).calls
        if [(call.name, call.arguments) for call in found] == [(SHOWN.name, SHOWN.arguments)]:
            before, between = _around(rendered[at:])
            return Spelling(dialect, before, between) if before or dialect.markers else None
    return None


def _around(call: str) -> tuple[str, str]:
    before, _, rest = call.partition(SHOWN.name)
    between, found, _ = rest.partition('{"shown_key"')
    if not found or "shown_key" in before or SHOWN.identity in between:
        return "", ""
    return before, between


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON that begins there and where it ends; (None, None) if there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None
