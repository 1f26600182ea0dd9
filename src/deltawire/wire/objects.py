"""Reading and writing typed JSON and MessagePack objects that nobody is trusted for."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from deltawire.errors import CorruptError

T = TypeVar("T", bound=msgspec.Struct)

FORMAT = 1


def encode_json(value: msgspec.Struct) -> bytes:
    """JSON, one line, with a newline at its end."""
    return msgspec.json.encode(value) + b"\n"


def decode_json(data: bytes, kind: type[T], *, run: str, key: str, what: str = "") -> T:
    """Decode and check an object, called ``what`` in messages; raises `CorruptError` naming run
    and key."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, what or kind.__name__.lower(), run, key) from error


def check_raw(raw: msgspec.Raw, limit: int, name: str, *, run: str, key: str) -> None:
    """Refuse a free-form member of more than ``limit`` bytes before objects are made of it: a
    byte of JSON can become thirty of Python. Raises `CorruptError`."""
    if len(raw) > limit:
        raise CorruptError(f"{name} has {len(raw)} bytes, the limit is {limit}", run=run, key=key)


def encode_packed(value: msgspec.Struct) -> bytes:
    """MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_packed(data: bytes, kind: type[T], *, run: str, key: str) -> T:
    """Decode and check an object; raises `CorruptError` naming run and key."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, kind.__name__.lower(), run, key) from error


def _unreadable(error: Exception, what: str, run: str, key: str) -> CorruptError:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return CorruptError(
        f"not a valid {what}: {reason[:200]}",
        hint="the object is damaged or written by a newer deltawire",
        run=run,
        key=key,
    )
