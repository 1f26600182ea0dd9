"""Curves of a run for the page: figures version by version, and its timeline, as plain values.

A curve is a row of `deltawire.dashboard.figures.FIGURES` that trackers get too, as the figure of a
state that holds one version. A long run has more versions than a screen has columns, so at most a
given number of them is evaluated, at equal distances; a narrower range shows all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import msgspec

from deltawire.dashboard.figures import FIGURES
from deltawire.dashboard.plots import ACTIVITIES, bars
from deltawire.dashboard.state import ProcessState, RunState
from deltawire.dashboard.wording import controller_words, forecast_words
from deltawire.events import Life

TRACKED = {row.tracked: row for row in FIGURES if row.tracked}
"""The figures that have a value for each version, by the name of their series."""

HELDOUT_SET = "heldout/set/"
"""Prefix of the accuracy on a named held-out set."""
HELDOUT_SOURCE = "heldout/source/"
"""Prefix of the loss on a held-out source of documents."""
STALENESS_MIN = "staleness/min"
ANSWERED = "at"
"""The time at which a version was published, in seconds since the epoch."""

MAX_ROWS = 40
MAX_NOTES = 200
_ROLES = ("warm-start", "trainer", "worker", "evaluator", "reference", "supervisor", None)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Curves over the same versions: each column has an entry for each of ``versions``, null where
    nothing was measured. Of the ``total`` versions in the range, every ``stride``-th is shown."""

    versions: list[int]
    columns: dict[str, list[float | None]]
    stride: int
    total: int
    first: int | None
    last: int | None


