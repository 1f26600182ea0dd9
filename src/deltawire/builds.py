"""Names the build of deltawire that runs: its release and, from a checkout, its commit.

Objects of a run name the build that wrote them, so that an operator sees which process still has
the old release during an upgrade.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from deltawire import __version__

MAX_BUILD = 64
"""The most characters of a build's name in an object."""
COMMIT_DIGITS = 12

_PACKAGE = Path(__file__).resolve().parent
_MAX_FILE_BYTES = 16 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@cache
def build_name() -> str:
    """Returns the name of this build: ``0.1.0`` of a release, ``0.1.0+g2270cdc6388b`` of a
    checkout. Changes that are not committed do not show in it.
    """
    commit = commit_of(_PACKAGE)
    return f"{__version__}+g{commit[:COMMIT_DIGITS]}" if commit else __version__


def release_of(build: str) -> tuple[int, int]:
    """Returns the first two numbers of a build's release, ``(0, 1)`` for ``0.1.0+g2270cdc6388b``;
    zeros for a name that is none.

    Releases with the same two numbers differ in nothing that processes of a run share.
    """
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?:\D|\Z)", build)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def work_together(one: str, other: str) -> bool:
    """Returns whether two builds may be processes of one run: their releases are the same or follow
    one another. A build without a name is not judged.
    """
    first, second = sorted((release_of(one), release_of(other)))
    if (0, 0) in (first, second):
        return True
    follows = (first[0], first[1] + 1), (first[0] + 1, 0)
    return first == second or second in follows


def commit_of(package: Path) -> str:
    """Returns the commit of the checkout that ``package`` lies in, or of the one that its wheel was
    built from; empty for a release.

    Reads git's files: git itself may be missing, and takes longer than the rest of a command.
    """
    if package.parent.name == "src" and (package.parents[1] / ".git").exists():
        found = _head(package.parents[1] / ".git")
    else:
        found = _text(package / "commit.txt")
    return found if _COMMIT.fullmatch(found) else ""


def _head(git: Path) -> str:
    """Reads the commit that is checked out in a repository or a worktree of one."""
    if git.is_file():
        git = git.parent / _text(git).removeprefix("gitdir: ")
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / (_text(git / "commondir") or ".")
    if found := _text(git / name) or _text(common / name):
        return found
    packed = (line.split(" ", 1) for line in _text(common / "packed-refs").splitlines())
    return next((line[0] for line in packed if line[1:] == [name]), "")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""
