"""Names of users: one spelling for each, whatever client and encoding a name came through; and of
gateways."""

from __future__ import annotations

import secrets
import unicodedata
from contextlib import suppress
from pathlib import Path

from deltawire.errors import CorruptError
from deltawire.private_files import read_private, replace_private
from deltawire.wire import keys

MAX_NAME_CHARACTERS = 1024
_READ_CHARACTERS = 4 * MAX_NAME_CHARACTERS
"""Composing makes a name shorter, and takes time that grows with the square of its length."""


def normalize_name(name: str | bytes) -> str:
    """Returns a name in Unicode's form NFC, without white space and control characters at its ends,
    cut at `MAX_NAME_CHARACTERS`.

    Bytes that are no UTF-8, also those that a header or an argument carries as lone surrogates,
    are taken as Latin-1.

    Example::

        normalize_name("jose\\u0301 ") == normalize_name(b"jos\\xe9") == "jos\\xe9"
    """
    text = unicodedata.normalize("NFC", _text_of(name)[:_READ_CHARACTERS])
    kept = [place for place, one in enumerate(text) if not _is_blank(one)]
    return text[kept[0] : kept[-1] + 1][:MAX_NAME_CHARACTERS].rstrip() if kept else ""


def spellings_of(name: str) -> tuple[str, ...]:
    """Returns the forms under which gateways that did not normalize names may have known a name:
    as given, in NFC and NFD, as Latin-1 bytes of a header, and each with a space at its end."""
    whole = normalize_name(name)
    found = [whole, name, unicodedata.normalize("NFD", whole)]
    with suppress(UnicodeEncodeError):
        found.append(whole.encode("latin-1").decode("utf-8", "surrogateescape"))
    return tuple(dict.fromkeys([*found, *(f"{one} " for one in found)]))


def _text_of(name: str | bytes) -> str:
    try:
        raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # A surrogate that stands for no byte.
        assert isinstance(name, str)
        return name.encode("utf-8", "backslashreplace").decode()
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _is_blank(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in ("Cc", "Cf")


def name_in(folder: Path) -> str:
    """Returns the gateway's name in its state folder, a new one if there is none: whoever deletes
    the folder gets another name, so that no number of a segment repeats."""
    path = folder / "name"
    name = (read_private(path, 128) or b"").decode("ascii", "replace").strip()
    if not name:
        name = f"g{secrets.token_hex(8)}"
        replace_private(path, f"{name}\n".encode())
    if not keys.valid_name(name):
        raise CorruptError(f"{path} holds no name of a gateway", hint="remove the file")
    return name


def storable(header: str) -> str:
    """Returns a header as text that can be stored: bytes that are no UTF-8 become ``?``."""
    return header.encode(errors="replace").decode()
