"""Reads tool calls from a model's text, in the form that its chat template spells them.

======== ================================================================= ========================
dialect  a call                                                            models
======== ================================================================= ========================
hermes   ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or      Qwen2.5, Qwen3, Hermes;
         ``<tool_call><function=name><parameter=key>…</parameter>          Qwen3-Coder, Qwen3.5,
         </function></tool_call>``                                         Nemotron-3
glm      ``<tool_call>name<arg_key>key</arg_key><arg_value>…</arg_value>   GLM-4.5 to GLM-4.7
         </tool_call>``
llama    ``{"name": …, "parameters": {…}}``, the whole of a turn           Llama 3.1 to 3.3
mistral  ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or            Mistral, Mixtral
         ``[TOOL_CALLS]name[ARGS]{…}`` for each call
deepseek ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``, or DeepSeek-V3.1;
         ``function<｜tool▁sep｜>name`` and fenced JSON in the same marks   DeepSeek-V3, R1
harmony  ``to=functions.name<|channel|>commentary json<|message|>{…}       gpt-oss
         <|call|>``
======== ================================================================= ========================

The dialect is not guessed from a model's name: its template renders a sample call, and the result
is parsed (`call_format_of`). A model without a template, or whose template has no calls, may be
taught the first form, which is read in every dialect.

Two forms write arguments as bare text. Where the tool's JSON schema is known, it decides which of
them are strings; elsewhere a value that is JSON, other than a string, is taken as that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltawire.chat.messages import Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""Calls of one turn; any further ones count as broken."""

_NAME = r"[A-Za-z0-9_.-]{1,256}"
_CALL = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]{1,256})>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(rf"\s*({_NAME})\s*(?=<arg_key>|\Z)")
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.{1,256}?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\]\s*\w{{1,64}}\s*)?\[ARGS\]")
_JSON_CALL = re.compile(r'\s*\{\s*"name"\s*:')
_SPACE = re.compile(r"[\s;]*")
_DEEPSEEK_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_CALL = re.compile(
    f"{_DEEPSEEK_BEGIN}(.*?)(?:{_DEEPSEEK_END}|(?={_DEEPSEEK_BEGIN})|\\Z)", re.DOTALL
)
_FENCE = "```"
_HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(rf"to=functions\.({_NAME})")


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


