"""How users fare, by arm and version, over time: satisfaction, feedback, errors, latency, length.

Gateways store counts and sums in windows (`deltawire.wire.user_windows`), which name no user. A
user who is served by two gateways in one window counts twice, and one who comes back in a later
window counts again, so intervals of many windows together are somewhat too narrow. Decisions rest
on the tests of `deltawire.live.release`, never on these figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import HOLD_BACK
from deltawire.wire.receipts import SERVING
from deltawire.wire.user_windows import MeanSums, UserCounts, UserWindow, Z, coarsened, merged

MOST_POINTS = 1024
MOST_MARKS = 256
LEAST_USERS = 2


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A mean or share, with the ends of its interval of 95 %, and what it is the mean of."""

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


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``total`` is each arm over the whole time, and ``effect`` the satisfaction of the
    serving arm less that of users of the hold-back version."""

    points: list[UserPoint]
    total: list[UserPoint]
    marks: list[DecisionMark]
    effect: Measured | None = None


def users_of(
    gateways: Sequence[GatewayState], log: DecisionLog | None, now: float
) -> UserView | None:
    """Returns the figures of all gateways together; None if they have none."""
    windows = coarsened([one for gateway in gateways for one in gateway.windows], now)
    if not windows:
        return None
    points = [point_of(window, one) for window in windows for one in window.counts]
    total = _total(windows)
    return UserView(
        points=points[-MOST_POINTS:],
        total=[point_of(total, one) for one in total.counts],
        marks=[] if log is None else _marks(log, windows[0].since),
        effect=_effect(total.counts),
    )


def point_of(window: UserWindow, counts: UserCounts) -> UserPoint:
    """Returns the figures of one arm and version."""
    return UserPoint(
        since=window.since,
        seconds=window.seconds,
        arm=counts.arm,
        version=counts.version if counts.version >= 0 else None,
        upstream=counts.upstream,
        answers=counts.answers,
        errors=share_of(counts.errors, counts.answers),
        left=share_of(counts.left, counts.answers),
        first_s=_measured(counts.first_s),
        tokens=_measured(counts.tokens),
        satisfaction=_measured(counts.satisfaction),
        kinds={kind: _measured(sums) for kind, sums in sorted(counts.kinds.items())},
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


def _total(windows: Sequence[UserWindow]) -> UserWindow:
    """Returns all windows as one, in which an arm's versions are one."""
    counts = [
        msgspec.structs.replace(one, version=-1, upstream="")
        for window in windows
        for one in window.counts
    ]
    since = windows[0].since
    seconds = min(windows[-1].since + windows[-1].seconds - since, 86_400.0)
    return UserWindow(since=since, seconds=seconds, counts=merged(counts))


def _effect(counts: Sequence[UserCounts]) -> Measured | None:
    by = {one.arm: one.satisfaction for one in counts}
    mine, theirs = by.get(SERVING, MeanSums()), by.get(HOLD_BACK, MeanSums())
    if mine.mean is None or theirs.mean is None or mine.error is None or theirs.error is None:
        return None
    difference, half = mine.mean - theirs.mean, Z * math.hypot(mine.error, theirs.error)
    return Measured(
        mean=difference, low=difference - half, high=difference + half, count=theirs.count
    )


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
