"""OpenAI's Responses API, as far as it says the same as a chat: text, instructions, tools, streams.

::

    POST /v1/responses ─▶ `chat_of` ─▶ a chat, as any other ─▶ `ResponseForm` ─▶ the client

The gateway keeps no conversation for a client, so what refers to an earlier response is refused by
name, as are tools that OpenAI itself runs. A model's reasoning is not part of the answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from deltawire.errors import CorruptError
from deltawire.live.gateway.engine_tokens import MAX_TOKENS
from deltawire.live.gateway.options import check_integer
from deltawire.serving.errors import RequestError

MAX_ITEMS = 4096
MAX_TEXT_BYTES = 64 << 20
"""Text and arguments of one answer, which are repeated at its end."""
_SAME = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "user", "safety_identifier"),
        *("prompt_cache_key", "parallel_tool_calls", "seed", "stop"),
    }
)
"""Members that a chat has under the same name."""
_ECHOED = ("temperature", "top_p", "metadata", "user", "safety_identifier", "prompt_cache_key")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "background": (None, False),
    "include": (None, []),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
    "context_management": (None, []),
    "prompt_cache_retention": (None, "in_memory"),
    "prompt_cache_options": (None, {}),
    "moderation": (None,),
}
"""Members that mean nothing here but with these values."""
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXTS = frozenset({"input_text", "output_text", "text"})


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat that says what a request to ``/v1/responses`` asks; raises `RequestError`
    for a member that no chat has."""
    chat = {name: body[name] for name in _SAME & body.keys()}
    chat["messages"] = _messages_of(body)
    for name, value in body.items():
        if name in _SAME or name in ("input", "instructions") or value is None:
            continue
        if name == "max_output_tokens":
            check_integer(name, value, 1, MAX_TOKENS)  # A later check would say the chat's name.
            chat["max_completion_tokens"] = value
        elif name == "tools":
            chat["tools"] = _tools_of(value)
        elif name == "tool_choice":
            chat["tool_choice"] = _tool_choice_of(value)
        elif name == "text":
            chat |= _format_of(value)
        elif name == "reasoning":
            chat |= _reasoning_of(value)
        elif name == "metadata":
            _check_metadata(value)
        elif name == "stream_options":
            if not isinstance(value, dict) or value.keys() - {"include_obfuscation"}:
                raise _refused(name)
        elif not any(value == one for one in _NEUTRAL.get(name, ())):
            raise _refused(name, known=name in _NEUTRAL)
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _refused(name: str, why: str = "", *, known: bool = True) -> RequestError:
    return RequestError(
        f"{name[:64]} is not served at /v1/responses here{': ' if why else ''}{why}",
        hint="leave it out, or use /v1/chat/completions",
        code="unsupported_parameter" if known else "unknown_parameter",
        param=name[:64],
    )


