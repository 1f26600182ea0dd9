"""Finds the folder that a trainer writes checkpoints to, and the checkpoints that came and went."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from deltawire.errors import InputError

_WILDCARD = re.compile(r"[*?[]")
MANY = 1_000_000
"""Matches of a pattern that are looked at, at most."""
MOST = 1000


class CheckpointFolder:
    """A folder by its path, or the newest of those that a pattern matches.

    Neither needs to exist yet. With a pattern such as ``outputs/*/broadcasts``, the folder that was
    changed last is watched at first, and each that appears later replaces it: trainers that name
    their folder at random write to a new one after a restart.

    Example::

        folder = CheckpointFolder("outputs/*/broadcasts")
        if folder.poll():
            print(folder.now)
    """

    def __init__(self, place: Path | str) -> None:
        given = Path(place)
        parts = given.parts
        first = next((n for n, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
        literal = first == len(parts) or given.is_dir()
        self.given = str(place)
        self.base = given if literal else Path(*parts[:first])
        """The part of the path before the first wildcard."""
        self._pattern = "" if literal else str(Path(*parts[first:]))
        self._known: set[Path] = set()
        self.now: Path | None = None
        """The folder that is watched now; None while there is none."""
        if literal and given.exists() and not given.is_dir():
            raise InputError(f"{given} is no folder to watch", hint="is the path right?")

    def poll(self) -> bool:
        """Looks for the folder; returns whether it is another one than at the last look."""
        try:
            matches = self.base.glob(self._pattern) if self._pattern else [self.base]
            found = {path for path, _ in zip(matches, range(MANY), strict=False) if path.is_dir()}
            appeared = found - self._known
            self._known |= found
            if not appeared:
                return False
            self.now = max(appeared, key=lambda path: (path.stat().st_mtime_ns, path.name))
        except OSError as error:
            raise InputError(f"cannot list {self.given}: {error.strerror or error}") from error
        return True


class NumberGaps:
    """Notices numbers that were left out of a growing sequence, by its smallest step so far.

    Numbers missing before those of the first call count only in a folder that was watched from its
    start (``from_start``): elsewhere they may have been removed long ago. If they are more than
    `MOST`, the trainer was resumed, and they do not count.

    Example::

        gaps = NumberGaps(from_start=False)
        gaps.add({1, 2})
        assert gaps.add({5, 6}) == [range(3, 5)]
    """

    def __init__(self, *, from_start: bool) -> None:
        self._from_start = from_start
        self._newest: int | None = None
        self._step: int | None = None

    def add(self, numbers: set[int]) -> list[range]:
        """Takes the numbers that are there now; returns those that are missing before them."""
        ordered = sorted(one for one in numbers if self._newest is None or one > self._newest)
        if not ordered:
            return []
        before = [] if self._newest is None else [self._newest]
        steps = [b - a for a, b in pairwise([*before, *ordered])]
        self._step = min([*steps, *([] if self._step is None else [self._step])], default=None)
        first_look, self._newest = self._newest is None, ordered[-1]
        if self._step is None or (first_look and not self._from_start):
            return []
        if first_look:
            before = [(ordered[0] % self._step or self._step) - self._step]
        missing = [range(a + self._step, b, self._step) for a, b in pairwise([*before, *ordered])]
        return [one for one in missing if one and not (first_look and len(one) > MOST)]
