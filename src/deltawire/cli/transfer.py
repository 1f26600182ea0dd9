"""What commands that move models have in common: their bars, their buckets, their keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from deltawire.errors import InputError
from deltawire.sync.maintain.compaction import nested
from deltawire.wire.seal import Signer


class Bars:
    """Progress bars of bytes with rates, on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False)

    def begin(self, what: str, total: int | None = None) -> None:
        """Show a new bar in the place of the one before."""
        self._progress.reset(self._task, description=what, total=total, visible=True)

    def more(self, count: int) -> None:
        """So many bytes more are done."""
        self._progress.advance(self._task, count)

    def count(self, what: str, done: int, total: int) -> None:
        """So many of something that is not bytes are done."""
        self._progress.update(
            self._task, description=f"{what} {done} of {total}", completed=0, visible=done < total
        )

    def hide(self) -> None:
        """Nothing is going on."""
        self._progress.update(self._task, visible=False)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bars(arguments: argparse.Namespace) -> Iterator[Bars]:
    """Bars where somebody watches, and lines all the same where nobody does."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    hidden = arguments.json or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        yield Bars(progress)


def signer_of(path: str) -> Signer | None:
    """The private key in a file, None without one."""
    if not path:
        return None
    from deltawire.wire.signing import Ed25519Signer

    return Ed25519Signer.read(Path(path))


def strides_of(text: str) -> tuple[int, ...]:
    """Strides as ``4,16,64``; none for an empty text."""
    try:
        return nested(tuple(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise InputError(f"--fold-strides {text}: give numbers with commas between them") from error


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
