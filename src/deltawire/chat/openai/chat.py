"""Parses requests to OpenAI's endpoints, as far as an engine here can serve them.

Options that would change which tokens are drawn, and cannot be honored, are refused instead of
ignored: a ``response_format`` other than text would need a grammar, and log-probabilities under it.
The server decides temperature and the like; see `deltawire.chat.openai.endpoint`.

``tool_choice``: with ``auto`` the model may call a tool; with ``none`` its output is returned as
text; ``required``, or a named tool, begins its answer with the beginning of a call, which is not
part of what it drew. The tools stay in the prompt in each case, so that a conversation continues
after the tokens that were drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.chat.openai.adaptive import MAX_ANSWERS, AdaptiveSampling
from deltawire.engines.base import Sampling, Truncation, top_k_of
from deltawire.errors import InputError
from deltawire.wire.objects import prepared

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_CHOICES = MAX_ANSWERS
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256

_Name = Annotated[str, Meta(max_length=256)]


class _Function(msgspec.Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str = "{}"


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"
    id: _Name = ""


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | Annotated[list[_Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: _Name | None = None
    tool_call_id: _Name | None = None
    tool_calls: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


_Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]


class _Request(msgspec.Struct, kw_only=True):
    model: _Name = ""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    return_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: _Choices | None = 1
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    response_format: dict[str, Any] | None = None
    echo: bool | None = False
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    stop_token_ids: Any = None
    use_beam_search: Any = None
    typical_p: Any = None
    logits_processors: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    n_adaptive: _Choices | AdaptiveSampling | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=1)] | None = None
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None


class _ChatRequest(_Request, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


class _CompletionRequest(_Request, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request. For completions ``prompt`` is set and ``messages`` empty.

    ``calls`` says whether calls are parsed; ``forced`` that the answer begins with a call of the
    tool ``forced``, or of any tool if that is empty. ``max_thinking`` and ``effort`` ask for a
    budget of thinking. ``top_p``, ``top_k`` and ``min_p`` are what the client asks for; None leaves
    it to the server. ``variables`` are those of the chat template, and ``ids`` asks for the tokens
    of prompt and answer.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] = ""
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ids: bool = False
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    choices: int = 1
    stops: tuple[str, ...] = ()
    calls: bool = False
    forced: str | None = None
    max_thinking: int | None = None
    effort: str = ""
    adaptive: AdaptiveSampling | None = None
    """Draw several answers and return one of them."""

    @property
    def most(self) -> int:
        """The most answers that may be drawn."""
        return self.choices if self.adaptive is None else self.adaptive.n_max

    def truncated(self, default: Truncation) -> Truncation:
        """Returns what the client asks for, with the ``default`` for the rest."""
        return Truncation(
            default.top_p if self.top_p is None else self.top_p,
            default.top_k if self.top_k is None else top_k_of(self.top_k),
            default.min_p if self.min_p is None else self.min_p,
        )


def read_chat(data: bytes) -> ChatRequest:
    """Parses ``POST /v1/chat/completions``; raises `InputError`."""
    raw = _decode(data, _ChatRequest)
    tools = tuple(map(_tool, raw.tools or ()))
    if raw.top_logprobs:
        raise InputError(
            "top_logprobs is not supported here: only tokens that were drawn have a "
            "log-probability",
            hint="leave out top_logprobs",
        )
    return ChatRequest(
        messages=tuple(map(_message, raw.messages)),
        tools=tools,
        calls=bool(tools) and raw.tool_choice != "none",
        forced=_forced(raw.tool_choice, tools),
        logprobs=bool(raw.logprobs),
        **_shared(raw),
    )


def read_completion(data: bytes) -> ChatRequest:
    """Parses ``POST /v1/completions``; raises `InputError`."""
    raw = _decode(data, _CompletionRequest)
    prompt: Any = raw.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InputError("one prompt per request")
        prompt = prompt[0]
    if raw.echo:
        raise InputError("echo is not served here")
    if isinstance(prompt, list):
        if not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in prompt):
            raise InputError("the prompt is not a list of tokens")
        prompt = tuple(prompt)
    if not prompt:
        raise InputError("the prompt is empty")
    return ChatRequest(prompt=prompt, logprobs=raw.logprobs is not None, **_shared(raw))


_NEUTRAL: dict[str, tuple[Any, str]] = {
    "logit_bias": ({}, "biases change which tokens are drawn"),
    "presence_penalty": (0.0, "penalties change which tokens are drawn"),
    "frequency_penalty": (0.0, "penalties change which tokens are drawn"),
    "repetition_penalty": (1.0, "penalties change which tokens are drawn"),
    "guided_json": (None, "nothing holds the model to a grammar"),
    "guided_regex": (None, "nothing holds the model to a grammar"),
    "guided_choice": (None, "nothing holds the model to a grammar"),
    "guided_grammar": (None, "nothing holds the model to a grammar"),
    "structured_outputs": (None, "nothing holds the model to a grammar"),
    "min_tokens": (0, "an answer ends where the model ends it"),
    "ignore_eos": (False, "an answer ends where the model ends it"),
    "bad_words": ([], "forbidden words change which tokens are drawn"),
    "allowed_token_ids": ([], "forbidden tokens change which tokens are drawn"),
    "stop_token_ids": ([], "an answer ends at texts only"),
    "use_beam_search": (False, "answers are sampled"),
    "typical_p": (1.0, "it changes which tokens are drawn"),
    "logits_processors": ([], "a client chooses no code"),
}
"""Options that cannot be honored, the value with which they do nothing, and why not."""


def _shared(raw: _Request) -> dict[str, Any]:
    for name, (neutral, reason) in _NEUTRAL.items():
        if getattr(raw, name) not in (None, neutral):
            raise InputError(f"{name} is not supported here: {reason}", hint=f"leave out {name}")
    if raw.response_format and raw.response_format.get("type") != "text":
        raise InputError(
            "response_format can only be text here: nothing holds the model to a grammar",
            hint="describe the form of the answer in the prompt",
        )
    _check_sampling(raw)
    stops = [raw.stop] if isinstance(raw.stop, str) else raw.stop or []
    adaptive = raw.n_adaptive
    if isinstance(adaptive, int):
        adaptive = AdaptiveSampling(n_max=adaptive)
    if adaptive is not None and (raw.n or 1) > 1:
        raise InputError(
            "n_adaptive returns one answer, and the request has n above 1",
            hint="leave out n, or leave out n_adaptive",
        )
    return {
        "adaptive": adaptive,
        "choices": raw.n or 1,
        "stops": tuple(stops),
        "max_tokens": raw.max_completion_tokens or raw.max_tokens,
        "model": raw.model,
        "seed": raw.seed,
        "temperature": raw.temperature,
        "top_p": raw.top_p,
        "top_k": raw.top_k,
        "min_p": raw.min_p,
        "variables": raw.chat_template_kwargs or {},
        "ids": bool(raw.return_token_ids),
        "max_thinking": raw.max_thinking_tokens,
        "effort": raw.reasoning_effort or "",
        "stream": bool(raw.stream),
        "usage": bool(raw.stream_options and raw.stream_options.include_usage),
    }


def _check_sampling(raw: _Request) -> None:
    """Raises `InputError` for settings that mean nothing, also where the server's are used."""
    truncation = Truncation(
        1.0 if raw.top_p is None else raw.top_p,
        0 if raw.top_k is None else top_k_of(raw.top_k),
        0.0 if raw.min_p is None else raw.min_p,
    )
    Sampling(1, 1.0 if raw.temperature is None else raw.temperature, truncation, raw.seed)


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"the request cannot be parsed: {error}"[:500]) from error


