"""Engine tokens: collects the ids, log-probabilities and versions that an engine states with an
answer.

vLLM states ids with ``return_token_ids``; the embedded engine also states the version of each
token. SGLang states them with each choice of a completion; for a chat, in ``sglext`` of the answer,
and for a stream in an event after its last token; in ``metadata`` it states spans of versions, for
its first choice. Nothing is encoded again and nothing is filled in: whatever is missing makes the
answer unusable for training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deltawire.errors import CorruptError
from deltawire.live.gateway.texts import flat_text
from deltawire.wire.captures import FILTERED

LEAST_LOGPROB = -9999.0
"""vLLM's placeholder for a log-probability of minus infinity."""
CONFIRMED = "confirmed"
FILTER_WORDS = frozenset({FILTERED, "safety", "refusal"})
"""Servers' words for an answer that their own filter withheld."""
MAX_TOKENS = 1 << 24
"""No answer has more tokens."""
MAX_DIGITS = 15
MOST_CHOICES = 1 << 16
CHARACTERS_A_TOKEN = 4
REVEALING = ("system_fingerprint", "weight_version", "weight_versions", "version", "metadata")
"""Members of an answer by which engines tell which weights drew it."""
_THOUGHTS = ("reasoning_content", "reasoning")
_SAID = ("content", "text", "refusal")
"""Members of a message by which servers state its text."""
_KNOWN = frozenset({"role", "tool_calls", *_SAID, *_THOUGHTS})
"""Members of a message whose texts are read here."""


class _CallShape(msgspec.Struct):
    index: int | None = None
    function: dict[str, Any] | None = None


class _SaidShape(msgspec.Struct):
    tool_calls: list[_CallShape] | None = None


class _RowShape(msgspec.Struct):
    index: int = 0
    message: _SaidShape | None = None
    delta: _SaidShape | None = None


class _AnswerShape(msgspec.Struct):
    """The containers of an answer whose members are read without another check."""

    choices: list[_RowShape] | None = None


