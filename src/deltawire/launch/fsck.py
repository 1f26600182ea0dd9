"""Checks what a run published: its versions, and those of its lines in further precisions."""

from __future__ import annotations

from deltawire.errors import InputError
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.sync.maintain.fsck import CheckedRun, Level, Progress, RunFault, check_run


def check_published(
    bucket: Bucket, *, deep: bool = True, progress: Progress | None = None
) -> tuple[CheckedRun, dict[str, CheckedRun]]:
    """Returns the findings for a run, and for each line of ``train.also_publish``.

    A line that lacks the run's newest version is a warning: the trainer publishes it, or did not
    end in order. One that lacks more, or has a version that the run lacks, is an error. Raises as
    `check_run` does.
    """
    found = check_run(bucket, deep=deep, progress=progress)
    run = read_run(bucket)
    config = config_of(run, url=bucket.url) if run.config else None
    lines = {}
    for name in config.train.also_publish if config else []:
        place = line_bucket(bucket, name)
        try:
            line = check_run(place, deep=deep, progress=progress)
        except InputError as error:
            line = CheckedRun(faults=[RunFault("error", "", None, error.message)])
        else:
            line.faults += _compare(found.newest, line.newest)
        lines[name] = line
    return found, lines


def _compare(newest: int | None, held: int | None) -> list[RunFault]:
    """Compares the newest version of a run with that of a line."""
    ahead = (-1 if newest is None else newest) - (-1 if held is None else held)
    if not ahead:
        return []
    level: Level = "warning" if ahead == 1 else "error"
    text = f"the line ends with version {held}, the run with version {newest}"
    hint = "; the trainer publishes what is missing when it runs" if ahead > 0 else ""
    return [RunFault(level, "", held, text + hint)]
