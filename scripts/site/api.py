"""Writes the reference of the Python interface from docstrings, without importing anything heavy.

Packages say by ``__all__`` what is public. Sources are parsed, not run.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src"
PAGES = {
    "publish": ("Publishing and following", ("deltawire", "deltawire.sync", "deltawire.store")),
    "training": ("Training loops", ("deltawire.train", "deltawire.trl")),
    "environments": ("Environments", ("deltawire.envs",)),
    "codec": ("Codec and digest", ("deltawire.codec",)),
    "testing": (
        "Errors and test tools",
        (
            "deltawire.errors",
            "deltawire.testing.conformance",
            "deltawire.testing.store_suite",
            "deltawire.testing.scratch",
            "deltawire.testing.s3_server",
            "deltawire.testing.faulty",
        ),
    ),
}
"""Pages by name: title and modules."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def api_page(name: str) -> str:
    """One page, in Markdown."""
    title, modules = PAGES[name]
    parts = [f"# {title}\n"]
    for module in modules:
        tree = ast.parse(_path(module).read_text())
        parts.append(f"\n## `{module}`\n\n{prose(ast.get_docstring(tree) or '')}\n")
        parts += [_entry(*found) for found in public(module)]
    return "".join(parts)


def public(module: str) -> Iterator[tuple[str, Definition]]:
    """The public classes and functions of a module, by ``__all__`` or by name, where they are
    defined."""
    tree = ast.parse(_path(module).read_text())
    names = _listed(tree)
    if names is None:
        names = [one.name for one in tree.body if isinstance(one, Definition)]
    for name in names:
        if not name.startswith("_") and (found := _find(module, name)) is not None:
            yield name, found


def _listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets
        ):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def _path(module: str) -> Path:
    path = SOURCES / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _find(module: str, name: str) -> Definition | None:
    """The definition of a name: in the module, where it is imported from, or, of those that are
    loaded at first use, in the modules below it."""
    tree = ast.parse(_path(module).read_text())
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return _find(str(node.module), name) if node.module else None
    if match := re.search(rf'"{name}":\s*"([\w.]+)"', _path(module).read_text()):
        home = match[1] if match[1].startswith("deltawire.") else f"{module}.{match[1]}"
        for place in (home, f"{module}.client.{match[1]}"):
            if _path(place).is_file():
                return _find(place, name)
    for folder in ("", "client/"):
        for path in sorted(_path(module).parent.glob(f"{folder}*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, Definition) and node.name == name:
                    return node
    return None


def _entry(name: str, node: Definition) -> str:
    lines = [f"\n### `{name}`\n\n```text\n{signature(node)}\n```\n"]
    lines.append(f"\n{prose(ast.get_docstring(node) or '')}\n")
    if isinstance(node, ast.ClassDef):
        for one in node.body:
            shown = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            if not shown or one.name.startswith("_") or not ast.get_docstring(one):
                continue
            lines.append(f"\n#### `{name}.{one.name}`\n\n```text\n{signature(one)}\n```\n")
            lines.append(f"\n{prose(ast.get_docstring(one) or '')}\n")
    return "".join(lines)


def signature(node: Definition) -> str:
    """The head of a definition, wrapped."""
    if isinstance(node, ast.ClassDef):
        starts = (one for one in node.body if isinstance(one, ast.FunctionDef))
        start = next((one for one in starts if one.name == "__init__"), None)
        text = f"class {node.name}({_fields(node) if start is None else _arguments(start)})"
    else:
        prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        text = f"{prefix} {node.name}({_arguments(node)}){returns}"
    if isinstance(node, ast.ClassDef):
        text = text.removesuffix("()")
    return textwrap.fill(text, 76, subsequent_indent="    ", break_long_words=False)


def _fields(node: ast.ClassDef) -> str:
    """The fields of a dataclass or struct as arguments; of another class, its bases."""
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if not fields or any("Protocol" in ast.unparse(base) for base in node.bases):
        return ", ".join(ast.unparse(base) for base in node.bases)
    return ", ".join(ast.unparse(one) for one in fields)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.unparse(node.args)
    return re.sub(r"^(self|cls)(, )?", "", text)


def prose(text: str) -> str:
    """A docstring in Markdown: ``Example::`` and the like become fenced code."""
    lines = text.replace("``", "`").splitlines()
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.rstrip().endswith("::"):
            out.append(line)
            continue
        before = line.rstrip()[:-2].strip()
        out += [f"{before}:" if before else "", ""]
        block = []
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
            block.append(lines[at])
            at += 1
        code = textwrap.dedent("\n".join(block)).strip("\n")
        out += [f"```{_language(code)}", code, "```", ""]
    return _angles("\n".join(out).strip())


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def _angles(text: str) -> str:
    """Keep ``<`` outside of code from being taken for HTML."""
    return re.sub(r"<(?=[A-Za-z/])(?![^`\n]*`)", "&lt;", text)
