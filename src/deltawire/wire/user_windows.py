"""Windows of user figures: counts and sums by arm and version, which name no user.

A gateway keeps them in its state, ``live/gateways/<gateway>.json``, for views. No decision rests on
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.wire.decisions import UpstreamName
from deltawire.wire.receipts import Arm

MOST_WINDOWS = 256
MOST_SOURCES = 16
MOST_BYTES = 512 << 10
MOST_ARMS = 4
"""Of one window: versions beyond `MOST_SOURCES` count together, in one row for each arm."""
KINDS_AT_MOST = 16
LabelKind = Literal["task", "client"]
MOST_LABELS = 48
MOST_REST = 8
"""Of `MOST_LABELS`: rows of labels beyond them, one for each kind of label and arm."""
MOST_LABEL = 64
"""Characters of a label."""
DAY_S, HOUR_S = 86_400.0, 3600.0
COARSE = ((6 * HOUR_S, HOUR_S), (2 * DAY_S, DAY_S))
"""Windows older than the first number of seconds are merged to the second."""
KEPT_S = 90 * DAY_S
Z = 1.96
"""Of a normal interval of 95 %."""
MOST_COUNT, MOST_SUM, MOST_SQUARES = 1 << 53, 1e15, 1e24
_Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
_Sum = Annotated[float, Meta(ge=-MOST_SUM, le=MOST_SUM)]


class MeanSums(msgspec.Struct, frozen=True, array_like=True):
    """A count of values, their sum, and the sum of their squares.

    Example::

        MeanSums().with_value(1.0).with_value(0.0).mean  # 0.5
    """

    count: _Count = 0
    total: _Sum = 0.0
    squares: Annotated[float, Meta(ge=0, le=MOST_SQUARES)] = 0.0

    def with_value(self, value: float) -> MeanSums:
        """Returns the sums with one more value."""
        return self.plus(MeanSums(1, value, value * value))

    def plus(self, other: MeanSums) -> MeanSums:
        """Returns the sums of both, within what a reader takes."""
        return MeanSums(
            min(self.count + other.count, MOST_COUNT),
            min(max(self.total + other.total, -MOST_SUM), MOST_SUM),
            min(self.squares + other.squares, MOST_SQUARES),
        )

    @property
    def mean(self) -> float | None:
        """The mean; None without a value."""
        return self.total / self.count if self.count else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for fewer than two values."""
        if self.count < 2:
            return None
        mean = self.total / self.count
        spread = max(self.squares / self.count - mean * mean, 0.0) * self.count / (self.count - 1)
        return math.sqrt(spread / self.count)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the normal interval of 95 %; None for fewer than two values."""
        mean, error = self.mean, self.error
        return None if mean is None or error is None else (mean - Z * error, mean + Z * error)


class UserCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One arm and version in one window. ``version`` is -1 where it is not known, such as of a
    report that another gateway's answer got, and for versions that found no place of their own.

    ``errors`` are answers that no replica gave, ``left`` those whose client left before the end.
    ``first_s``, in seconds, and ``tokens`` are of the others. ``satisfaction`` has one value for
    each user who reported: the mean of its reports, each from 0, the worst, to 1, the best of its
    kind. ``kinds`` has such values as they were reported, and ``reports`` counts reports.
    """

    arm: Arm
    version: Annotated[int, Meta(ge=-1, le=1 << 48)] = -1
    upstream: UpstreamName = ""
    answers: _Count = 0
    errors: _Count = 0
    left: _Count = 0
    first_s: MeanSums = MeanSums()
    tokens: MeanSums = MeanSums()
    satisfaction: MeanSums = MeanSums()
    kinds: Annotated[dict[str, MeanSums], Meta(max_length=KINDS_AT_MOST)] = {}
    reports: Annotated[dict[str, _Count], Meta(max_length=KINDS_AT_MOST)] = {}

    @property
    def place(self) -> tuple[str, int, str]:
        """Returns arm, version and upstream."""
        return self.arm, self.version, self.upstream

    def plus(self, other: UserCounts) -> UserCounts:
        """Returns the sums of both, for the same place."""
        kinds, reports = dict(self.kinds), dict(self.reports)
        for kind, sums in other.kinds.items():
            if kind in kinds or len(kinds) < KINDS_AT_MOST:
                kinds[kind] = kinds.get(kind, MeanSums()).plus(sums)
        for kind, count in other.reports.items():
            if kind in reports or len(reports) < KINDS_AT_MOST:
                reports[kind] = reports.get(kind, 0) + count
        return UserCounts(
            arm=self.arm,
            version=self.version,
            upstream=self.upstream,
            answers=self.answers + other.answers,
            errors=self.errors + other.errors,
            left=self.left + other.left,
            first_s=self.first_s.plus(other.first_s),
            tokens=self.tokens.plus(other.tokens),
            satisfaction=self.satisfaction.plus(other.satisfaction),
            kinds=kinds,
            reports=reports,
        )


class LabelCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one task label, or of one client by the name of its API key; an empty name is
    all further ones. ``counts`` are of one arm, whose versions are one, without kinds of feedback.
    """

    by: LabelKind
    name: Annotated[str, Meta(max_length=MOST_LABEL)]
    counts: UserCounts

    @property
    def place(self) -> tuple[str, str, str]:
        """Returns the kind of label, the name and the arm."""
        return self.by, self.name, self.counts.arm


class UserWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of the ``seconds`` from ``since`` on, in seconds since 1970."""

    since: Annotated[float, Meta(ge=0, le=1e12)]
    seconds: Annotated[float, Meta(gt=0, le=DAY_S)]
    counts: Annotated[list[UserCounts], Meta(max_length=MOST_SOURCES)] = []
    labels: Annotated[list[LabelCounts], Meta(max_length=MOST_LABELS)] = []


def fitting(windows: list[UserWindow]) -> list[UserWindow]:
    """Returns the newest windows that take at most `MOST_BYTES` as JSON. Labels take what the
    windows leave, the newest first."""
    room = MOST_BYTES
    found: list[UserWindow] = []
    for one in reversed(windows):
        room -= len(msgspec.json.encode(_unlabeled(one))) + 1
        if room < 0:
            return [_unlabeled(window) for window in found[::-1]]
        found.append(one)
    for place, one in enumerate(found):
        room -= len(msgspec.json.encode(one.labels)) + len('"labels":,')
        found[place] = one if room >= 0 else _unlabeled(one)
    return found[::-1]


def _unlabeled(window: UserWindow) -> UserWindow:
    return msgspec.structs.replace(window, labels=[]) if window.labels else window


def merged_labels(labels: Iterable[LabelCounts]) -> list[LabelCounts]:
    """Adds up those of the same kind, name and arm. Of more than `MOST_LABELS`, those with the
    fewest answers count together, by kind and arm."""
    found = _by_label(labels)
    if len(found) <= MOST_LABELS:
        return found
    named = sorted(
        (one for one in found if one.name), key=lambda one: one.counts.answers, reverse=True
    )
    kept = {one.place for one in named[: MOST_LABELS - MOST_REST]}
    rest = (
        msgspec.structs.replace(one, name="") if one.place not in kept else one for one in found
    )
    return _by_label(rest)


def _by_label(labels: Iterable[LabelCounts]) -> list[LabelCounts]:
    found: dict[tuple[str, str, str], LabelCounts] = {}
    for one in labels:
        known = found.get(one.place)
        counts = one.counts if known is None else known.counts.plus(one.counts)
        found[one.place] = msgspec.structs.replace(one, counts=counts)
    return list(found.values())


def merged(counts: Iterable[UserCounts]) -> list[UserCounts]:
    """Adds up those of the same arm, version and upstream. Of more than `MOST_SOURCES`, those with
    the fewest answers and reports count together, by arm, as of an unknown version."""
    found = _by_place(counts)
    if len(found) <= MOST_SOURCES:
        return found
    known = [one for one in found if one.place != _rest(one).place]
    known.sort(key=lambda one: one.answers + sum(one.reports.values()), reverse=True)
    kept = {one.place for one in known[: MOST_SOURCES - MOST_ARMS]}
    rows = _by_place(one if one.place in kept else _rest(one) for one in found)
    return rows[:MOST_SOURCES]  # There are fewer arms.


def _by_place(counts: Iterable[UserCounts]) -> list[UserCounts]:
    found: dict[tuple[str, int, str], UserCounts] = {}
    for one in counts:
        known = found.get(one.place)
        found[one.place] = one if known is None else known.plus(one)
    return list(found.values())


def _rest(counts: UserCounts) -> UserCounts:
    return msgspec.structs.replace(counts, version=-1, upstream="")


def coarsened(windows: Iterable[UserWindow], now: float) -> list[UserWindow]:
    """Returns windows, the oldest first, with older ones merged to hours and days, and the oldest
    left out; of several gateways too."""
    groups: dict[tuple[float, float], list[UserWindow]] = {}
    for one in windows:
        age = now - one.since
        if age > KEPT_S:
            continue
        seconds = one.seconds
        for older, width in COARSE:
            if age > older:
                seconds = max(seconds, width)
        since = one.since // seconds * seconds
        groups.setdefault((since, seconds), []).append(one)
    found = [
        UserWindow(
            since=since,
            seconds=seconds,
            counts=merged(counts for one in group for counts in one.counts),
            labels=merged_labels(label for one in group for label in one.labels),
        )
        for (since, seconds), group in sorted(groups.items())
    ]
    return found[-MOST_WINDOWS:]