@dataclass(frozen=True)
class ParsedTurn:
    """A turn's text, parsed: the text outside calls, the calls, and each piece that began as a
    call and is not a valid one."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


@dataclass
class _Parser:
    """Collects the calls and the text of one turn."""

    turn: int
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    structured: bool = False
    """The text has parts that are not content, with or without calls."""

    def add(self, name: object, arguments: object) -> bool:
        """Adds a call; False if it is not valid, or one too many."""
        valid = isinstance(name, str) and name and isinstance(arguments, dict)
        if not valid or len(self.calls) >= MAX_CALLS:
            return False
        identity = f"t{self.turn % 100_000:05}c{len(self.calls):02}"
        self.calls.append(ToolCall(name, arguments, identity))  # type: ignore[arg-type]
        return True

    def value(self, tool: str, key: str, text: str) -> Any:
        """The value of an argument that is written as bare text."""
        schema = self.schemas.get(tool, {}).get(key)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        kinds = [kinds] if isinstance(kinds, str) else kinds or []
        if "string" in kinds and not (text == "null" and "null" in kinds):
            return text
        value = _json(text.strip())
        is_json = value is not None or text.strip() == "null"
        return value if is_json and not isinstance(value, str) else text

    def result(self, text: str) -> ParsedTurn:
        """The parsed turn; a text without calls is left as it is."""
        if not (self.calls or self.broken or self.structured):
            return ParsedTurn(text)
        content = "".join(self.content).strip()
        return ParsedTurn(content, tuple(self.calls), tuple(self.broken))


@dataclass(frozen=True)
class Dialect:
    """A way to spell calls.

    ``markers`` are texts that may be special tokens and yet carry meaning. A ``structured``
    dialect marks the parts of every turn, so that its text has to be parsed even where no tool is
    offered.

    Example::

        >>> HERMES.read('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
        (ToolCall(name='add', arguments={'a': 1}, identity='t00000c00'),)
    """

    name: str
    markers: tuple[str, ...]
    parse: Callable[[str, _Parser], None]
    structured: bool = False

    def read(self, text: str, *, turn: int = 0, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Parses a turn's text. Calls get identities of nine letters and digits, as Mistral's
        templates require: ``t<turn>c<number>``."""
        properties = {tool.name: tool.parameters.get("properties") for tool in tools}
        schemas = {name: found for name, found in properties.items() if isinstance(found, Mapping)}
        parser = _Parser(turn, schemas)
        self.parse(text, parser)
        if OPEN in text and not (parser.calls or parser.broken or self.parse in _TAGGED):
            return HERMES.read(text, turn=turn, tools=tools)
        return parser.result(text)


def _parse_hermes(text: str, parser: _Parser) -> None:
    _parse_tagged(text, parser, (_json_call, _xml_call, _glm_call))


def _parse_glm(text: str, parser: _Parser) -> None:
    _parse_tagged(text, parser, (_json_call, _xml_call, _glm_call, _bare_call))


_Body = Callable[[str, _Parser], bool]


def _parse_tagged(text: str, parser: _Parser, bodies: Sequence[_Body]) -> None:
    end = 0
    for match in _CALL.finditer(text):
        parser.content.append(text[end : match.start()])
        end = match.end()
        closed = match.group(0).endswith(CLOSE)
        if not (closed and any(body(match.group(1), parser) for body in bodies)):
            parser.broken.append(match.group(0))
    parser.content.append(text[end:])


def _json_call(body: str, parser: _Parser) -> bool:
    raw = _json(body)
    return isinstance(raw, dict) and parser.add(raw.get("name"), raw.get("arguments", {}))


def _xml_call(body: str, parser: _Parser) -> bool:
    match = _FUNCTION.match(body)
    if match is None:
        return False
    name, rest = match.groups()
    pairs = _pairs(_PARAMETER, rest)
    return pairs is not None and parser.add(
        name, {key: parser.value(name, key, value) for key, value in pairs}
    )


def _glm_call(body: str, parser: _Parser) -> bool:
    match = _GLM_NAME.match(body)
    pairs = _pairs(_GLM_ARGUMENT, body[match.end() :]) if match else None
    if match is None or not pairs:
        return False
    name = match.group(1)
    return parser.add(name, {key: parser.value(name, key, value) for key, value in pairs})


def _bare_call(body: str, parser: _Parser) -> bool:
    """A call without arguments: the name only."""
    return re.fullmatch(_NAME, body.strip()) is not None and parser.add(body.strip(), {})


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """The keys and values of a text that consists of nothing else; None of any other text."""
    pairs, at = [], 0
    while match := pattern.match(text, at):
        pairs.append((match.group(1), match.group(2)))
        at = match.end()
    return None if text[at:].strip() else pairs


def _parse_llama(text: str, parser: _Parser) -> None:
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    while _JSON_CALL.match(text, at):
        value, end = _json_at(text, at)
        if not isinstance(value, dict) or not parser.add(
            value.get("name"), value.get("parameters", value.get("arguments"))
        ):
            parser.broken.append(text[at : end or len(text)])
        at = _SPACE.match(text, end or len(text)).end()  # type: ignore[union-attr]
    parser.content.append(text[at:])


def _parse_mistral(text: str, parser: _Parser) -> None:
    before, *parts = text.split(_MARK)
    parser.content.append(before)
    for part in parts:
        named = _NAMED.match(part)
        start = named.end() if named else len(part) - len(part.lstrip())
        value, end = _json_at(part, start)
        if named:
            rows: Any = [{"name": named.group(1), "arguments": value}]
        else:
            rows = value if isinstance(value, list) else [value]
        valid = True
        for row in rows:
            added = isinstance(row, dict) and parser.add(row.get("name"), row.get("arguments", {}))
            valid = valid and added
        if end is None or not rows or not valid:
            parser.broken.append(_MARK + part[:end])
        parser.content.append(part[end:] if end is not None else "")


def _parse_deepseek(text: str, parser: _Parser) -> None:
    end = 0
    for match in _DEEPSEEK_CALL.finditer(text):
        parser.content.append(text[end : match.start()])
        end = match.end()
        name, mark, rest = match.group(1).partition(_DEEPSEEK_SEP)
        if name.strip() == "function":  # DeepSeek-V3 names the kind of the tool first.
            name, _, rest = rest.partition("\n")
        value = _json(_unfenced(rest))
        closed = bool(mark) and match.group(0).endswith(_DEEPSEEK_END)
        if not (closed and parser.add(name.strip(), value)):
            parser.broken.append(match.group(0))
    parser.content.append(text[end:])
    for mark in _DEEPSEEK_ALL:
        parser.content = [piece.replace(mark, "") for piece in parser.content]


def _unfenced(text: str) -> str:
    """The inside of a fenced block of code; the text itself if it is none."""
    inner = text.strip()
    if len(inner) < 2 * len(_FENCE) or not (inner.startswith(_FENCE) and inner.endswith(_FENCE)):
        return text
    return inner[len(_FENCE) : -len(_FENCE)].removeprefix("json")


def _parse_harmony(text: str, parser: _Parser) -> None:
    parser.structured = any(mark in text for mark in _HARMONY)
    for part in text.split("<|start|>"):
        header, message, rest = part.partition("<|message|>")
        body, *ended = _HARMONY_END.split(rest, maxsplit=1)
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            if not message or "analysis" not in header:
                parser.content.append(body if message else _HARMONY_END.sub("", header))
        elif not (ended and parser.add(recipient.group(1), _json(body))):
            parser.broken.append(part)


HERMES = Dialect("hermes", (OPEN, CLOSE), _parse_hermes)
GLM = Dialect(
    "glm", (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), _parse_glm
)
LLAMA = Dialect("llama", (), _parse_llama)
MISTRAL = Dialect("mistral", (_MARK, "[ARGS]", "[CALL_ID]"), _parse_mistral)
DEEPSEEK = Dialect(
    "deepseek",
    (*_DEEPSEEK_ALL, _DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END),
    _parse_deepseek,
)
HARMONY = Dialect("harmony", _HARMONY, _parse_harmony, structured=True)
_TAGGED = (_parse_hermes, _parse_glm)
_STARTS = (
    (GLM, OPEN),
    (HERMES, OPEN),
    (MISTRAL, _MARK),
    (DEEPSEEK, _DEEPSEEK_ALL[0]),
    (HARMONY, " to=functions."),
    (LLAMA, "{"),
)
"""The dialects and how a call of each begins, in the order in which they are tried."""


@dataclass(frozen=True)
class CallFormat:
    """A chat template's notation for a call: its dialect, the text ``before`` the tool's name, and
    the text ``between`` the name and the arguments.

    Both are empty where the arguments come first, or where something else that a call does not
    always have is in between; only the mark that begins a call is known then.
    """

    dialect: Dialect
    before: str = ""
    between: str = ""

    def opening(self, name: str | None) -> str:
        """The beginning of a call of the tool ``name``, or of any; empty if it is unknown.

        It ends where a tokenizer cuts as well: the model's next token begins with the space or the
        quotation mark that is left out.
        """
        if not self.before:
            return "" if name is not None else self.dialect.markers[0]
        if name is None:
            return self.before.rstrip().rstrip('"').rstrip()
        return f"{self.before}{name}{self.between}".rstrip()


SAMPLE_CALL = ToolCall("shown_tool", {"shown_key": "shown value"}, "shown0001")
"""The call that templates render. Some require nine letters and digits in a call's identity."""

_SAMPLE_ARGUMENTS = re.compile(r'\{"shown_key"|<parameter=shown_key|<arg_key>shown_key')


def call_format_of(rendered: str, prompt: str) -> CallFormat | None:
    """The form of `SAMPLE_CALL` in a rendered conversation that ends with it; None if the template
    spelled no call, or in another form than those known here.

    ``prompt`` is the rendering of the messages before the call, up to where an answer begins.
    """
    for dialect, start in _STARTS:
        at = rendered.rfind(start, 0, rendered.rfind(SAMPLE_CALL.name))
        # A form without a distinctive mark must be the whole turn, not part of another form.
        if at < 0 or (dialect is LLAMA and rendered[:at].rstrip() != prompt.rstrip()):
            continue
        if dialect is GLM and "<arg_key>" not in rendered[at:]:
            continue
        calls = [(call.name, call.arguments) for call in dialect.read(rendered[at:]).calls]
        if calls == [(SAMPLE_CALL.name, SAMPLE_CALL.arguments)]:
            before, between = _around(rendered[at:])
            if before or dialect.markers:
                return CallFormat(dialect, before, between)
            return None
    return None


def _around(call: str) -> tuple[str, str]:
    before, _, rest = call.partition(SAMPLE_CALL.name)
    found = _SAMPLE_ARGUMENTS.search(rest)
    between = rest[: found.start()] if found else ""
    if not found or "shown_key" in before or SAMPLE_CALL.identity in between:
        return "", ""
    return before, between


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON value that begins at ``start`` and its end; (None, None) if there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None