def _forced(choice: Any, tools: Sequence[Tool]) -> str | None:
    """The tool that must be called, empty for any; None if no call is required."""
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise InputError("tool_choice requires a call, and the request has no tools")
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise InputError("tool_choice can be auto, none, required or a function's name here")
    if name not in {tool.name for tool in tools}:
        raise InputError(f"tool_choice names {name[:64]!r}, which is not among the tools")
    return name


def _tool(raw: _Tool) -> Tool:
    function = raw.function
    empty = {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", function.parameters or empty)


def _message(raw: _Message) -> Message:
    content = raw.content or ""
    if not isinstance(content, str):
        if odd := [part.type for part in content if part.type != "text"]:
            raise InputError(f"content of type {odd[0][:40]} is not served here")
        content = "".join(part.text for part in content)
    role = "system" if raw.role == "developer" else raw.role
    if role not in ("system", "user", "assistant", "tool"):
        raise InputError(f"unknown role {raw.role[:40]!r}")
    calls = tuple(_call(call) for call in raw.tool_calls or ())
    return Message(role, content, raw.name or "", raw.tool_call_id or "", calls)  # type: ignore[arg-type]


def _call(raw: _Tool) -> ToolCall:
    try:
        arguments = json.loads(raw.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"the arguments of a call of {raw.function.name} are not JSON") from error
    if not isinstance(arguments, dict):
        raise InputError(f"the arguments of a call of {raw.function.name} are not an object")
    return ToolCall(raw.function.name, arguments, raw.id)


def spell_calls(calls: tuple[ToolCall, ...]) -> list[dict[str, Any]]:
    """Calls in the form of an answer."""
    return [
        {
            "id": call.identity,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
