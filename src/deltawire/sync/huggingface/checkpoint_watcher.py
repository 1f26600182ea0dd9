"""Watches a folder in which a trainer writes checkpoints, and yields those that are complete."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deltawire.errors import InputError
from deltawire.sync.huggingface.checkpoint_dir import MARKER, NO_FILES, read_checkpoint
from deltawire.sync.huggingface.checkpoint_folder import CheckpointFolder, NumberGaps

Fingerprint = tuple[tuple[str, int, int], ...]


NESTED = "policy"
"""The name of a folder inside a subfolder that is the checkpoint itself: SkyRL exports
``global_step_N/policy`` next to the trainer's other models.
"""


@dataclass
class _Candidate:
    fingerprint: Fingerprint = ()
    since: float = 0.0


class CheckpointWatcher:
    """Finds the subfolders of a folder that are now complete checkpoints.

    A subfolder is complete when it has a config.json, every safetensors file that its index names
    (without an index, files other than numbered shards), each as long as its header states, and
    none of its files has changed for ``settle_s``. ``lent`` are files that it may lack, such as
    config.json. A subfolder with the file ``STABLE`` is complete at once, and if one has it, the
    others are complete only with it. If a subfolder has a folder ``policy``, that folder is the
    checkpoint.

    Subfolders are ordered by the last number in their names (``checkpoint-900`` before
    ``checkpoint-1000``), then by name. One that becomes complete after a later one was yielded is
    skipped: versions only go forward. ``folder`` may be a pattern, and need not exist yet (see
    `CheckpointFolder`).

    Example::

        watcher = CheckpointWatcher(Path("outputs"))
        while True:
            for path in watcher.ready():
                publisher.publish(path)
            time.sleep(1)
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        settle_s: float = 5.0,
        lent: Mapping[str, bytes] = NO_FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = CheckpointFolder(folder)
        self.lent = lent
        self.notes: list[str] = []
        """Sentences for the user: which folder is watched, and which subfolders were missed."""
        self.passed_over: list[Path] = []
        self.not_taken: list[tuple[Path, str]] = []
        """Subfolders that are incomplete although their files no longer change, each once, and
        why.
        """
        self._settle_s = settle_s
        self._clock = clock
        self._candidates: dict[Path, _Candidate] = {}
        self._yielded: set[Path] = set()
        self._told: set[Path] = set()
        self._marked = False
        self._last: tuple[int, str] | None = None
        self._gaps = NumberGaps(from_start=False)

    def ready(self) -> Iterator[Path]:
        """Yields the subfolders that are complete by now and were not yielded before, in order."""
        now = self._clock()
        self._find_folder()
        if self.folder.now is None:
            return
        found = [_checkpoint_in(path) for path in _subfolders(self.folder.now)]
        self._note_missed(found)
        self._marked = self._marked or any((path / MARKER).exists() for path in found)
        waiting = (path for path in found if path not in self._yielded)
        for path in sorted(waiting, key=checkpoint_order):
            seen = self._candidates.setdefault(path, _Candidate(since=now))
            fingerprint = fingerprint_of(path)
            if fingerprint != seen.fingerprint:
                seen.fingerprint, seen.since = fingerprint, now
            settled = now - seen.since >= self._settle_s
            if not settled and not (path / MARKER).exists():
                continue
            if fault := self._fault(path):
                if settled and path not in self._told:
                    self._told.add(path)
                    self.not_taken.append((path, fault))
                continue
            self._yielded.add(path)
            del self._candidates[path]
            if self._last is not None and checkpoint_order(path) < self._last:
                self.passed_over.append(path)
                continue
            self._last = checkpoint_order(path)
            yield path

    def _find_folder(self) -> None:
        """Looks for the folder, and starts over in another one."""
        before = self.folder.now
        if self.folder.poll():
            appeared = bool(before or self.notes)  # Since the look before.
            self._candidates.clear()
            self._gaps = NumberGaps(from_start=appeared)
            self._last, self._marked = None, False
            if appeared or self.folder.now != self.folder.base:
                ended = f", no longer {before}" if before else ""
                self.notes.append(f"watching {self.folder.now}{ended}")
        elif before is None and not self.notes:
            self.notes.append(f"there is no folder {self.folder.given} yet: waiting for it")

    def _note_missed(self, found: list[Path]) -> None:
        """Notes subfolders that were removed before they were taken, seen or not."""
        missed = []
        names = {checkpoint_name(path) for path in found}
        for path in self._candidates.keys() - set(found):
            del self._candidates[path]
            if path not in self._told and checkpoint_name(path) not in names:
                missed.append(checkpoint_name(path))
        numbers = {checkpoint_order(path)[0] for path in found} - {-1}
        missed += [
            f"number {gap[0]}" + (f" to {gap[-1]} ({len(gap)})" * (len(gap) > 1))
            for gap in self._gaps.add(numbers)
        ]
        if missed:
            self.notes.append(
                f"missed {', '.join(missed)}: removed before it could be read; "
                "let the trainer keep more checkpoints, or write fewer"
            )

    def _fault(self, path: Path) -> str:
        """Explains why a subfolder is not a complete checkpoint; empty if it is one."""
        try:
            if self._marked and not (path / MARKER).exists():
                return f"it has no {MARKER}, which others here have; is it still being written?"
            read_checkpoint(path, lent=self.lent)
            if not (path / "config.json").is_file() and "config.json" not in self.lent:
                return "it has no config.json; lend a model's files with --files MODEL_DIR"
        except InputError as error:
            return str(error)
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        return ""


def checkpoint_name(path: Path) -> str:
    """Returns the part of a checkpoint's path that holds its number."""
    return path.parent.name if path.name == NESTED else path.name


def checkpoint_order(path: Path) -> tuple[int, str]:
    """Returns a checkpoint's place among others: the last number in its name, then the name."""
    name = checkpoint_name(path)
    numbers = re.findall(r"[0-9]+", name)
    return (int(numbers[-1]) if numbers else -1, name)


def fingerprint_of(path: Path) -> Fingerprint:
    """Returns name, size and modification time of every file of a directory."""
    found = []
    try:
        for file in sorted(path.iterdir()):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    except OSError:  # A file is being renamed or removed.
        return ()
    return tuple(found)


def _checkpoint_in(path: Path) -> Path:
    """Returns the folder within a subfolder that is its checkpoint, or the subfolder itself."""
    nested = path / NESTED
    try:
        return nested if nested.is_dir() and not any(path.glob("*.safetensors")) else path
    except OSError:  # It is being removed.
        return path


def _subfolders(folder: Path) -> list[Path]:
    """Lists subfolders, except hidden ones and those whose name marks them as unfinished.

    A link to another subfolder, such as ``latest``, does not count separately.
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
