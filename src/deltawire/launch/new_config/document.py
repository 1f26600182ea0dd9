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

    def table(self, name: str, comment: str = "") -> None:
        """Begins a table."""
        self._lines += ["", *_comment(comment), f"[{name}]"]

    def key(self, name: str, value: Any, comment: str = "") -> None:
        """Sets a key; a comment that is too long for its line comes before it."""
        line = f"{name} = {toml(value)}"
        if comment and len(line) + len(comment) + 4 <= WIDTH:
            self._lines.append(f"{line}  # {comment}")
        else:
            self._lines += [*_comment(comment), line]

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


def _comment(text: str) -> list[str]:
    lines = [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, WIDTH - 2, break_on_hyphens=False) or [""]
    ]
    return [f"# {line}".rstrip() for line in lines]