def _invalid(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", code="invalid_value", param=name)


def _messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    instructions, given = body.get("instructions"), body.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise _invalid("instructions", "only a text is served here")
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _invalid("input", "it is neither a text nor a list of items")
    if len(given) > MAX_ITEMS:
        raise _invalid("input", f"more than {MAX_ITEMS} items")
    for place, item in enumerate(given):
        _add_item(found, item, f"input[{place}]")
    return found


def _add_item(messages: list[dict[str, Any]], item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise _invalid(place, "an item is an object")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _invalid(f"{place}.role", "it is user, assistant, system or developer")
        messages.append({"role": role, "content": _text_of(item.get("content"), place)})
    elif kind == "function_call":
        call = {
            "id": _word(item, "call_id", place),
            "type": "function",
            "function": {
                "name": _word(item, "name", place),
                "arguments": _word(item, "arguments", place),
            },
        }
        if messages and messages[-1]["role"] == "assistant":  # One turn may make several calls.
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _text_of(output, f"{place}.output")
        messages.append(
            {"role": "tool", "tool_call_id": _word(item, "call_id", place), "content": text}
        )
    else:
        raise _refused(f"{place}.type", f"items of type {str(kind)[:64]!r} are not served")


def _word(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{place}.{name}", "a text is needed")
    return value


def _text_of(content: Any, place: str) -> str:
    """Returns the text of a message; images, files and sound are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{place}.content", "it is neither a text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_word(part, "refusal", place))
            continue
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise _refused(f"{place}.content", f"parts of type {str(kind)[:64]!r} are not served")
        texts.append(_word(part, "text", place))
    return "".join(texts)


def _tools_of(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise _invalid("tools", "it is no list")
    found = []
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise _refused(
                f"tools[{place}].type", f"tools of type {str(kind)[:64]!r} run elsewhere"
            )
        function = {
            name: tool[name]
            for name in ("name", "description", "parameters", "strict")
            if tool.get(name) is not None
        }
        found.append({"type": "function", "function": function})
    return found


def _tool_choice_of(choice: Any) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _word(choice, "name", "tool_choice")}}
    raise _refused("tool_choice", "it is auto, none, required or a function")


def _format_of(text: Any) -> dict[str, Any]:
    if not isinstance(text, dict):
        raise _invalid("text", "it is no object")
    found: dict[str, Any] = {}
    for name, value in text.items():
        if name == "verbosity":
            if value is not None:
                found["verbosity"] = value
        elif name != "format":
            raise _refused(f"text.{name}")
        elif isinstance(value, dict) and value.get("type") == "json_schema":
            schema = {
                one: value[one]
                for one in ("name", "description", "schema", "strict")
                if value.get(one) is not None
            }
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(value, dict) and value.get("type") == "json_object":
            found["response_format"] = {"type": "json_object"}
        elif value not in (None, {"type": "text"}):
            raise _refused("text.format")
    return found


def _reasoning_of(reasoning: Any) -> dict[str, Any]:
    if not isinstance(reasoning, dict):
        raise _invalid("reasoning", "it is no object")
    if odd := [name for name, value in reasoning.items() if value and name != "effort"]:
        raise _refused(f"reasoning.{odd[0]}")
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _check_metadata(metadata: Any) -> None:
    small = isinstance(metadata, dict) and len(metadata) <= 16
    if not small or not all(
        len(name) <= 64 and isinstance(value, str) and len(value) <= 512
        for name, value in metadata.items()
    ):
        raise _invalid("metadata", "at most 16 texts of at most 512 characters")


class ResponseForm:
    """Writes one answer in the form of the Responses API; chunks of a chat go in.

    Raises `CorruptError` for an answer of more than `MAX_TEXT_BYTES`.

    Example::

        form = ResponseForm(body)
        form.chunk(chat_chunk)        # bytes of events
        form.end([], {"receipt": …})  # the last events
        form.whole(chat_answer, {"receipt": …})
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._number = 0
        self._size = 0
        self._items: list[dict[str, Any]] = []
        self._text: int | None = None
        self._calls: dict[int, int] = {}
        self._finish = ""
        self._usage: Mapping[str, Any] = {}
        self._begun = False

    def whole(self, body: Mapping[str, Any], member: Mapping[str, Any]) -> bytes:
        """Returns a whole answer as one object, with the member ``deltawire``."""
        self._read(body)
        for item in self._items:
            item["status"] = "completed"
        return msgspec.json.encode(self._response() | {"deltawire": member})

    def chunk(self, body: Mapping[str, Any]) -> bytes:
        """Returns the events that a chunk becomes; empty if it says nothing new."""
        events = [*self._begin(), *self._read(body)]
        return b"".join(map(self._event, events))

    def end(self, held: Iterable[Mapping[str, Any]], member: Mapping[str, Any]) -> bytes:
        """Returns the last events, of the chunks that waited for the receipts and of the end."""
        events = self._begin()
        for body in held:
            events += self._read(body)
        for place, item in enumerate(self._items):
            events += self._done(place, item)
        response = self._response() | {"deltawire": member}
        events.append({"type": f"response.{response['status']}", "response": response})
        return b"".join(map(self._event, events))

    def failed(self, message: str) -> bytes:
        """Returns the event that says that the answer has failed."""
        return self._event(
            {"type": "error", "code": "server_error", "message": message, "param": None}
        )

    def _event(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        response = self._response(status="in_progress")
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def _read(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Adds a chat's answer or chunk; returns the events of what is new."""
        usage = body.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        events: list[dict[str, Any]] = []
        for row in body.get("choices") or ():
            if not isinstance(row, dict) or row.get("index", 0) != 0:
                continue
            said = row.get("message") or row.get("delta") or {}
            if isinstance(said, dict):
                events += self._add_said(said)
            if row.get("finish_reason"):
                self._finish = str(row["finish_reason"])
        return events

    def _add_said(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        text, calls = said.get("content"), said.get("tool_calls")
        if isinstance(text, str) and text:
            events += self._add_text(text)
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                events += self._add_call(call, place)
        return events

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > MAX_TEXT_BYTES:
            raise CorruptError(f"an answer of more than {MAX_TEXT_BYTES} characters")

    def _add_text(self, text: str) -> list[dict[str, Any]]:
        self._grow(text)
        events: list[dict[str, Any]] = []
        if self._text is None:
            self._text = len(self._items)
            item: dict[str, Any] = {
                "id": f"msg_{secrets.token_hex(24)}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            self._items.append(item)
            added = {"type": "response.output_item.added", "output_index": self._text}
            events.append(added | {"item": dict(item)})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part]
            item["parts"] = []
            head = self._at(self._text) | {"content_index": 0}
            events.append({"type": "response.content_part.added", **head, "part": dict(part)})
        self._items[self._text]["parts"].append(text)
        head = self._at(self._text) | {"content_index": 0}
        delta = {"type": "response.output_text.delta", **head, "delta": text, "logprobs": []}
        return [*events, delta]

    def _add_call(self, call: Mapping[str, Any], place: int) -> list[dict[str, Any]]:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        index = place if call.get("index") is None else call["index"]
        events: list[dict[str, Any]] = []
        if index not in self._calls:
            self._calls[index] = len(self._items)
            item: dict[str, Any] = {
                "id": f"fc_{secrets.token_hex(24)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": str(call.get("id") or f"call_{secrets.token_hex(12)}"),
                "name": str(function.get("name") or ""),
                "arguments": "",
            }
            self._items.append(item)
            added = {"type": "response.output_item.added", "output_index": self._calls[index]}
            events.append(added | {"item": dict(item)})
            item["parts"] = []
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            self._grow(arguments)
            at = self._calls[index]
            self._items[at]["parts"].append(arguments)
            head = {"type": "response.function_call_arguments.delta", **self._at(at)}
            events.append(head | {"delta": arguments})
        return events

    def _at(self, place: int) -> dict[str, Any]:
        return {"item_id": self._items[place]["id"], "output_index": place}

    def _done(self, place: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        shown = self._shown(item) | {"status": "completed"}
        item["status"] = "completed"
        head = self._at(place)
        done = {"type": "response.output_item.done", "output_index": place, "item": shown}
        if item["type"] == "function_call":
            called = {"arguments": shown["arguments"], "name": shown["name"]}
            return [{"type": "response.function_call_arguments.done", **head, **called}, done]
        (part,) = shown["content"]
        head |= {"content_index": 0}
        return [
            {"type": "response.output_text.done", **head, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **head, "part": part},
            done,
        ]

    @staticmethod
    def _shown(item: Mapping[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in item.items() if name != "parts"}
        said = "".join(item.get("parts", ()))
        if item["type"] == "function_call":
            return shown | {"arguments": said}
        return shown | {"content": [{**part, "text": said} for part in item["content"]]}

    def _response(self, status: str = "") -> dict[str, Any]:
        asked = self._asked
        why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self._finish)
        text = asked.get("text")
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if why else "completed"),
            "error": None,
            "incomplete_details": {"reason": why} if why and not status else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "model": asked.get("model"),
            "output": [] if status else [self._shown(item) for item in self._items],
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "text": text
            if isinstance(text, dict) and "format" in text
            else {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None if status else self._counted(),
        }
        return found | {name: asked[name] for name in _ECHOED if asked.get(name) is not None}

    def _counted(self) -> dict[str, Any] | None:
        usage = self._usage
        read, drawn = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(read, int) or not isinstance(drawn, int):
            return None
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + drawn,
        }
