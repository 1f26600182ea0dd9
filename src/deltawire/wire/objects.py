"""Encode and decode typed JSON and MessagePack objects from untrusted storage."""

from __future__ import annotations

import json
import math
import re
import threading
from typing import Any, TypeVar

import msgspec

from deltawire.errors import CorruptError

T = TypeVar("T", bound=msgspec.Struct)
K = TypeVar("K")

FORMAT = 1
MAX_DEPTH = 128
"""The most levels of arrays and objects in a sealed object, the object itself included."""

_FINITE_DIGITS = 300
"""Every integer of so few digits is below the largest float, about 1.8e308."""
_NO_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^\[\]{}"]++')
_PAIR = re.compile(r"\[\]|\{\}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")


class _Format(msgspec.Struct):
    format: int


_PREPARED: set[Any] = set()
_PREPARING = threading.Lock()


def prepared(kind: K) -> K:
    """Returns ``kind``, which threads may decode at once from now on.

    msgspec describes a type to itself at its first use. In 0.22 a second thread that uses the type
    meanwhile reads a description that is half made, and the process dies of a segmentation fault
    (`tests/unit/wire/test_prepared_types.py`). So every type that several threads may be first to
    decode is described here, one at a time.
    """
    if kind not in _PREPARED:
        with _PREPARING:
            msgspec.json.Decoder(kind)
            _PREPARED.add(kind)
    return kind


def encode_json(value: msgspec.Struct) -> bytes:
    """Encodes as one line of JSON that ends in a newline."""
    return msgspec.json.encode(value) + b"\n"


def decode_json(data: bytes, kind: type[T], *, run: str, key: str, what: str = "") -> T:
    """Decodes and checks an object, called ``what`` in messages; raises `CorruptError` naming run
    and key.
    """
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, what or kind.__name__.lower(), run, key) from error


def check_members(data: bytes, what: str, *, run: str, key: str) -> None:
    """Raises `CorruptError` for JSON without a ``format``, with one that this release does not
    read, or with a repeated member, of which readers would take different ones.
    """
    found = decode_json(data, _Format, run=run, key=key, what=what).format
    if found != FORMAT:
        raise CorruptError(
            f"{what}: format {found}; this deltawire reads format {FORMAT}",
            hint="it was written by a newer deltawire: upgrade this one",
            run=run,
            key=key,
        )
    try:
        text = data.decode()
        _check_depth(text)
        _check_surrogates(text)
        json.loads(
            text, object_pairs_hook=_distinct, parse_int=_check_integer, parse_float=_check_float
        )
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, what, run, key) from error


def check_raw(raw: msgspec.Raw, limit: int, name: str, *, run: str, key: str) -> None:
    """Raises `CorruptError` for a free-form member of more than ``limit`` bytes before it is
    parsed: one byte of JSON can become thirty bytes of Python objects.
    """
    if len(raw) > limit:
        raise CorruptError(f"{name} has {len(raw)} bytes, the limit is {limit}", run=run, key=key)


def encode_packed(value: msgspec.Struct) -> bytes:
    """Encodes as MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_packed(data: bytes | memoryview, kind: type[T], *, run: str, key: str) -> T:
    """Decodes and checks an object; raises `CorruptError` naming run and key."""
    try:
        return msgspec.msgpack.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, kind.__name__.lower(), run, key) from error


def _check_depth(text: str) -> None:
    """Raises ValueError for arrays and objects nested deeper than `MAX_DEPTH`, before a parser that
    calls itself for each level reads them.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    brackets = _NO_BRACKETS.sub("", text)
    # Each pass removes the innermost pairs, so a depth of MAX_DEPTH takes as many passes.
    for _ in range(MAX_DEPTH):
        fewer = _PAIR.sub("", brackets)
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    if brackets:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels, or never closed")


def _check_surrogates(text: str) -> None:
    """Raises ValueError for an escaped half of a character, which no UTF-8 can hold."""
    if _SURROGATE.search(text) is None:
        return
    second_half = -1
    for escape in _ESCAPE.finditer(text):
        code = int(escape[1] or "0", 16)
        is_second = 0xDC00 <= code < 0xE000
        if is_second != (escape.start() == second_half) or (second_half >= 0 and not is_second):
            break
        second_half = escape.end() if 0xD800 <= code < 0xDC00 else -1
    else:
        if second_half < 0:
            return
    raise ValueError("half a character")


def _distinct(members: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in members]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the member {twice[:40]!r} is stated twice")


def _check_float(digits: str) -> None:
    """Raises ValueError for a number that no float holds. Keeps none: they need no memory here."""
    if math.isinf(float(digits)):
        raise ValueError("a number out of range")


def _check_integer(digits: str) -> None:
    if len(digits) > _FINITE_DIGITS:
        _check_float(digits)


def _unreadable(error: Exception, what: str, run: str, key: str) -> CorruptError:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return CorruptError(
        f"not a valid {what}: {reason[:200]}",
        hint="the object is damaged or written by a newer deltawire",
        run=run,
        key=key,
    )
