"""Asks an OpenAI completions endpoint for log-probabilities of given and of drawn tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from deltawire.attest.requests import send
from deltawire.errors import CorruptError, InputError
from deltawire.launch.black_box.judging import Floats
from deltawire.wire.objects import prepared

MAX_ANSWER_BYTES = 16 << 20
MAX_TOKENS = 1 << 16

T = TypeVar("T")

HINT = "the endpoint must serve /v1/completions with echo and logprobs"

LEAST, MOST = -1e6, 1e-3
"""The log-probabilities that a model can give, with room for rounding."""

UNPROCESSED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The settings that leave a model's distribution as it is. A server's own defaults may not."""


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: Annotated[list[float | None], Meta(max_length=MAX_TOKENS)]


class _Choice(msgspec.Struct):
    logprobs: _TokenLogprobs | None = None
    token_ids: Annotated[list[int], Meta(max_length=MAX_TOKENS)] | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=16)]


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(max_length=4096)]


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], Meta(min_length=1, max_length=4096)]


class HttpEndpoint:
    """The model ``model`` of the server at ``url``, its first one if that is empty.

    Raises `InputError` for a server that refuses or has no such call, `RetryError` for one that
    does not answer, `CorruptError` for an answer that cannot be read.
    """

    def __init__(self, url: str, *, model: str = "", token: str = "") -> None:
        self.url = url.rstrip("/")
        self._token = token
        self.model = model or self._ask("/v1/models", None, _Models).data[0].id

    def forced(self, tokens: Sequence[int]) -> Floats:
        """See `deltawire.launch.black_box.judging.ScoredEndpoint`."""
        choice = self._complete(list(tokens), max_tokens=1, echo=True)
        return self._values(choice, len(tokens))[1:]

    def drawn(self, prompt: Sequence[int], count: int) -> tuple[list[int], Floats] | None:
        """See `deltawire.launch.black_box.judging.ScoredEndpoint`."""
        choice = self._complete(list(prompt), max_tokens=count, return_token_ids=True)
        if not choice.token_ids:
            return None
        return choice.token_ids, self._values(choice, len(choice.token_ids), first=True)

    def _complete(self, prompt: list[int], **options: Any) -> _Choice:
        body = {"model": self.model, "prompt": prompt, "logprobs": 1, **UNPROCESSED}
        answer = self._ask("/v1/completions", body | options, _Completion)
        return answer.choices[0]

    def _values(self, choice: _Choice, count: int, *, first: bool = False) -> Floats:
        given = [] if choice.logprobs is None else choice.logprobs.token_logprobs[:count]
        if len(given) < count:
            raise InputError(
                f"{self.url} gives {len(given)} log-probabilities for {count} tokens", hint=HINT
            )
        values = np.array([np.nan if value is None else value for value in given], np.float64)
        counted = values[0 if first else 1 :]
        if not ((counted >= LEAST) & (counted <= MOST)).all():
            raise CorruptError(f"{self.url} gives log-probabilities that are none", hint=HINT)
        return values

    def _ask(self, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        data = send(
            self.url + path,
            limit=MAX_ANSWER_BYTES,
            token=self._token,
            body=None if body is None else json.dumps(body).encode(),
            hint=HINT,
        )
        try:
            return msgspec.json.decode(data, type=prepared(kind))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(
                f"the answer of {self.url}{path} cannot be read: {str(error)[:200]}", hint=HINT
            ) from error
