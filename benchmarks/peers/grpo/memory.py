"""Measures the memory of a process and of all that it started, while it runs."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

EVERY_S = 0.25


def run_and_watch(command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> int:
    """Runs a command to its end; returns the largest sum of proportional memory, in bytes.

    Memory that processes share counts once, divided over them (PSS). Raises
    `subprocess.CalledProcessError` if the command fails; its output is in ``log``.
    """
    peak = 0
    done = threading.Event()
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - our own words
            list(command), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )

    def watch() -> None:
        nonlocal peak
        while not done.wait(EVERY_S):
            peak = max(peak, sum(map(_bytes_of, descendants(process.pid))))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        code = process.wait()
    finally:
        done.set()
        watching.join()
    if code:
        raise subprocess.CalledProcessError(code, list(command))
    return peak


def descendants(root: int) -> list[int]:
    """A process and every one that it started and that still belongs to it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has ended.
        parents[int(path.parent.name)] = int(fields[1])
    found, waiting = [], [root]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += [child for child, parent in parents.items() if parent == one]
    return found


def _bytes_of(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0
    )
