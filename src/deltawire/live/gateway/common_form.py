"""Common form of answers: what clients get where other providers' models are arms.

Servers of different providers state different members, ids and words for the same thing, by which
a client could tell its arm. So nothing of a server's answer is passed on but its text and the calls
it makes: objects are built again, with the same members in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from deltawire.live.gateway.engine_tokens import FILTER_WORDS
from deltawire.wire.captures import FILTERED

_FINISHED = {
    **dict.fromkeys(("length", "max_tokens", "model_length", "abort", "error"), "length"),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), "tool_calls"),
    **dict.fromkeys(FILTER_WORDS, FILTERED),
}
"""OpenAI's word for each word that servers use; all others are ``stop``. OpenAI has none for an
answer that was broken off: as ``length``, it is not taken for a whole one."""


class _ShownChoice:
    """One choice of an answer, as far as it was shown: the places of its calls by the server's
    index, and which of them have a name."""

    def __init__(self) -> None:
        self.begun = False
        self.calls: dict[Any, int] = {}
        self.named: set[int] = set()


class CommonForm:
    """Builds one answer for a client. ``name`` is the gateway's own id of the answer, ``model``
    what the client called the model.

    There is no ``usage``, since counts of tokens tell the tokenizer, and no log-probabilities. Ids
    of calls are the gateway's own. Each chunk has one choice: text, calls, or its end.

    Example::

        form = CommonForm(name, model="support", chat=True)
        form.whole(body)
        for chunk in form.chunks(body): ...
    """

    def __init__(self, name: str, *, model: Any, chat: bool) -> None:
        self._name = name
        self._model = model
        self._chat = chat
        self._created = int(time.time())
        self._choices: dict[int, _ShownChoice] = {}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns a whole answer."""
        rows = [self._row(place, row) for place, row in _rows_of(body)]
        return self._object(rows, chunk=False)

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Returns the chunks that a server's chunk becomes: none if it says nothing new."""
        for place, row in _rows_of(body):
            choice = self._choices.setdefault(place, _ShownChoice())
            said = row.get("delta") if self._chat else row
            said = said if isinstance(said, dict) else {}
            text = _text_of(said)
            calls = [self._call(place, choice, *one, chunk=True) for one in _calls_of(said)]
            if text or calls:
                delta: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
                choice.begun = True
                if text:
                    delta["content"] = text
                if calls:
                    delta["tool_calls"] = calls
                yield self._object([self._said(place, delta, text, None)], chunk=True)
            if row.get("finish_reason"):
                delta = {} if choice.begun else {"role": "assistant", "content": ""}
                choice.begun = True
                finish = _finish_of(row["finish_reason"], choice)
                yield self._object([self._said(place, delta, "", finish)], chunk=True)

    def _object(self, rows: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": f"chatcmpl-{self._name}" if self._chat else f"cmpl-{self._name}",
            "object": kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": rows,
        }

    def _said(
        self, place: int, delta: dict[str, Any], text: str, finish: str | None
    ) -> dict[str, Any]:
        said = {"delta": delta} if self._chat else {"text": text}
        return {"index": place, **said, "logprobs": None, "finish_reason": finish}

    def _row(self, place: int, row: dict[str, Any]) -> dict[str, Any]:
        choice = _ShownChoice()
        said = row.get("message") if self._chat else row
        said = said if isinstance(said, dict) else {}
        text = _text_of(said)
        shown: dict[str, Any] = {"text": text}
        if self._chat:
            calls = [self._call(place, choice, *one, chunk=False) for one in _calls_of(said)]
            message = {"role": "assistant", "content": text or (None if calls else "")}
            shown = {"message": {**message, "tool_calls": calls} if calls else message}
        finish = _finish_of(row.get("finish_reason"), choice)
        return {"index": place, **shown, "logprobs": None, "finish_reason": finish}

    def _call(
        self, place: int, choice: _ShownChoice, index: Any, call: dict[str, Any], *, chunk: bool
    ) -> dict[str, Any]:
        begins = index not in choice.calls
        number = choice.calls.setdefault(index, len(choice.calls))
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        shown: dict[str, Any] = {}
        if number not in choice.named and isinstance(name, str) and name:
            choice.named.add(number)
            shown["name"] = name
        shown["arguments"] = arguments or ""
        # Some templates keep the last nine letters and digits of an id only.
        own = {"id": f"call_{self._name[:20]}{place:02x}{number:02x}", "type": "function"}
        head = {"index": number} if chunk else {}
        return {**head, **(own if begins else {}), "function": shown}


def _rows_of(body: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = body.get("choices")
    for at, row in enumerate(rows if isinstance(rows, list) else ()):
        if isinstance(row, dict):
            index = row.get("index", at)
            yield (index if isinstance(index, int) and index >= 0 else at), row


def _text_of(said: dict[str, Any]) -> str:
    content = said.get("content") or said.get("text") or said.get("refusal") or ""
    if isinstance(content, list):  # Parts, of which some are thoughts.
        parts = [one.get("text") for one in content if isinstance(one, dict)]
        return "".join(one for one in parts if isinstance(one, str))
    return content if isinstance(content, str) else ""


def _calls_of(said: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    calls = said.get("tool_calls")
    found = enumerate(calls if isinstance(calls, list) else ())
    rows = [(call.get("index", at), call) for at, call in found if isinstance(call, dict)]
    return [(index if isinstance(index, int) else 0, call) for index, call in rows]


def _finish_of(reason: Any, choice: _ShownChoice) -> str:
    finish = _FINISHED.get(str(reason).lower(), "stop")
    # Some servers say that a choice with calls stopped.
    return "tool_calls" if choice.calls and finish == "stop" else finish