def series(
    state: RunState, names: list[str], *, first: int = 0, last: int | None = None, points: int
) -> Series:
    """Evaluates the named series over versions ``first`` to ``last``, at most about ``points``.

    Unknown names have no column. Evaluated versions are chosen apart, since they are few.
    """
    measured = state.evaluated.keys() | state.heldout_losses.keys()
    known = sorted(state.steps.keys() | state.published.keys() | measured)
    inside = known[bisect_left(known, first) : None if last is None else bisect_right(known, last)]
    stride = max(1, -(-len(inside) // points))
    evaluated = [version for version in inside if version in measured]
    chosen = set(inside[::-1][::stride])
    chosen.update(evaluated[:: max(1, -(-len(evaluated) // points))])
    versions = sorted(chosen)
    wanted = [name for name in names if name in TRACKED or name in (STALENESS_MIN, ANSWERED)]
    wanted += [name for name in names if name.startswith((HELDOUT_SET, HELDOUT_SOURCE))]
    columns: dict[str, list[float | None]] = {name: [] for name in wanted}
    swaps = any("swap" in name for name in wanted)
    for version in versions:
        part = state.at(version, swaps=swaps)
        for name, column in columns.items():
            column.append(_value(name, version, part))
    return Series(
        versions=versions,
        columns=columns,
        stride=stride,
        total=len(inside),
        first=known[0] if known else None,
        last=known[-1] if known else None,
    )


def _value(name: str, version: int, part: RunState) -> float | None:
    if (figure := TRACKED.get(name)) is not None:
        return figure.of(part)
    if name == STALENESS_MIN:
        ages = part.steps[version].staleness if version in part.steps else []
        return min(ages, default=None)
    if name == ANSWERED:
        return part.published[version].at if version in part.published else None
    if name.startswith(HELDOUT_SOURCE):
        losses = part.newest_heldout_loss
        source = losses.sources.get(name.removeprefix(HELDOUT_SOURCE)) if losses else None
        return source.loss if source else None
    score = (
        part.evaluated[version].sets.get(name.removeprefix(HELDOUT_SET)) if part.evaluated else None
    )
    return score.accuracy if score else None


class FigureValue(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of figures with its value over the whole run, also as ``text``."""

    name: str
    unit: str
    help: str
    value: float | None
    text: str
    tracked: str


def figure_values(state: RunState) -> list[FigureValue]:
    """Every figure of the run."""
    values = [(row, row.of(state)) for row in FIGURES]
    return [
        FigureValue(
            name=row.name,
            unit=row.unit,
            help=row.help,
            value=found,
            text=row.text(found),
            tracked=row.tracked,
        )
        for row, found in values
    ]


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its bars: activity number, first and last column, lower and upper edge in
    eighths of the row."""

    name: str
    role: str | None
    bars: list[tuple[int, int, int, int, int]]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The activities of processes over time, in ``columns`` equal parts of the time from ``opens``
    to ``closes``.

    ``left_out`` processes are not among the rows. ``marks`` are versions and their times.
    """

    opens: float
    closes: float
    columns: int
    activities: list[str]
    rows: list[TimelineRow]
    left_out: int
    marks: list[tuple[int, float]]


def timeline(
    state: RunState, *, opens: float | None = None, closes: float | None = None, columns: int = 900
) -> Timeline | None:
    """Divides the activities of at most `MAX_ROWS` processes into columns of time.

    Without a range, the whole run. Returns None if nothing has happened yet.
    """
    extent = state.extent
    if extent is None or extent[1] <= extent[0]:
        return None
    begin = max(extent[0], opens) if opens is not None else extent[0]
    end = min(extent[1], closes) if closes is not None else extent[1]
    if end <= begin:
        begin, end = extent
    active = [one for one in state.processes.values() if one.spans]
    active.sort(key=lambda one: (_ROLES.index(one.role), one.name))
    rows = [_row(one, begin, end, columns) for one in active[:MAX_ROWS]]
    return Timeline(
        opens=begin,
        closes=end,
        columns=columns,
        activities=list(ACTIVITIES),
        rows=rows,
        left_out=len(active) - len(rows),
        marks=_marks(state, begin, end),
    )


def _row(process: ProcessState, opens: float, closes: float, columns: int) -> TimelineRow:
    drawn = bars(process.spans, opens, closes, columns)
    return TimelineRow(
        name=process.name,
        role=process.role,
        bars=[
            (
                ACTIVITIES.index(bar.activity),
                bar.left,
                bar.right,
                int(8 * bar.low),
                int(8 * bar.high),
            )
            for bar in drawn
        ],
    )


def _marks(state: RunState, opens: float, closes: float) -> list[tuple[int, float]]:
    """At most 24 versions at equal distances in time, so that their labels stay apart."""
    inside = sorted(
        (event.at, event.version)
        for event in state.published.values()
        if opens <= event.at <= closes
    )
    marks: list[tuple[int, float]] = []
    for at, version in inside:
        if not marks or at - marks[-1][1] >= (closes - opens) / 24:
            marks.append((version, at))
    return marks


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a run; ``bad`` if it should not have."""

    at: float
    process: str
    text: str
    bad: bool


def notes(state: RunState) -> list[Note]:
    """The newest starts, ends and deaths of processes, changed settings, and alarms, newest first:
    at most `MAX_NOTES`."""
    found = [
        _life(process, life) for process in state.processes.values() for life in process.lives[-20:]
    ]
    for version, event in state.settings.items():
        changed = ", ".join(sorted(event.changes))
        found.append(
            Note(
                at=event.at,
                process=event.process,
                text=f"settings changed after version {version}: {changed}",
                bad=False,
            )
        )
    if (alarm := state.no_progress) is not None:
        words = f"{alarm.steps} steps up to version {alarm.version} moved nothing: {alarm.reason}"
        found.append(Note(at=alarm.at, process=alarm.process, text=words, bad=True))
    for decision in state.decisions.values():
        if decision.moved:
            words = controller_words(decision)
            found.append(
                Note(
                    at=decision.at,
                    process=decision.process,
                    text=f"controller at version {decision.version}: {words}",
                    bad=False,
                )
            )
    if (forecast := state.newest_forecast) is not None:
        found.append(
            Note(
                at=forecast.at,
                process=forecast.process,
                text=f"forecast at version {forecast.version}: {forecast_words(forecast)}",
                bad=False,
            )
        )
    found += [
        Note(
            at=batch.at,
            process=batch.process,
            text=f"parity at version {version}: {'; '.join((*batch.stopped, *batch.warnings))}",
            bad=True,
        )
        for version, batch in sorted(state.parity.items())[-MAX_NOTES:]
        if batch.stopped or batch.warnings
    ]
    found.sort(key=lambda note: note.at, reverse=True)
    return found[:MAX_NOTES]


def _life(process: ProcessState, life: Life) -> Note:
    detail = f": {life.detail}" if life.detail else ""
    return Note(
        at=life.at, process=process.name, text=f"{life.what}{detail}", bad=life.what == "died"
    )


def heldout_sources(state: RunState) -> list[str]:
    """The names of the sources of the newest held-out losses."""
    newest = state.newest_heldout_loss
    return sorted(newest.sources) if newest else []


def heldout_sets(state: RunState) -> list[str]:
    """The names of the held-out sets of the newest evaluation."""
    newest: Any = state.newest_evaluation
    return sorted(newest.sets) if newest else []
