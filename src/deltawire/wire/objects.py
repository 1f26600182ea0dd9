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


def decode_json(data: bytes, kind: type[T], *, run: str, key: str) -> T:
    """Decode and check an object; raises `CorruptError` naming run and key."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, kind, run, key) from error


def encode_packed(value: msgspec.Struct) -> bytes:
    """MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_packed(data: bytes, kind: type[T], *, run: str, key: str) -> T:
    """Decode and check an object; raises `CorruptError` naming run and key."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(error, kind, run, key) from error


def _unreadable(error: Exception, kind: type[msgspec.Struct], run: str, key: str) -> CorruptError:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return CorruptError(
        f"not a valid {kind.__name__.lower()}: {reason[:200]}",
        hint="the object is damaged or written by a newer deltawire",
        run=run,
        key=key,
    )
