"""Watches a folder in which a trainer writes checkpoints, and yields those that are complete."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltawire.errors import InputError
from deltawire.sync.huggingface.checkpoint_dir import read_checkpoint

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass
class _Candidate:
    fingerprint: Fingerprint = ()
    since: float = 0.0


class CheckpointWatcher:
    """Finds the subfolders of a folder that have become complete checkpoints.

    A subfolder is complete when it has a config.json, every safetensors file that its index names
    (without an index, files that are no numbered shards), each as long as its header states, and
    none of its files has changed for ``settle_s``. They come in the order of the last number in
    their names (``checkpoint-900`` before ``checkpoint-1000``), then of the names. One that becomes
    complete after a later one was yielded is passed over: versions only go forward.

    Example::

        watcher = CheckpointWatcher(Path("outputs"))
        while True:
            for path in watcher.ready():
                publisher.publish(path)
            time.sleep(1)
    """

    def __init__(
        self, folder: Path, *, settle_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder} to watch", hint="is the path right?")
        self.folder = folder
        self.passed_over: list[Path] = []
        self._settle_s = settle_s
        self._clock = clock
        self._candidates: dict[Path, _Candidate] = {}
        self._yielded: set[Path] = set()
        self._last: tuple[int, str] | None = None

    def ready(self) -> Iterator[Path]:
        """Yield the subfolders that are complete by now and were not yielded before, in order."""
        now = self._clock()
        waiting = (path for path in _subfolders(self.folder) if path not in self._yielded)
        for path in sorted(waiting, key=checkpoint_order):
            seen = self._candidates.setdefault(path, _Candidate(since=now))
            fingerprint = fingerprint_of(path)
            if fingerprint != seen.fingerprint:
                seen.fingerprint, seen.since = fingerprint, now
            if now - seen.since < self._settle_s or not is_complete(path):
                continue
            self._yielded.add(path)
            del self._candidates[path]
            if self._last is not None and checkpoint_order(path) < self._last:
                self.passed_over.append(path)
                continue
            self._last = checkpoint_order(path)
            yield path


def checkpoint_order(path: Path) -> tuple[int, str]:
    """Return a checkpoint's place among others: the last number in its name, then the name."""
    numbers = re.findall(r"[0-9]+", path.name)
    return (int(numbers[-1]) if numbers else -1, path.name)


def is_complete(path: Path) -> bool:
    """Return whether everything that a Hugging Face directory needs is there, at its full size."""
    try:
        if not (path / "config.json").is_file():
            return False
        read_checkpoint(path)
    except (InputError, OSError):
        return False
    return True


def fingerprint_of(path: Path) -> Fingerprint:
    """Return name, size and modification time of every file of a directory."""
    found = []
    try:
        for file in sorted(path.iterdir()):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    except OSError:  # A file is being renamed or removed.
        return ()
    return tuple(found)


def _subfolders(folder: Path) -> list[Path]:
    """List subfolders, except hidden ones and those whose name marks them as unfinished.

    A link to another subfolder, such as ``latest``, is that subfolder and not one more.
    """
    try:
        return [
            path
            for path in folder.iterdir()
            if path.is_dir()
            and not path.name.startswith(".")
            and not path.name.endswith(".tmp")
            and not (path.is_symlink() and path.resolve().parent == folder.resolve())
        ]
    except OSError as error:
        raise InputError(f"cannot list {folder}: {error.strerror or error}") from error
