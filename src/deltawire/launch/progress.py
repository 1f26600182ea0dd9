"""Progress bars and strides of the commands that move models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from deltawire.display import legible, safe_line
from deltawire.errors import InputError
from deltawire.sync.publish.compaction import nested


class Bars:
    """Progress bars of bytes with rates, on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False)

    def begin(self, description: str, total: int | None = None) -> None:
        """Replaces the current bar with a new one."""
        shown = legible(description, 80)
        self._progress.reset(self._task, description=shown, total=total, visible=True)

    def advance(self, count: int) -> None:
        """Adds ``count`` bytes to the bar."""
        self._progress.advance(self._task, count)

    def count(self, what: str, done: int, total: int) -> None:
        """Shows ``done`` of ``total`` things that are not bytes."""
        self._progress.update(
            self._task, description=f"{what} {done} of {total}", completed=0, visible=done < total
        )

    def hide(self) -> None:
        """Hides the bar until the next `begin`."""
        self._progress.update(self._task, visible=False)

    def log(self, line: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(
            safe_line(line), markup=False, emoji=False, highlight=False, soft_wrap=True
        )


@contextmanager
def bars(*, hidden: bool) -> Iterator[Bars]:
    """Opens bars on a terminal; lines are printed in any case."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    hidden = hidden or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        yield Bars(progress)


@contextmanager
def counting(*, hidden: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Opens a bar on a terminal, and yields a function that shows a description, how many steps
    are done, and how many there are.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = hidden or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task("", total=None)

        def show(description: str, done: int, total: int) -> None:
            progress.update(task, description=description, completed=done, total=total)

        yield show


def parse_strides(text: str) -> tuple[int, ...]:
    """Parses strides such as ``4,16,64``; an empty text means none."""
    try:
        return nested(tuple(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise InputError(
            f"--compaction-strides {text}: these are not numbers with commas between them",
            hint="such as 4,16,64",
        ) from error
