"""The JSON objects of the independent reader (`deltawire.testing.reader`): the tables of the
format document, as data, and a check of each member against them.
"""

from __future__ import annotations

import binascii
import json
import math
import re
from base64 import b64decode
from typing import Any, NamedTuple

from deltawire.testing.payload_reader import FormatError, require

DEEPEST = 128
"""The most levels of arrays and objects, the object itself included."""

_REQUIRED = object()


class Member(NamedTuple):
    """A row of the document's tables. ``least`` and ``most`` bound a number's value, the characters
    of a string, or the members of an array or object; ``of`` is the kind of each of these. A string
    has ``characters`` only, and may be empty in spite of ``least`` if it is ``optional``.
    """

    type: str
    default: Any = _REQUIRED
    least: int = 0
    most: float = math.inf
    characters: str = ""
    optional: bool = False
    of: Any = None
    most_bytes: int = 0


class Kind(NamedTuple):
    """A kind of object: its members, and the most bytes of one that is sealed."""

    members: dict[str, Member]
    most_bytes: int = 0


_HEX = "0123456789abcdef"


def _digits(count: int, default: Any = _REQUIRED, *, empty: bool = False) -> Member:
    return Member("string", default, count, count, characters=_HEX, optional=empty)


_ZERO = "0" * 32
_LOWER = "abcdefghijklmnopqrstuvwxyz"
_VERSION = Member("integer", most=1 << 48)
_SIZE = Member("integer", most=1 << 50)
_FORMAT = Member("integer", least=1, most=1)
_LINE = Member("string", "main")
_NAME = Member("string", least=1, most=1024)
_BUILD = Member("string", "", most=64)
_FREE = Member("object", {}, most_bytes=1 << 20)
_TENSOR = Kind(
    {
        "name": _NAME,
        "shape": Member("array", most=16, of=_VERSION),
        "dtype": Member("string", most=16),
    }
)
_FILE = Kind({"name": Member("string", most=128), "blob": _digits(64), "bytes": _SIZE})
_NEED = Kind(
    {
        "feature": Member("string", least=1, most=128),
        "since": Member("string", most=16),
        "roles": Member("array", [], most=16, of=Member("string", most=32)),
    }
)
_TABLE = Kind(
    {
        "pieces": Member("integer", most=1 << 20),
        "blobs": Member("integer", most=1 << 18),
        "inline": Member("base64", "", most=12 << 10),
        "blob": _digits(64, "", empty=True),
        "bytes": Member("integer", 0, most=1 << 26),
        "head": _digits(32, "", empty=True),
    }
)
_PAYLOAD = Kind(
    {
        "bytes": _SIZE,
        "table": Member("object", of=_TABLE),
        "codec": Member("string", "dw1", 1, 16, characters=_LOWER + "0123456789-"),
        "codec_since": Member("string", "", most=16, characters="0123456789."),
    }
)
RUN = Kind(
    {
        "format": _FORMAT,
        "id": _digits(32),
        "name": Member("string", most=64),
        "created_at": Member("number"),
        "tensors": Member("array", most=1 << 18, of=Member("object", of=_TENSOR)),
        "digest": _digits(32),
        "chunk": Member("integer", 1 << 22, least=1, most=1 << 30),
        "aliases": Member("object", {}, most=1 << 18, of=_NAME),
        "public_key": _digits(64, "", empty=True),
        "model_files": Member("array", [], most=64, of=Member("object", of=_FILE)),
        "config": _FREE,
        "needs": Member("array", [], most=256, of=Member("object", of=_NEED)),
        "build": _BUILD,
    },
    1 << 26,
)
MANIFEST = Kind(
    {
        "format": _FORMAT,
        "run": _digits(32),
        "version": _VERSION,
        "line": _LINE,
        "base": _VERSION._replace(default=None),
        "base_digest": _digits(32, _ZERO),
        "delta": Member("object", None, of=_PAYLOAD),
        "anchor": Member("object", None, of=_PAYLOAD),
        "digest": _digits(32),
        "epoch": _VERSION,
        "nonce": Member("string", most=64),
        "created_at": Member("number"),
        "pruned": Member("boolean", False),
        "model_files": Member("array", None, most=64, of=Member("object", of=_FILE)),
        "metadata": _FREE,
        "build": _BUILD,
    },
    1 << 21,
)
COMPACTED = Kind(
    {
        **{
            name: MANIFEST.members[name]
            for name in (
                "format", "run", "version", "line", "base", "base_digest", "digest", "created_at",
            )
        },
        "payload": Member("object", of=_PAYLOAD),
    },
    1 << 21,
)  # fmt: skip