@dataclass
class ChoiceTokens:
    """One choice of an answer, as far as it arrived.

    ``versions`` stays empty if the engine states none. ``drawn`` are the texts of the tokens,
    ``thoughts`` the model's reasoning, ``calls`` its calls: the functions' ``names`` and, here,
    their arguments. ``missing`` says that a chunk had text and no tokens, ``opaque`` that the
    answer has a member that is not known here.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: str = ""
    missing: bool = False
    opaque: bool = False

    @property
    def broken_calls(self) -> int:
        """Returns how many tool calls have arguments that are no JSON object."""
        return sum(not _is_object("".join(parts)) for parts in self.calls.values())

    @property
    def shows_tokens(self) -> bool:
        """Returns whether the engine stated the text of each token."""
        return len(self.drawn) == len(self.ids) and not any(
            text.startswith("token_id:") for text in self.drawn
        )

    def texts(self) -> list[str]:
        """Returns what the model said: the answer's text, its reasoning and calls, and what it drew
        that the answer does not show, such as reasoning that the client did not want."""
        text, drawn = "".join(self.text), "".join(self.drawn)
        calls = [flat_text("".join(parts)) for parts in self.calls.values()]
        found = [text, "".join(self.thoughts), "\n".join(self.names), *calls]
        if text not in (drawn, "".join(self.drawn[:-1])):  # The last token may end the answer.
            found.append(drawn)
        return [text, *(one for one in found[1:] if one)]

    def fault(self) -> str:
        """Why the tokens cannot be trained on; empty if they can, but for their versions."""
        if self.missing or not self.ids:
            return "the engine stated no tokens"
        if not _are_ids(self.ids):
            return "a token is no number of a vocabulary"
        if len(self.logprobs) != len(self.ids):
            return "the engine did not state a log-probability for each token"
        if not all(math.isfinite(p) and LEAST_LOGPROB < p <= 1e-3 for p in self.logprobs):
            return "a log-probability is none"
        if not self.finish:
            return "the answer did not end"
        return ""


class AnswerReader:
    """Reads the objects of an answer: one, or the chunks of a stream.

    Example::

        reader = AnswerReader()
        for chunk in chunks:
            reader.read(chunk)
        reader.choices[0].ids
    """

    def __init__(self, most_choices: int = MOST_CHOICES) -> None:
        self._most_choices = most_choices
        self.prompt: list[int] = []
        self.prompt_text = ""
        """The text of the prompt's tokens, if the engine states it."""
        self.choices: dict[int, ChoiceTokens] = {}
        self.model = ""
        self.completion_tokens: int | None = None
        """The tokens of all choices, if the engine counts them."""

    @property
    def drawn(self) -> int:
        """The tokens of all choices: those that the engine counts or lists, else one for each
        `CHARACTERS_A_TOKEN`."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        listed = sum(len(one.ids) for one in self.choices.values())
        said = sum(
            len(text)
            for one in self.choices.values()
            for texts in (one.text, one.thoughts, *one.calls.values())
            for text in texts
        )
        return listed or -(-said // CHARACTERS_A_TOKEN)

    def read(self, body: dict[str, Any]) -> None:
        """Adds a whole answer, or one chunk. Tokens and counts of the wrong type count as missing.

        Raises `CorruptError` for choices that are no choices, or more than asked for.
        """
        try:
            msgspec.convert(body, _AnswerShape)
        except msgspec.ValidationError as error:
            raise CorruptError(f"an answer of the wrong shape: {str(error)[:200]}") from error
        self.model = self.model or str(body.get("model") or "")[:256]
        if "prompt_token_ids" in body and _are_ids(body["prompt_token_ids"]):
            self.prompt = body["prompt_token_ids"]
        usage = body.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int) and 0 <= counted <= MAX_TOKENS:
            self.completion_tokens = counted
        if isinstance(body.get("prompt_text"), str):
            self.prompt_text = body["prompt_text"]
        for row in body.get("choices") or ():
            if isinstance(row, dict) and isinstance(row.get("index", 0), int):
                self._read(row, self.choices.setdefault(row.get("index", 0), ChoiceTokens()))
        self._read_sglang(body)
        if len(self.choices) > self._most_choices:
            raise CorruptError(f"an answer of more than {self._most_choices} choices")

    def _read_sglang(self, body: dict[str, Any]) -> None:
        stated = body.get("sglext")
        if isinstance(stated, dict):
            if _are_ids(stated.get("input_ids")):
                self.prompt = stated["input_ids"]
            rows = stated.get("output_ids")
            for index, ids in enumerate(rows if isinstance(rows, list) else ()):
                choice = self.choices.setdefault(index, ChoiceTokens())
                choice.missing = not isinstance(ids, list)
                choice.ids = ids if isinstance(ids, list) else []  # `fault` checks the members.
        about = body.get("metadata")
        spans = about.get("weight_versions") if isinstance(about, dict) else None
        if isinstance(spans, list) and list(self.choices) == [0]:
            self.choices[0].versions = _versions_of(spans)

    def _read(self, row: dict[str, Any], choice: ChoiceTokens) -> None:
        if "prompt_token_ids" in row and _are_ids(row["prompt_token_ids"]):
            self.prompt = row["prompt_token_ids"]
        said = row.get("message") or row.get("delta") or {}
        shown = (row.get("text"), *(said.get(name) for name in _SAID))
        text = "".join(str(one) for one in shown if one)
        thoughts = {str(said[name]) for name in _THOUGHTS if said.get(name)}
        calls = said.get("tool_calls") or ()
        if text:
            choice.text.append(str(text))
        choice.thoughts += thoughts
        choice.opaque = choice.opaque or any(
            value and name not in _KNOWN for name, value in said.items()
        )
        for place, call in enumerate(calls) if calls else ():
            function = call.get("function") or {}
            index = call.get("index")
            parts = choice.calls.setdefault(place if index is None else index, [])
            parts.append(str(function.get("arguments") or ""))
            if function.get("name"):
                choice.names.append(str(function["name"]))
        ids = row.get("token_ids")
        if isinstance(ids, list):  # `ChoiceTokens.fault` checks the members once.
            choice.ids += ids
            versions: Any = row.get("token_versions")
            if versions is not None and _are_ids(versions):
                choice.versions += versions
        elif (text or thoughts or calls) and not row.get("tokens_follow"):
            choice.missing = True
        if row.get("logprobs"):
            drawn, logprobs = _drawn_in(row["logprobs"])
            choice.drawn += drawn
            choice.logprobs += logprobs
        if row.get("finish_reason"):
            finish = str(row["finish_reason"])[:32]
            choice.finish = FILTERED if finish.lower() in FILTER_WORDS else finish


def _versions_of(spans: list[Any]) -> list[int]:
    """Returns the version of each token; nothing if the spans do not follow one another."""
    versions: list[int] = []
    for span in spans:
        if not isinstance(span, dict):
            return []
        version, end = span.get("version"), span.get("end")
        if not isinstance(version, str) or not version.isdecimal() or len(version) > MAX_DIGITS:
            return []
        if span.get("start") != len(versions) or not isinstance(end, int) or end > MAX_TOKENS:
            return []
        versions += [int(version)] * (end - len(versions))
    return versions


def _drawn_in(found: Any) -> tuple[list[str], list[float]]:
    """Return the texts of an answer's tokens, as far as they are stated, and their
    log-probabilities."""
    if not isinstance(found, dict):
        return [], []
    rows = found.get("content")
    if isinstance(rows, list):
        values = [row.get("logprob") if isinstance(row, dict) else None for row in rows]
        tokens = [row.get("token") for row in rows if isinstance(row, dict)]
    else:
        values, tokens = _list_of(found.get("token_logprobs")), _list_of(found.get("tokens"))
    drawn = [token for token in tokens if isinstance(token, str)]
    return drawn, [_real(value) for value in values]


def _list_of(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _real(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False


def _are_ids(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(one, int) and 0 <= one < 1 << 31 for one in found
    )


@dataclass(frozen=True)
class ClientView:
    """The part of an answer that its client gets.

    Members that only the gateway asked for are removed; ``ids`` and ``logprobs`` say that the
    client asked for them too. Unless ``reveal``, no member tells which version answered, since
    users who know that can vote on it: the versions of tokens and the fingerprint are removed, and
    ``model`` is what the client called it.

    Example::

        ClientView(ids=False, logprobs=False, reveal=False, model="m").of(body)
    """

    ids: bool
    logprobs: bool
    reveal: bool
    model: Any = None

    def of(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the object that the client gets, changed in place; None for a chunk with nothing
        left to tell."""
        if not self.ids:
            body.pop("prompt_token_ids", None)
            body.pop("prompt_text", None)
            only_ids = body.pop("sglext", None) is not None and not body.get("choices")
            if only_ids and not body.get("usage"):
                return None
        if not self.reveal:
            for name in REVEALING:
                body.pop(name, None)
            if isinstance(self.model, str) and "model" in body:
                body["model"] = self.model
        empty = "usage" not in body or body["usage"] is None
        for row in body.get("choices") or ():
            if not self.ids:
                for name in ("token_ids", "prompt_token_ids"):
                    row.pop(name, None)
            if not (self.ids and self.reveal):
                row.pop("token_versions", None)
            row.pop("tokens_follow", None)
            if not self.logprobs:
                row["logprobs"] = None
            delta = row.get("delta")
            empty = empty and not (
                delta
                or row.get("text")
                or row.get("finish_reason")
                or row.get("message")
                or self.logprobs
            )
            empty = empty and (delta is not None or "text" in row)
        return None if empty and body.get("choices") else body
