"""Options of requests: which of them each engine honors; others are refused by name.

An engine leaves out what it does not know, without a word. A client that asked for ten tokens at
least, and gets three, cannot tell that from the model's own choice. So an option must be honored by
every upstream of the gateway: which of them answers is the gateway's choice, and answers of both
arms look alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deltawire.live.gateway.engine_tokens import MAX_TOKENS
from deltawire.serving.errors import RequestError

_EVERYWHERE = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "n", "stop", "seed"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "logprobs"),
        *("tools", "tool_choice", "user", "safety_identifier"),
    }
)
_PENALTIES = frozenset({"presence_penalty", "frequency_penalty", "logit_bias"})
_BOTH_SERVERS = _PENALTIES | {
    *("top_k", "min_p", "repetition_penalty", "top_logprobs", "response_format"),
    *("reasoning_effort", "parallel_tool_calls", "ignore_eos", "min_tokens", "stop_token_ids"),
    *("skip_special_tokens", "continue_final_message", "chat_template_kwargs"),
    *("return_token_ids", "echo", "cache_salt"),
}
HONORED: Mapping[str, frozenset[str]] = {
    "vllm": _BOTH_SERVERS
    | {
        *("structured_outputs", "allowed_token_ids", "bad_words", "use_beam_search"),
        *("length_penalty", "include_stop_str_in_output", "spaces_between_special_tokens"),
        *("truncate_prompt_tokens", "prompt_logprobs", "include_reasoning", "documents"),
        *("add_generation_prompt", "add_special_tokens", "chat_template", "mm_processor_kwargs"),
        *("return_tokens_as_token_ids", "thinking_token_budget"),
    },
    "sglang": _BOTH_SERVERS
    | {
        *("regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim"),
        *("separate_reasoning", "stream_reasoning"),
    },
    "embedded": frozenset(
        {
            *("top_k", "min_p", "chat_template_kwargs", "return_token_ids"),
            *("n_adaptive", "max_thinking_tokens", "reasoning_effort"),
        }
    ),
    "openai": _PENALTIES
    | {"top_logprobs", "response_format", "reasoning_effort"}
    | {"parallel_tool_calls", "verbosity"},
}
"""The options that each engine honors, besides those of `_EVERYWHERE`. Left out on purpose are
those by which a client would choose weights, code or places of a replica."""
CHANGE_TOKENS: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None, {}),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
    "logits_processors": (None, []),
    "best_of": (None, 1),
}
"""Options that change which tokens are drawn, and the values with which they do not."""
_MEANINGLESS: Mapping[str, tuple[Any, ...]] = {
    **CHANGE_TOKENS,
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "top_logprobs": (None, 0),
    "parallel_tool_calls": (None, True),
    "return_token_ids": (None, False),
    "store": (None, False),
    "metadata": (None, {}),
    "echo": (None, False),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "functions": (None, []),
    "suffix": (None, ""),
    "stop_token_ids": (None, []),
    "skip_special_tokens": (None, True),
    "chat_template_kwargs": (None, {}),
}
"""Values with which an option asks for nothing."""
UPSTREAM = "openai"
"""The engine of other providers' models."""
SENT_UPSTREAM = (_EVERYWHERE | HONORED[UPSTREAM]) - {"user", "safety_identifier"}
"""The options that another provider gets."""
_HINTS = frozenset({"prompt_cache_key"})
"""Options that promise nothing."""
_INSTEAD = {
    "guided_json": "response_format",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "functions": "tools",
    "function_call": "tool_choice",
    "metadata": "the header x-deltawire-task, and members of reports",
}


MOST_ANSWERS = 128
"""Answers to one request, at most, as at OpenAI's API."""
MAX_CHOICES = 2048
"""Choices of a completion with several prompts, at most."""
_WHOLE = {
    "n": (1, MOST_ANSWERS),
    "max_tokens": (1, MAX_TOKENS),
    "max_completion_tokens": (1, MAX_TOKENS),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
"""Options that are whole numbers, and their ranges."""
_REAL = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def check_option_values(body: Mapping[str, Any], *, chat: bool = True) -> None:
    """Raises `RequestError` for a value of another type or range than OpenAI's API takes, where a
    replica could answer in a form that was not asked for, or fail: its arm would be blamed. A
    completion with ``echo`` may ask for no token: it scores its prompt."""
    for name, (least, most) in _WHOLE.items():
        value = body.get(name)
        if value is None:
            continue
        scores = name == "max_tokens" and not chat and body.get("echo") is True
        lowest = 0 if scores else least
        check_integer(name, value, lowest, most)
    for name in _REAL:
        value = body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise _invalid(name, "a number", "invalid_type")
    if not isinstance(body.get("stream"), bool | None):
        raise _invalid("stream", "true or false", "invalid_type")


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Raises `RequestError` for a value that is no whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid(name, "an integer", "invalid_type")
    if not least <= value <= most:
        raise _invalid(name, f"an integer from {least} to {most}", "invalid_value")


def check_choice_count(choices: int) -> None:
    """Raises `RequestError` for more choices than `MAX_CHOICES`: ``n`` for each prompt of a
    completion."""
    if choices > MAX_CHOICES:
        raise RequestError(
            f"the request asks for {choices} completions; the limit is {MAX_CHOICES}",
            hint="send the prompts in several requests",
            code="invalid_value",
            param="prompt",
        )


def _invalid(name: str, wanted: str, code: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}", code=code, param=name)


def refuse_options(body: Mapping[str, Any], engines: Collection[str]) -> None:
    """Raises `RequestError` for the first option that one of the engines would not honor. Without
    an engine nothing is known, and nothing refused: no replica takes the request."""
    if not engines:
        return
    honored = _EVERYWHERE | frozenset.intersection(*(honored_by(one) for one in engines))
    for name, value in body.items():
        if name in honored or name in _HINTS or value is None:
            continue
        if any(value == one for one in _MEANINGLESS.get(name, ())):
            continue
        known = name in _MEANINGLESS or any(name in one for one in HONORED.values())
        instead = _INSTEAD.get(name, "")
        raise RequestError(
            f"{name[:64]} is not honored by every server of this model"
            if known
            else f"unknown option {name[:64]}",
            hint=f"use {instead}" if instead else "leave it out",
            code="unsupported_parameter" if known else "unknown_parameter",
            param=name[:64],
        )


def honored_by(engine: str) -> frozenset[str]:
    """Returns the options that an engine honors; one that does not say what it is counts as
    vLLM."""
    return _EVERYWHERE | HONORED.get(engine or "vllm", frozenset())
