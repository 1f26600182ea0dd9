"""Writes the page of all keys of a run's configuration, from the sections themselves."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import inspect as kinds

from deltawire.config import RunConfig
from deltawire.config.base import Section

OPENING = """# Configuration

All keys of the file that `deltawire run` takes, with type, default and meaning. Every key has a
default but `name`; an unknown key is refused with the nearest valid one. `deltawire init` writes a
first file, and `deltawire run FILE --dry-run` prints every value. What a machine allows a run to
ask for is its [policy](ENVIRONMENTS.md#what-a-machine-allows).
"""


def configuration_page() -> str:
    """The page, in Markdown: one heading and one table a section."""
    parts = [OPENING]
    for place, section, many in sections(RunConfig, ""):
        title = f"[[{place}]]" if many else f"[{place}]" if place else "Top level"
        parts.append(f"\n## `{title}`\n" if place else f"\n## {title}\n")
        parts.append(f"\n{text_of(inspect.getdoc(section) or '')}\n")
        parts.append("\n| key | type | default | |\n|---|---|---|---|\n")
        documents = documents_of(section)
        for one in msgspec.structs.fields(section):
            if subsections(get_type_hints(section)[one.name]):
                continue
            kind = kinds.type_info(get_type_hints(section, include_extras=True)[one.name])
            row = (f"`{one.name}`", type_text(kind), default_text(one), documents.get(one.name, ""))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
    return "".join(parts)


def sections(kind: type[Section], place: str) -> Iterator[tuple[str, type[Section], bool]]:
    """Every section with its dotted place, and whether there may be several of it."""
    yield place, kind, False
    for name, hint in get_type_hints(kind).items():
        for found in subsections(hint):
            below = f"{place}.{name}" if place else name
            many = hint not in (found, found | None)
            if many and f".{name}." in f".{place}.":
                continue  # A mixture of tasks holds tasks.
            first, *rest = sections(found, below)
            yield first[0], first[1], many
            if not many or place == "":
                yield from rest


def subsections(hint: Any) -> list[type[Section]]:
    """The sections that a type holds: itself, an optional one, or those of a list."""
    options = [hint, *get_args(hint)]
    return [one for one in options if isinstance(one, type) and issubclass(one, Section)]


def documents_of(section: type[Section]) -> dict[str, str]:
    """The text after each field of a class."""
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    name = ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = text_of(str(node.value.value))
            name = ""
        else:
            name = ""
    return found


def text_of(text: str) -> str:
    """A docstring's text on one line, in Markdown."""
    return " ".join(text.split()).replace("``", "`")


def default_text(one: Any) -> str:
    """A field's default as TOML writes it."""
    value = one.default
    if value is msgspec.NODEFAULT and one.default_factory is not msgspec.NODEFAULT:
        value = one.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "none"
    return f"`{msgspec.json.encode(value).decode()}`"


def type_text(kind: Any) -> str:
    """A type with its limits, such as ``whole number, 1 to 4096``."""
    match kind:
        case kinds.UnionType():
            return " or ".join(type_text(one) for one in kind.types if not _is_none(one))
        case kinds.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case kinds.BoolType():
            return "true, false"
        case kinds.IntType():
            return f"whole number{_limits(kind)}"
        case kinds.FloatType():
            return f"number{_limits(kind)}"
        case kinds.StrType():
            return "text"
        case kinds.ListType():
            return f"list of {type_text(kind.item_type)}"
        case kinds.DictType():
            return "table"
        case _:
            return "any value"


def _is_none(kind: Any) -> bool:
    return isinstance(kind, kinds.NoneType)


def _limits(kind: Any) -> str:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    parts = []
    if low is not None:
        parts.append(f"above {low:g}" if kind.ge is None else f"from {low:g}")
    if high is not None and high < 1e9:
        parts.append(f"below {high:g}" if kind.le is None else f"to {high:g}")
    return f", {' '.join(parts)}" if parts else ""
