"""Reads dumps of sampled tokens and their log-probabilities, in the formats of other frameworks.

Each line of a dump is a JSON object of one sequence. `FORMATS` lists the members that each
framework gives them; the first format whose tokens and log-probabilities a row has is taken.
"""

from __future__ import annotations

import json
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
    """The members of one framework's rows; several names are tried in order, but a token counts
    only if all masks of a row say so. ``padding`` is a mask of the prompt's real tokens. Without a
    ``prompt``, one list holds everything, and the mask selects what was sampled."""

    prompt: tuple[str, ...]
    tokens: tuple[str, ...]
    logprobs: tuple[str, ...]
    mask: tuple[str, ...]
    temperature: str = "temperature"
    padding: str = ""


FORMATS = {
    "prime-rl": DumpFormat(
        ("prompt_ids",), ("completion_ids",), ("completion_logprobs",), ("completion_mask",)
    ),
    "trl": DumpFormat(
        ("prompt_ids",),
        ("completion_ids",),
        ("sampling_per_token_logps", "old_per_token_logps", "logprobs"),
        ("completion_mask", "env_mask", "tool_mask"),
        padding="prompt_mask",
    ),
    "verl": DumpFormat(
        ("prompts",),
        ("responses",),
        ("rollout_log_probs", "old_log_probs"),
        ("response_mask",),
    ),
    "deltawire": DumpFormat(("prompt",), ("tokens",), ("logprobs",), ("mask",)),
    "prime-rl samples": DumpFormat((), ("token_ids",), ("logprobs",), ("mask",), "temperatures"),
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
    number = lines = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                lines += 1
                if not line.strip():
                    continue
                number += 1
                where = f"{path}, line {lines}"
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{where} has more than {MAX_LINE_BYTES} bytes")
                if number > MAX_ROWS:
                    raise InputError(f"{path} has more than {MAX_ROWS} rows")
                yield parse_row(line, number, where)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not number:
        raise InputError(f"{path} has no rows")


def parse_row(line: bytes, number: int, where: str) -> DumpRow:
    """Parses one row; raises `InputError`."""
    members = _members(line, where)
    for name, one in FORMATS.items():
        tokens, logprobs = _first(members, one.tokens), _first(members, one.logprobs)
        if tokens is not None and logprobs is not None:
            return _row(members, name, one, number, where)
    raise InputError(
        f"{where} has no tokens and log-probabilities of a known format",
        hint=f"known are the members of {', '.join(FORMATS)}; docs/PARITY.md lists them",
    )


def _members(line: bytes, where: str) -> dict[str, Any]:
    """Decodes one object. Python writes NaN and Infinity, which JSON does not have."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if b"NaN" in line or b"Infinity" in line:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):  # It has other faults too.
                found = None
            if isinstance(found, dict):
                return found
        raise InputError(
            f"{where} is no JSON object: is the file cut off?",
            hint="each line is one sequence as a JSON object in UTF-8, not compressed",
        ) from error


def _row(members: dict[str, Any], name: str, one: DumpFormat, number: int, where: str) -> DumpRow:
    tokens = _ids(*_member(members, one.tokens), where)
    logprobs = _numbers(*_member(members, one.logprobs), where)
    mask = _mask(members, one, len(tokens), where)
    if one.prompt:
        if _first(members, one.prompt) is None:
            raise InputError(f"{where} has no {one.prompt[0]}, and the tokens follow it")
        prompt = _ids(*_member(members, one.prompt), where)
    else:
        prompt, tokens, logprobs, mask = _divided(tokens, logprobs, mask)
    if name == "verl" and "attention_mask" in members:
        attention = _numbers("attention_mask", members["attention_mask"], where)
        prompt, tokens, logprobs, mask = _unpadded(prompt, tokens, logprobs, mask, attention, where)
    if one.padding and members.get(one.padding) is not None:
        prompt = _real(prompt, _numbers(one.padding, members[one.padding], where), one, where)
    if not prompt and len(tokens) == len(logprobs) == len(mask):
        # Without a prompt, the first token serves as the prompt.
        prompt, tokens, logprobs, mask = tokens[:1], tokens[1:], logprobs[1:], mask[1:]
    text, version = _first(members, _TEXT), members.get("version")
    return DumpRow(
        number,
        name,
        prompt,
        tokens,
        logprobs,
        mask,
        _temperature(members.get(one.temperature), where),
        version if isinstance(version, int) else None,
        text if isinstance(text, str) else None,
    )


def _mask(members: dict[str, Any], one: DumpFormat, count: int, where: str) -> NDArray[np.bool_]:
    """Returns the tokens that all masks of a row select; all tokens if it has none."""
    given = [name for name in one.mask if members.get(name) is not None]
    masks = [_numbers(name, members[name], where) > 0 for name in given]
    if len({len(mask) for mask in masks}) > 1:
        raise InputError(f"{where} has masks of different lengths: {', '.join(given)}")
    found: NDArray[np.bool_] = np.logical_and.reduce(masks) if masks else np.ones(count, np.bool_)
    return found


def _temperature(given: Any, where: str) -> float | None:
    """Returns a row's temperature, which may be stated token by token; None if it has none."""
    if isinstance(given, list):
        stated = {float(one) for one in _numbers("temperatures", given, where)}
        if len(stated) > 1:
            raise InputError(f"{where} has several temperatures, such as {sorted(stated)[:2]}")
        given = next(iter(stated), None)
    if given is None:
        return None
    if type(given) not in (int, float):
        raise InputError(f"{where} has a temperature that is no number")
    if not 0 < given < 1000:
        raise InputError(
            f"{where} has the temperature {str(given)[:32]}",
            hint="leave it out for greedy answers whose log-probabilities are the model's own",
        )
    return float(given)


def _divided(
    tokens: tuple[int, ...], logprobs: NDArray[np.float64], mask: NDArray[np.bool_]
) -> tuple[tuple[int, ...], tuple[int, ...], NDArray[np.float64], NDArray[np.bool_]]:
    """Divides one list of everything before the first token that was sampled."""
    if not len(tokens) == len(logprobs) == len(mask):
        return (), tokens, logprobs, mask
    first = int(mask.argmax()) if mask.any() else len(tokens)
    return tokens[:first], tokens[first:], logprobs[first:], mask[first:]


def _real(
    prompt: tuple[int, ...], padding: NDArray[np.float64], one: DumpFormat, where: str
) -> tuple[int, ...]:
    """Returns a prompt without its padding."""
    if len(padding) != len(prompt):
        raise InputError(f"{where} has a {one.padding} of another length than its prompt")
    return tuple(token for token, real in zip(prompt, padding > 0, strict=True) if real)


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


def _member(members: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Returns the first member that is there, with its name."""
    return next((name, members[name]) for name in names if members.get(name) is not None)


def _ids(name: str, values: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > MAX_TOKENS
        or not all(type(one) is int and 0 <= one < 1 << 31 for one in values)
    ):
        raise InputError(f"{where} has no list of at most {MAX_TOKENS} token ids as {name}")
    return tuple(values)


def _numbers(name: str, values: Any, where: str) -> NDArray[np.float64]:
    """Returns numbers, NaN for null. vLLM gives each token a list, of the one that was sampled."""
    numbers = (int, float, type(None))
    if isinstance(values, list) and values and isinstance(values[0], list):
        values = [one[0] if isinstance(one, list) and len(one) == 1 else "" for one in values]
    if (
        not isinstance(values, list)
        or len(values) > MAX_TOKENS
        or not all(isinstance(one, numbers) for one in values)
    ):
        raise InputError(f"{where} has no list of at most {MAX_TOKENS} numbers as {name}")
    try:
        return np.array([math.nan if one is None else float(one) for one in values], np.float64)
    except OverflowError as error:  # JSON's integers have no limit.
        raise InputError(f"{where} has an integer that is too large for a number") from error
