"""Tools that work on a workspace without running anything: list, read, search, edit.

A workspace is a value, so they touch no file system: there are no links to follow and no paths that
lead outside. Each returns the text that the model reads; a wrong request raises `Refused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltawire.chat.messages import Tool
from deltawire.envs.sandbox.box import CommandLimits
from deltawire.envs.sandbox.plan import footprint, valid_path

MAX_HITS = 100
MAX_LINES = 400
MAX_LINE = 400
MAX_PATTERN = 200
MAX_COMMAND = 20_000


class Refused(Exception):  # noqa: N818
    """A call that cannot be carried out; the message is for the model."""


def _schema(required: tuple[str, ...], **kinds: str) -> dict[str, Any]:
    described = {name: dict(zip(("type", "description"), kind.split(": "), strict=True))
                 for name, kind in kinds.items()}  # fmt: skip
    return {"type": "object", "properties": described, "required": list(required)}


LIST = Tool("list_files", "List the files and their sizes in bytes.")
READ = Tool(
    "read_file",
    "Read a file, with line numbers.",
    _schema(
        ("path",),
        path="string: from the workspace's root",
        first="integer: first line, 1 if left out",
        last="integer: last line",
    ),
)
SEARCH = Tool(
    "search",
    "Find the lines of all files that hold a text.",
    _schema(("text",), text="string: the exact text to find"),
)
EDIT = Tool(
    "edit_file",
    "Replace a text that occurs exactly once in a file. An empty old text writes a new file.",
    _schema(
        ("path", "old", "new"),
        path="string: from the workspace's root",
        old="string: the text to replace",
        new="string: the text to put in its place",
    ),
)
RUN = Tool(
    "run",
    "Run a shell command in the workspace, in a sandbox without network. Files that it leaves in "
    "the workspace stay; processes do not.",
    _schema(("command",), command="string: for /bin/sh"),
)
SUBMIT = Tool("submit", "Say that the work is done. It is then graded, and this ends the task.")
TOOLS = (LIST, READ, SEARCH, EDIT, RUN, SUBMIT)


def described() -> str:
    """Describes the tools and how to call them, for a model without a chat template."""
    lines = ["Tools:"]
    for tool in TOOLS:
        names = ", ".join(tool.parameters["properties"])
        lines.append(f"{tool.name}({names}): {tool.description}")
    example = '<tool_call>{"name": "list_files", "arguments": {}}</tool_call>'
    return "\n".join([*lines, f"Write a call as {example}", ""])


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Returns a required text argument; raises `Refused`."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise Refused(f"{name} must be a text")
    return value


def _line_argument(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refused(f"{name} must be a line number from 1")
    return value


def _file(files: Mapping[str, bytes], path: str) -> str:
    if path not in files:
        raise Refused(f"there is no file {path[:200]!r}")
    return files[path].decode(errors="replace")


def list_files(files: Mapping[str, bytes]) -> str:
    """Returns one line per file."""
    lines = [f"{path} ({len(data)})" for path, data in sorted(files.items())]
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return "\n".join(lines[:MAX_LINES] + more) or "no files"


def read_file(files: Mapping[str, bytes], arguments: Mapping[str, Any]) -> str:
    """Returns numbered lines of one file."""
    lines = _file(files, text_argument(arguments, "path")).splitlines()
    first = _line_argument(arguments, "first", 1)
    last = min(_line_argument(arguments, "last", len(lines) or 1), first + MAX_LINES - 1)
    shown = [f"{n}\t{line[:MAX_LINE]}" for n, line in enumerate(lines, 1) if first <= n <= last]
    if len(lines) > last:
        shown.append(f"({len(lines)} lines in all)")
    return "\n".join(shown) or "no lines"


def search(files: Mapping[str, bytes], arguments: Mapping[str, Any]) -> str:
    """Finds the lines that contain a text; patterns are not supported, as they can take forever."""
    wanted = text_argument(arguments, "text")
    if not wanted or len(wanted) > MAX_PATTERN:
        raise Refused(f"text must have 1 to {MAX_PATTERN} characters")
    hits: list[str] = []
    for path, data in sorted(files.items()):
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if wanted in line:
                hits.append(f"{path}:{number}: {line[:MAX_LINE]}")
                if len(hits) == MAX_HITS:
                    return "\n".join([*hits, "and perhaps more"])
    return "\n".join(hits) or "nothing found"


def edit_file(files: dict[str, bytes], arguments: Mapping[str, Any], limits: CommandLimits) -> str:
    """Changes one place of a file, or writes a new file; modifies ``files``."""
    path, old, new = (text_argument(arguments, name) for name in ("path", "old", "new"))
    if not old:
        if path in files:
            raise Refused(f"{path[:200]!r} exists already; give the old text to replace")
        _refuse_path(files, path)
        after = new
    else:
        text = _file(files, path)
        count = text.count(old)
        if count != 1:
            raise Refused(f"the old text occurs {count} times in {path[:200]!r}, not once")
        after = text.replace(old, new)
    try:
        data = after.encode()
    except UnicodeEncodeError as error:
        raise Refused("the new text holds half a character") from error
    # Files that could not be written for a command or the grader would fail the episode.
    size, entries = footprint({**files, path: data})
    if size > limits.disk_bytes or entries > limits.files:
        raise Refused("the workspace is full")
    files[path] = data
    return f"wrote {path} ({len(data)} bytes)"


def _refuse_path(files: Mapping[str, bytes], path: str) -> None:
    try:
        plain = valid_path(path)
    except UnicodeEncodeError:
        plain = False
    above = ["/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)]
    if not plain or any(folder in files for folder in above):
        raise Refused(f"{path[:200]!r} cannot be a file of the workspace")
    if any(other.startswith(f"{path}/") for other in files):
        raise Refused(f"{path[:200]!r} is a folder")
