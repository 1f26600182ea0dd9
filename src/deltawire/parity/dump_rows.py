"""Reads dumps of sampled tokens and their log-probabilities, in the formats of other frameworks.

Each line of a dump is a JSON object of one sequence. `FORMATS` lists the members that each
framework gives them; the first format whose tokens and log-probabilities a row has is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

MAX_LINE_BYTES = 32 << 20
MAX_ROWS = 100_000
MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class DumpFormat:
    """The members of one framework's rows; several names are tried in order."""

    prompt: tuple[str, ...]
    tokens: tuple[str, ...]
    logprobs: tuple[str, ...]
    mask: tuple[str, ...]


FORMATS = {
    "prime-rl": DumpFormat(
        ("prompt_ids",), ("completion_ids",), ("completion_logprobs",), ("completion_mask",)
    ),
    "trl": DumpFormat(
        ("prompt_ids",),
        ("completion_ids",),
        ("sampling_per_token_logps", "old_per_token_logps", "logprobs"),
        ("completion_mask", "env_mask", "tool_mask"),
    ),
    "verl": DumpFormat(
        ("prompts",),
        ("responses",),
        ("rollout_log_probs", "old_log_probs"),
        ("response_mask",),
    ),
    "deltawire": DumpFormat(("prompt",), ("tokens",), ("logprobs",), ("mask",)),
}
"""Formats by the name of their framework."""

_TEXT = ("text", "completion", "response", "output")


@dataclass(frozen=True)
class DumpRow:
    """One sequence: token ids, log-probabilities float64[T] (NaN where there is none), the mask of
    the tokens that count, the temperature (None if the row has none), and the answer's text."""

    number: int
    format: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float64]
    mask: NDArray[np.bool_]
    temperature: float | None = None
    version: int | None = None
    text: str | None = None


def read_dump(path: Path) -> Iterator[DumpRow]:
    """Yields the rows of a file. Raises `InputError` that names the line for one that is damaged,
    too long, or of no known format, and for a file without rows."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if not line.strip():
                    continue
                number += 1
                if len(line) > MAX_LINE_BYTES or number > MAX_ROWS:
                    raise InputError(
                        f"{path} has a line of more than {MAX_LINE_BYTES} bytes, or more than "
                        f"{MAX_ROWS} lines"
                    )
                yield parse_row(line, number, f"{path}, line {number}")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not number:
        raise InputError(f"{path} has no rows")


def parse_row(line: bytes, number: int, where: str) -> DumpRow:
    """Parses one row; raises `InputError`."""
    try:
        members = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{where} is no JSON object: is the file cut off?") from error
    for name, one in FORMATS.items():
        tokens, logprobs = _first(members, one.tokens), _first(members, one.logprobs)
        if tokens is not None and logprobs is not None:
            return _row(members, name, one, number, where)
    raise InputError(
        f"{where} has no tokens and log-probabilities of a known format",
        hint=f"known are the members of {', '.join(FORMATS)}; docs/PARITY.md lists them",
    )


def _row(members: dict[str, Any], name: str, one: DumpFormat, number: int, where: str) -> DumpRow:
    prompt = _ids(_first(members, one.prompt) or [], where)
    tokens = _ids(_first(members, one.tokens), where)
    logprobs = _numbers(_first(members, one.logprobs), where)
    given = _first(members, one.mask)
    mask = np.ones(len(tokens), np.bool_) if given is None else _numbers(given, where) > 0
    if name == "verl" and "attention_mask" in members:
        prompt, tokens, logprobs, mask = _unpadded(
            prompt, tokens, logprobs, mask, _numbers(members["attention_mask"], where), where
        )
    text = _first(members, _TEXT)
    temperature = members.get("temperature")
    if isinstance(temperature, int | float) and not 0 < temperature < 1000:
        raise InputError(f"{where} has the temperature {temperature}")
    version = members.get("version")
    return DumpRow(
        number,
        name,
        prompt,
        tokens,
        logprobs,
        mask,
        float(temperature) if isinstance(temperature, int | float) else None,
        version if isinstance(version, int) else None,
        text if isinstance(text, str) else None,
    )


def _unpadded(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    logprobs: NDArray[np.float64],
    mask: NDArray[np.bool_],
    attention: NDArray[np.float64],
    where: str,
) -> tuple[tuple[int, ...], tuple[int, ...], NDArray[np.float64], NDArray[np.bool_]]:
    """Removes verl's padding: before the prompt, and after the response."""
    if len(attention) != len(prompt) + len(tokens) or len(tokens) != len(logprobs):
        raise InputError(f"{where} has an attention_mask of another length than its tokens")
    before, after = attention[: len(prompt)] > 0, attention[len(prompt) :] > 0
    kept = int(after.sum())
    prompt = tuple(token for token, real in zip(prompt, before, strict=True) if real)
    return prompt, tokens[:kept], logprobs[:kept], mask[:kept]


def _first(members: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((members[name] for name in names if members.get(name) is not None), None)


def _ids(values: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > MAX_TOKENS
        or not all(type(one) is int and 0 <= one < 1 << 31 for one in values)
    ):
        raise InputError(f"{where} has no list of token ids where one is expected")
    return tuple(values)


def _numbers(values: Any, where: str) -> NDArray[np.float64]:
    numbers = (int, float, type(None))
    if (
        not isinstance(values, list)
        or len(values) > MAX_TOKENS
        or not all(isinstance(one, numbers) for one in values)
    ):
        raise InputError(f"{where} has no list of numbers where one is expected")
    try:
        return np.array([math.nan if one is None else float(one) for one in values], np.float64)
    except OverflowError as error:  # JSON's integers have no limit.
        raise InputError(f"{where} has an integer that is too large for a number") from error
