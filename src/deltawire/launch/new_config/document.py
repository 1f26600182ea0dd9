"""A TOML file with a comment for each key, in the order in which it was built."""

from __future__ import annotations

import json
import textwrap
from typing import Any

WIDTH = 100


class Document:
    """Collects tables, keys and comments.

    Example::

        document = Document("A first run.")
        document.table("train", "The trainer.")
        document.key("versions", 100, "optimizer steps of the run")
        document.text()
    """

    def __init__(self, opening: str) -> None:
        self._lines = _comment(opening)
        self._first_table: int | None = None

    def table(self, name: str, comment: str = "") -> None:
        """Begins a table."""
        if self._first_table is None:
            self._first_table = len(self._lines)
        self._lines += ["", *_comment(comment), f"[{name}]"]

    def key(self, name: str, value: Any, comment: str = "") -> None:
        """Sets a key; a comment that is too long for its line comes before it."""
        self._lines += _key(name, value, comment)

    def top(self, name: str, value: Any, comment: str = "") -> None:
        """Sets a key that belongs to no table, also after tables were begun."""
        lines = _key(name, value, comment)
        at = len(self._lines) if self._first_table is None else self._first_table
        self._lines[at:at] = lines
        if self._first_table is not None:
            self._first_table += len(lines)

    def remark(self, text: str) -> None:
        """Adds a comment for itself."""
        self._lines += _comment(text)

    def text(self) -> str:
        """Returns the file."""
        return "\n".join(self._lines) + "\n"


def toml(value: Any) -> str:
    """Returns a value of TOML: a basic string is one of JSON, but for DEL."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {toml(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def _key(name: str, value: Any, comment: str) -> list[str]:
    line = f"{name} = {toml(value)}"
    if comment and len(line) + len(comment) + 4 <= WIDTH:
        return [f"{line}  # {comment}"]
    return [*_comment(comment), line]


def _comment(text: str) -> list[str]:
    lines = [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, WIDTH - 2, break_on_hyphens=False) or [""]
    ]
    return [f"# {line}".rstrip() for line in lines]