def read_members(data: bytes, kind: Kind) -> dict[str, Any]:
    """Returns the members of a JSON object with their defaults; raises `FormatError` for one that
    the document refuses."""
    try:
        text = data.decode()
        _check_depth(text)
        members = json.loads(
            text, object_pairs_hook=_distinct, parse_float=_number, parse_int=_integer,
            parse_constant=_refuse,
        )  # fmt: skip
        # Refuses half of a character.
        json.dumps(members, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    require(isinstance(members, dict), "not an object")
    for name, member in kind.members.items():
        if member.most_bytes and name in members:
            span = _span_of(text, name)
            require(len(text[span].encode()) <= member.most_bytes, f"too many bytes of {name}")
    return _checked_members(members, kind)


def _checked_members(members: dict[str, Any], kind: Kind) -> dict[str, Any]:
    found = dict(members)
    for name, member in kind.members.items():
        if name not in members:
            require(member.default is not _REQUIRED, f"{name} is missing")
            found[name] = member.default
        elif members[name] is None:
            require(member.default is None, f"{name} is null")
        else:
            found[name] = _checked(members[name], member, name)
    return found


def _checked(value: Any, member: Member, name: str) -> Any:
    types: dict[str, tuple[type, ...]] = {
        "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
        "object": (dict,), "string": (str,), "base64": (str,),
    }  # fmt: skip
    fits = isinstance(value, types[member.type])
    require(fits and isinstance(value, bool) == (member.type == "boolean"), f"the type of {name}")
    if member.type == "base64":
        try:
            size = len(b64decode(value, validate=True))
        except binascii.Error as error:
            raise FormatError(f"{name} is not base64") from error
    elif member.type in ("number", "boolean"):
        return value
    else:
        size = value if member.type == "integer" else len(value)
    within = member.least <= size <= member.most or (member.optional and not size)
    require(within, f"a limit of {name}")
    if member.characters:
        require(set(value) <= set(member.characters), f"the characters of {name}")
    if isinstance(member.of, Kind):
        return _checked_members(value, member.of)
    if member.type == "array":
        return [_checked(each, member.of, name) for each in value]
    if member.of is not None:
        return {
            _checked(k, member.of, name): _checked(v, member.of, name) for k, v in value.items()
        }
    return value


def _check_depth(text: str) -> None:
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', text):
        if token[0] in "[{":
            depth += 1
            require(depth <= DEEPEST, "nested too deeply")
        elif token[0] in "]}":
            depth -= 1


def _span_of(text: str, name: str) -> slice:
    """The place of a member's value in the text of an object, white space around it excluded."""
    decoder, at = json.JSONDecoder(strict=True), text.index("{") + 1
    blank = re.compile(r"[ \t\r\n]*")

    def skip(place: int, character: str = "") -> int:
        place = blank.match(text, place).end()  # type: ignore[union-attr]
        require(not character or text[place] == character, "not JSON")
        return blank.match(text, place + len(character)).end()  # type: ignore[union-attr]

    while True:
        key, at = decoder.raw_decode(text, skip(at))
        start = skip(at, ":")
        _, end = decoder.raw_decode(text, start)
        if key == name:
            return slice(start, end)
        at = skip(end, ",")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len({name for name, _ in pairs}) == len(pairs), "a member is stated twice")
    return dict(pairs)


def _number(digits: str) -> float:
    require(not math.isinf(float(digits)), "a number out of range")
    return float(digits)


def _integer(digits: str) -> int:
    _number(digits)
    return int(digits)


def _refuse(name: str) -> None:
    raise FormatError(f"{name} is no number")
