"""How users fare, by arm and version, over time: satisfaction, feedback, errors, latency, length.

Gateways store counts and sums in windows (`deltawire.wire.user_windows`), which name no user. A
user who comes back in a later window, or at another gateway, counts again. So figures of users have
an interval only within one window of one gateway: over more of them, one user's reports would look
like those of many. Intervals of errors, latency and length are over answers, as if each were of
another user. Decisions rest on the tests of `deltawire.live.release`, never on these figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import HOLD_BACK
from deltawire.wire.receipts import SERVING
from deltawire.wire.user_windows import (
    HOUR_S,
    MeanSums,
    UserCounts,
    UserWindow,
    Z,
    coarsened,
    merged,
    merged_labels,
)

MOST_POINTS = 1024
MOST_MARKS = 256


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A mean or share of ``count`` values, with the ends of its interval of 95 % where one holds:
    of answers, or of users within one window of one gateway."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0


class UserPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One arm and version in the ``seconds`` from ``since`` on. ``version`` is null where it is not
    known, or another provider's model answered."""

    since: float
    seconds: float
    arm: str
    version: int | None
    upstream: str
    answers: int
    errors: Measured
    left: Measured
    first_s: Measured
    tokens: Measured
    satisfaction: Measured
    kinds: dict[str, Measured]


class DecisionMark(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, to be marked at its time; ``effect`` is the metric of the version that served
    less that of the hold-back version by then, with its interval."""

    at: float
    number: int
    verdict: str
    words: str
    effect: Measured | None = None


class LabelPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One task label, or one client by its API key, in one arm, over the whole time; an empty
    ``name`` is all others."""

    by: str
    name: str
    figures: UserPoint


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``total`` is each arm over the whole time, and ``labels`` are parts of it.
    ``effect`` is the satisfaction in the serving arm less that with the hold-back version, within
    windows in which users of both reported: the mean of these differences, weighted by the users of
    the hold-back version in each (``count`` in all). It has no interval, since users come back."""

    points: list[UserPoint]
    total: list[UserPoint]
    marks: list[DecisionMark]
    effect: Measured | None = None
    labels: list[LabelPoint] = []


def users_of(
    gateways: Sequence[GatewayState], log: DecisionLog | None, now: float
) -> UserView | None:
    """Returns the figures of all gateways together; None if they have none."""
    windows = coarsened([one for gateway in gateways for one in gateway.windows], now)
    if not windows:
        return None
    gateways_at = Counter(since for one in gateways for since in {w.since for w in one.windows})
    points = [
        point_of(
            one,
            window.since,
            window.seconds,
            by_user=window.seconds < HOUR_S and gateways_at[window.since] == 1,
        )
        for window in windows
        for one in window.counts
    ]
    since = windows[0].since
    seconds = windows[-1].since + windows[-1].seconds - since
    return UserView(
        points=points[-MOST_POINTS:],
        total=[point_of(one, since, seconds, by_user=False) for one in _arms_of(windows)],
        marks=[] if log is None else _marks(log, windows[0].since),
        effect=_effect(windows),
        labels=[
            LabelPoint(
                by=one.by,
                name=one.name,
                figures=point_of(one.counts, since, seconds, by_user=False),
            )
            for one in sorted(
                merged_labels(label for window in windows for label in window.labels),
                key=lambda one: one.place,
            )
        ],
    )


def point_of(counts: UserCounts, since: float, seconds: float, *, by_user: bool) -> UserPoint:
    """Returns the figures of one arm and version; ``by_user`` says that each user counts once in
    them, so that figures of users have an interval."""

    def of_users(sums: MeanSums) -> Measured:
        return _measured(sums) if by_user else Measured(mean=sums.mean, count=sums.count)

    return UserPoint(
        since=since,
        seconds=seconds,
        arm=counts.arm,
        version=counts.version if counts.version >= 0 else None,
        upstream=counts.upstream,
        answers=counts.answers,
        errors=share_of(counts.errors, counts.answers),
        left=share_of(counts.left, counts.answers),
        first_s=_measured(counts.first_s),
        tokens=_measured(counts.tokens),
        satisfaction=of_users(counts.satisfaction),
        kinds={kind: of_users(sums) for kind, sums in sorted(counts.kinds.items())},
    )


def _measured(sums: MeanSums) -> Measured:
    low, high = sums.interval or (None, None)
    return Measured(mean=sums.mean, low=low, high=high, count=sums.count)


def share_of(part: int, count: int) -> Measured:
    """Returns a share with its Wilson interval (Wilson 1927), which holds for shares near 0 too."""
    if not count:
        return Measured()
    share = min(part / count, 1.0)
    scale = 1 + Z * Z / count
    middle = (share + Z * Z / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return Measured(
        mean=share, low=max(middle - half, 0.0), high=min(middle + half, 1.0), count=count
    )


def _arms_of(windows: Sequence[UserWindow]) -> list[UserCounts]:
    """Returns the counts of windows by arm, whose versions are one."""
    return merged(
        msgspec.structs.replace(one, version=-1, upstream="")
        for window in windows
        for one in window.counts
    )


def _effect(windows: Sequence[UserWindow]) -> Measured | None:
    weighted, users = 0.0, 0
    for window in windows:
        by = {one.arm: one.satisfaction for one in _arms_of([window])}
        mine, theirs = by.get(SERVING, MeanSums()), by.get(HOLD_BACK, MeanSums())
        if mine.mean is not None and theirs.mean is not None:
            weighted += theirs.count * (mine.mean - theirs.mean)
            users += theirs.count
    return Measured(mean=weighted / users, count=users) if users else None


def _marks(log: DecisionLog, since: float) -> list[DecisionMark]:
    found = []
    for one in log.decisions:
        if one.at < since:
            continue
        figures = one.evidence
        effect = None
        if figures.get("hold_back_users"):
            effect = Measured(
                mean=figures.get("hold_back_difference"),
                low=figures.get("hold_back_low"),
                high=figures.get("hold_back_high"),
                count=int(figures["hold_back_users"]),
            )
        about = one.candidate or one.serving
        words = f"{one.verdict}: {about.words}"
        found.append(
            DecisionMark(
                at=one.at, number=one.number, verdict=one.verdict, words=words, effect=effect
            )
        )
    return found[-MOST_MARKS:]
