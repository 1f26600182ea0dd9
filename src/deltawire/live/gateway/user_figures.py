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

from deltawire.config.ranges import JUDGED, range_of
from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import (
    FAILED,
    FILTERED,
    LEFT,
    MAX_GATEWAY_BYTES,
    TIMED_OUT,
    Feedback,
    GatewayState,
)
from deltawire.wire.objects import decode_json
from deltawire.wire.user_windows import (
    KINDS_AT_MOST,
    MOST_SOURCES,
    LabelCounts,
    LabelKind,
    MeanSums,
    UserCounts,
    UserWindow,
    coarsened,
    fitting,
    merged_labels,
)

WINDOW_S = 900.0
MOST_USERS = 50_000
"""Users of one window whose reports are told apart; of further ones only answers count."""
MOST_REMEMBERED = 100_000
MOST_OVER = 4
"""Windows that wait to be summed up in another thread than that of answers."""
MOST_OPEN_LABELS = 256
LEAST_USERS = 5
"""A task label of one window and arm with fewer users counts among the others."""
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


class Label(NamedTuple):
    """A label of answers: a task, or the client with its API key."""

    by: LabelKind
    name: str


class _Open:
    """One arm and version, or label, of the present window."""

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


_Over = tuple[float, "dict[AnswerSource, _Open]", "dict[tuple[Label, str], _Open]"]


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
        self._labeled: dict[tuple[Label, str], _Open] = {}
        self._over: list[_Over] = []
        self._ended: list[UserWindow] = []
        self._loading = threading.Lock()
        self._loaded = False
        self._places: OrderedDict[str, tuple[AnswerSource, Sequence[Label]]] = OrderedDict()

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
        self,
        answer: str,
        place: AnswerSource,
        *,
        finish: str,
        first_s: float,
        tokens: int | None,
        labels: Sequence[Label] = (),
        user: str = "",
    ) -> None:
        """Counts an answer; ``finish`` is its end, or how it ended early. ``user`` is the pseudonym
        that says how many users a label has."""
        with self._lock:
            found = self._counts_of(place)
            if found is None:
                return
            self._places[answer] = place, labels
            if len(self._places) > MOST_REMEMBERED:
                self._places.popitem(last=False)
            failed = finish in (FAILED, TIMED_OUT, FILTERED)
            labeled = self._counts_by(labels, place.arm)
            for one in labeled:
                if len(one.named) < LEAST_USERS:
                    one.named.add(user)
            for one in (found, *labeled):
                one.answers += 1
                one.errors += failed
                one.left += finish == LEFT
                if failed or finish == LEFT:
                    continue
                one.first_s = one.first_s.with_value(first_s)
                if tokens is not None:
                    one.tokens = one.tokens.with_value(min(float(tokens), MOST_VALUE))

    def reported(self, report: Feedback) -> None:
        """Counts a report of a client, or a judge's score, which has no part in satisfaction;
        signals of detectors are not users' words."""
        judged = report.kind.startswith(JUDGED)
        if report.source == "detector" and not judged:
            return
        with self._lock:
            none: Sequence[Label] = ()
            known = self._places.get(report.answer)
            place, labels = known or (AnswerSource(report.arm), none)
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
            scaled = None if judged else self._scaled(report.kind, report.value)
            if scaled is not None:
                for one in (found, *self._counts_by(labels, place.arm)):
                    self._add(one.users, user, scaled)

    def windows(self) -> list[UserWindow]:
        """Returns all windows, the oldest first, and the present one as it is now."""
        with self._lock:
            self._turn()
            over = list(self._over)
        added = [_window(*one) for one in over]  # Without the lock, which answers wait for.
        with self._lock:
            self._take(over, added)
            ended = list(self._ended)
            open_ = {place: one.copied() for place, one in self._open.items()}
            labeled = {place: one.copied() for place, one in self._labeled.items()}
            since = self._since
        found = coarsened(ended, self._clock())
        present = _window(since, open_, labeled)
        return [*found, present] if present.counts else found

    def stated(self) -> list[UserWindow]:
        """Returns the newest windows that a gateway's state has room for; none where a reader would
        not take them, since what else the state says is needed."""
        try:
            found = fitting(self.windows())
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

    def _counts_by(self, labels: Sequence[Label], arm: str) -> list[_Open]:
        """Returns the counts of labels; those beyond `MOST_OPEN_LABELS` count together."""
        found = []
        for label in labels:
            place = (label, arm)
            if place not in self._labeled and len(self._labeled) >= MOST_OPEN_LABELS:
                place = (Label(label.by, ""), arm)
            found.append(self._labeled.setdefault(place, _Open()))
        return found

    def _turn(self) -> None:
        """Ends the window that is over, and begins the present one."""
        since = self._clock() // WINDOW_S * WINDOW_S
        if since == self._since:
            return
        if self._open:
            self._over.append((self._since, self._open, self._labeled))
        self._since, self._open, self._labeled = since, {}, {}
        if len(self._over) > MOST_OVER:  # No thread has asked for windows: bound the memory.
            self._take(self._over, [_window(*one) for one in self._over])

    def _take(self, over: Sequence[_Over], added: Sequence[UserWindow]) -> None:
        """Takes windows that are over, unless another call has taken them."""
        numbers = {id(one) for one in self._over}
        new = [window for one, window in zip(over, added, strict=True) if id(one) in numbers]
        taken = {id(one) for one in over}
        self._over = [one for one in self._over if id(one) not in taken]
        if new:
            self._ended = coarsened([*self._ended, *new], self._clock())


def _window(
    since: float,
    open_: Mapping[AnswerSource, _Open],
    labeled: Mapping[tuple[Label, str], _Open],
) -> UserWindow:
    return UserWindow(
        since=since,
        seconds=WINDOW_S,
        counts=[_counts(place, one) for place, one in open_.items()],
        labels=merged_labels(
            LabelCounts(
                by=label.by, name=_shown(label, one), counts=_counts(AnswerSource(arm), one)
            )
            for (label, arm), one in labeled.items()
        ),
    )


def _shown(label: Label, counts: _Open) -> str:
    """Returns a label's name; empty for a task of few users, since a product may have written a
    user's name into it."""
    return "" if label.by == "task" and len(counts.named) < LEAST_USERS else label.name


def _counts(place: AnswerSource, one: _Open) -> UserCounts:
    return UserCounts(
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


def _of_users(users: Mapping[str, tuple[int, float]]) -> MeanSums:
    """Returns the sums over users of each one's mean."""
    found = MeanSums()
    for count, total in users.values():
        found = found.with_value(total / count)
    return found
