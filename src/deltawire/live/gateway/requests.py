"""Requests: reads what a client asks for, and adds what receipts and captures need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from deltawire.chat.requests import RequestDefaults
from deltawire.errors import InputError
from deltawire.live.gateway.options import CHANGE_TOKENS, SENT_UPSTREAM, UPSTREAM
from deltawire.live.gateway.texts import RequestTexts, content_text, texts_of


@dataclass
class AskedAnswer:
    """A request for an answer, as far as the gateway understands it.

    ``body`` is what the replica gets. ``temperature`` and ``truncated`` are as in
    `deltawire.wire.captures.Capture`. ``asked`` is the last message of the user. ``turn`` counts
    earlier answers, ``quoted`` is the last of them. ``given`` is the client's own body.
    """

    body: dict[str, Any]
    given: dict[str, Any]
    chat: bool
    stream: bool = False
    ids: bool = False
    logprobs: bool = False
    temperature: float = 1.0
    truncated: bool = False
    user: str = ""
    asked: str = ""
    opening: str = ""
    quoted: str | None = None
    turn: int = 0

    @property
    def _stream_options(self) -> dict[str, Any]:
        found = self.given.get("stream_options")
        return found if isinstance(found, dict) else {}

    @property
    def wants_usage(self) -> bool:
        """Returns whether the client asked for the count of tokens in a stream."""
        return bool(self._stream_options.get("include_usage"))

    @property
    def choices(self) -> int:
        """Returns how many choices the answer may have: ``n`` for each prompt."""
        prompt = self.given.get("prompt")
        prompts = prompt if isinstance(prompt, list) else []
        one = not prompts or isinstance(prompts[0], int)
        return _count_in(self.given, "n") * (1 if one else len(prompts))

    @property
    def tokens(self) -> int:
        """Returns how many tokens the answer may have; `UNSAID_TOKENS` a choice if the client does
        not say."""
        names = ("max_completion_tokens", "max_tokens")
        most = next((name for name in names if self.given.get(name) is not None), "")
        return self.choices * (_count_in(self.given, most) if most else UNSAID_TOKENS)

    def texts(self) -> RequestTexts:
        """Returns all texts of the request, for redaction."""
        return texts_of(self.given, chat=self.chat)

    def for_replica(self, *, capture: bool, engine: str = "", model: str = "") -> bytes:
        """Returns the body for a replica by the names of its ``engine``, which calls the model
        ``model``; with ``capture`` it asks for tokens too."""
        if engine == UPSTREAM:
            # The run's settings are those of its own policy, and users' names stay here.
            body = {n: v for n, v in self.given.items() if n in SENT_UPSTREAM and v is not None}
            if self.stream:  # Guardrails and quotas need the count of tokens.
                body["stream_options"] = {**self._stream_options, "include_usage": True}
            return msgspec.json.encode({**body, "model": model})
        body = dict(self.body)
        if model:
            body["model"] = model
        wanted = capture or self.ids
        body.pop("return_token_ids", None)
        if wanted:
            body |= _TOKENS_OF_SGLANG if engine == "sglang" and self.chat else _TOKENS
        if capture and not self.logprobs:
            body["logprobs"] = True if self.chat else 0
        return msgspec.json.encode(body)


def _count_in(body: dict[str, Any], name: str) -> int:
    found = body.get(name)
    return found if isinstance(found, int) and found >= 0 else 1


UNSAID_TOKENS = 1000
_TOKENS = {"return_token_ids": True}
_TOKENS_OF_SGLANG = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
"""SGLang's chat endpoint states tokens under other names, and refuses those of vLLM for streams."""


def decode_body(data: bytes) -> dict[str, Any]:
    """Decodes a request; raises `InputError` for a body that is not a JSON object, also one that a
    replica's more tolerant parser would take: its answer would have no receipt."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(
            f"the request is no JSON: {error}"[:300], hint="numbers are finite, text is UTF-8"
        ) from error
    if not isinstance(body, dict):
        raise InputError("the request is not a JSON object")
    return body


def read_asked(body: dict[str, Any], *, chat: bool, defaults: RequestDefaults) -> AskedAnswer:
    """Reads a request, and adds the run's settings to it."""
    truncated = any(body.get(name) not in fine for name, fine in CHANGE_TOKENS.items())
    for name, value in defaults.sampling().items():
        own = body.get(name)
        if name != "temperature" and own not in (None, value) and (name, own) != ("top_k", -1):
            truncated = True
    filled = defaults.filled_in(body, chat=chat)
    temperature = filled["temperature"]
    asked = AskedAnswer(
        filled,
        body,
        chat,
        stream=bool(body.get("stream")),
        ids=bool(body.get("return_token_ids")),
        logprobs=bool(body.get("logprobs")) if chat else body.get("logprobs") is not None,
        temperature=float(temperature) if isinstance(temperature, int | float) else -1.0,
        truncated=truncated,
        user=str(body.get("safety_identifier") or body.get("user") or ""),
    )
    if chat:
        _read_messages(asked, body.get("messages"))
    else:
        prompt = body.get("prompt")
        asked.asked = asked.opening = prompt if isinstance(prompt, str) else ""
    return asked


def _read_messages(asked: AskedAnswer, messages: Any) -> None:
    if not isinstance(messages, list):
        return
    for message in messages:
        if not isinstance(message, dict):
            continue
        text = content_text(message.get("content")).shown
        if message.get("role") == "assistant":
            asked.turn += 1
            asked.quoted = text
        elif message.get("role") == "user":
            asked.opening = asked.opening or text
            asked.asked = text
