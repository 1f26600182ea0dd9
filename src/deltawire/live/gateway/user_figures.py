"""User figures: how answers and their users fared, by arm and version, in windows of time.

::

    event loop: answered(), reported() ─▶ the present window, with users' sums in memory
    uploader's thread: windows() ─▶ the gateway's state in the bucket

A window is counts and sums only. Within it each user counts once for each kind of feedback, by the
mean of its reports, so that a user who reports much does not look like many. Names of users stay in
memory, and only until the window ends. Windows become longer as they age, so that they take bounded
space.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import msgspec

from deltawire.config.ranges import range_of
from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, Feedback, GatewayState
from deltawire.wire.objects import decode_json
from deltawire.wire.user_windows import (
    KINDS_AT_MOST,
    MOST_SOURCES,
    MeanSums,
    UserCounts,
    UserWindow,
    coarsened,
    fitting,
)

WINDOW_S = 900.0
MOST_USERS = 50_000
"""Users of one window whose reports are told apart; of further ones only answers count."""
MOST_REMEMBERED = 100_000
MOST_VALUE = 1e9
"""Values beyond it, either way, count as this."""
_LOG = logging.getLogger("deltawire.live")
OTHER = "other"
"""Further kinds of feedback of one arm count together."""


class AnswerSource(NamedTuple):
    """An arm, and the version or the upstream that answered, as far as it is known."""

    arm: str
    version: int = -1
    upstream: str = ""


class _Open:
    """One arm and version of the present window."""

    def __init__(self) -> None:
        self.answers = self.errors = self.left = 0
        self.first_s, self.tokens = MeanSums(), MeanSums()
        self.kinds: dict[str, dict[str, tuple[int, float]]] = {}
        self.users: dict[str, tuple[int, float]] = {}
        self.named: set[str] = set()
        self.reports: dict[str, int] = {}

    def copied(self) -> _Open:
        """Returns a copy that nobody changes."""
        found = copy(self)
        found.kinds = {kind: dict(users) for kind, users in self.kinds.items()}
        found.users, found.reports = dict(self.users), dict(self.reports)
        return found


class UserFigures:
    """The figures of one gateway. ``ranges`` are those of `LiveConfig`: a kind without a range has
    a mean, and no part in satisfaction.

    Example::

        figures = UserFigures(config.live.ranges)
        figures.answered("a1", AnswerSource("serving", 4), finish="stop", first_s=0.2, tokens=31)
        figures.reported(report)
        figures.windows()
    """

    def __init__(
        self, ranges: Mapping[str, Sequence[float]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._ranges = ranges
        self._clock = clock
        self._lock = threading.Lock()
        self._since = 0.0
        self._open: dict[AnswerSource, _Open] = {}
        self._ended: list[UserWindow] = []
        self._loading = threading.Lock()
        self._loaded = False
        self._places: OrderedDict[str, AnswerSource] = OrderedDict()

    def load_from(self, bucket: Bucket, gateway: str) -> None:
        """Goes on from the windows that a gateway of this name stored before, once. If they cannot
        be decoded, it begins without them: these figures only inform people. Raises `RetryError`
        if the bucket does not answer; call it again then, and before the windows are written
        over."""
        with self._loading:
            if not self._loaded:
                self._load_from(bucket, gateway)

    def start_loading(self, bucket: Bucket, gateway: str) -> None:
        """Tries `load_from` once, in a thread."""

        def load() -> None:
            with contextlib.suppress(RetryError):
                self.load_from(bucket, gateway)

        threading.Thread(target=load, name="live-figures", daemon=True).start()

    def _load_from(self, bucket: Bucket, gateway: str) -> None:
        key = keys.live_gateway(gateway)
        try:
            data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
            windows = (
                decode_json(data, GatewayState, run=bucket.url, key=key).windows if data else []
            )
        except RetryError:
            raise
        except DeltawireError as error:
            _LOG.warning("figures of earlier answers are left out: %s", error.message)
            windows = []
        with self._lock:
            self._ended = [*windows, *self._ended]
            self._loaded = True

    def answered(
        self, answer: str, place: AnswerSource, *, finish: str, first_s: float, tokens: int | None
    ) -> None:
        """Counts an answer; ``finish`` is its end, or how it ended early."""
        with self._lock:
            found = self._counts_of(place)
            if found is None:
                return
            self._places[answer] = place
            if len(self._places) > MOST_REMEMBERED:
                self._places.popitem(last=False)
            found.answers += 1
            found.errors += finish in ("error", "timeout")
            found.left += finish == "left"
            if finish not in ("error", "timeout", "left"):
                found.first_s = found.first_s.with_value(first_s)
                if tokens is not None:
                    found.tokens = found.tokens.with_value(min(float(tokens), MOST_VALUE))

    def reported(self, report: Feedback) -> None:
        """Counts a report of a client; signals of detectors are not users' words."""
        if report.source == "detector":
            return
        with self._lock:
            place = self._places.get(report.answer, AnswerSource(report.arm))
            found = self._counts_of(place)
            if found is None:
                return
            kind = report.kind
            if kind not in found.reports and len(found.reports) >= KINDS_AT_MOST - 1:
                kind = OTHER
            found.reports[kind] = found.reports.get(kind, 0) + 1
            user = report.user or report.conversation
            if user not in found.named and len(found.named) >= MOST_USERS:
                return
            found.named.add(user)
            value = min(max(report.value, -MOST_VALUE), MOST_VALUE)
            self._add(found.kinds.setdefault(kind, {}), user, value)
            scaled = self._scaled(report.kind, report.value)
            if scaled is not None:
                self._add(found.users, user, scaled)

    def windows(self) -> list[UserWindow]:
        """Returns all windows, the oldest first, and the present one as it is now."""
        with self._lock:
            self._turn()
            ended = list(self._ended)
            open_ = {place: one.copied() for place, one in self._open.items()}
            since = self._since
        found = coarsened(ended, self._clock())
        present = _window(since, open_)
        return [*found, present] if present.counts else found

    def stated(self) -> list[UserWindow]:
        """Returns the newest windows that a gateway's state has room for; none where a reader would
        not take them, since what else the state says is needed."""
        found = fitting(self.windows())
        try:
            msgspec.json.decode(msgspec.json.encode(found), type=list[UserWindow])
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            _LOG.error("figures of users are left out: %s", str(error)[:200])
            return []
        return found

    @staticmethod
    def _add(sums: dict[str, tuple[int, float]], user: str, value: float) -> None:
        count, total = sums.get(user, (0, 0.0))
        sums[user] = count + 1, total + value

    def _scaled(self, kind: str, value: float) -> float | None:
        """Return a value from 0, the worst, to 1, the best; None for a kind without a range."""
        try:
            worst, best = range_of(self._ranges, kind)
        except InputError:
            return None
        return min(max((value - worst) / (best - worst), 0.0), 1.0)

    def _counts_of(self, place: AnswerSource) -> _Open | None:
        self._turn()
        if place not in self._open and len(self._open) >= MOST_SOURCES:
            return None
        return self._open.setdefault(place, _Open())

    def _turn(self) -> None:
        """Ends the window that is over, and begins the present one."""
        since = self._clock() // WINDOW_S * WINDOW_S
        if since == self._since:
            return
        ended = _window(self._since, self._open)
        if ended.counts:
            self._ended = coarsened([*self._ended, ended], self._clock())
        self._since, self._open = since, {}


def _window(since: float, open_: Mapping[AnswerSource, _Open]) -> UserWindow:
    return UserWindow(
        since=since,
        seconds=WINDOW_S,
        counts=[
            UserCounts(
                arm=place.arm,
                version=place.version,
                upstream=place.upstream,
                answers=one.answers,
                errors=one.errors,
                left=one.left,
                first_s=one.first_s,
                tokens=one.tokens,
                satisfaction=_of_users(one.users),
                kinds={kind: _of_users(users) for kind, users in one.kinds.items()},
                reports=dict(one.reports),
            )
            for place, one in open_.items()
        ],
    )


def _of_users(users: Mapping[str, tuple[int, float]]) -> MeanSums:
    """Returns the sums over users of each one's mean."""
    found = MeanSums()
    for count, total in users.values():
        found = found.with_value(total / count)
    return found
