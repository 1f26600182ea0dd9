"""Limits the requests of a process to one store by how the store answers.

A store answers *too many requests* (S3: 503, GCS: 429) above some rate for a prefix. Readers that
go on with as many requests as before, and repeat the refused ones, keep the store above its rate
and get nothing done. So a process has a window: the number of requests that it has under way. It
grows while the store keeps up, by at most one in the time of one answer, and is halved when the
store refuses, once for all requests that were under way then; one below one loses less. Requests of
a window below `PACED` begin at equal intervals, so that it may be less than one::

    window 8      eight requests at once
    window 0.25   one request in the time of four answers

A store may also let requests wait instead of refusing them. Answers then take longer with more
requests under way, so the window is halved when they take half as long again as the quickest ones
(`deltawire.store.answer_times`), down to `SLOW_LEAST`, and does not grow before the effect is
known. If answers take as long with so few, this is what the store takes now: the window grows
again, and later answers are compared with these.

A window below one is needed: sixteen hosts that share a store of ten requests a second have less
than one request each under way. A store that refuses everything gets one request in `LEAST` of the
time: at 100 ms an answer, one in 102 s.

The growth decides how many requests are refused and how unequal the windows of many readers are.
With an answer, a window of w grows by `GROWTH` times w to the `POWER`. Growth in proportion to w
would cost the same share of refusals at any w, but windows would never become alike; the same
growth at any w (Chiu and Jain 1989) makes them alike soonest, and is refused every other time where
w is small. Tried by `benchmarks.scale.storm`; docs/LOG.md has the figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

from deltawire.store.answer_times import ROUND, SLOW, AnswerTimes, class_of
from deltawire.store.traffic import count

Outcome = Literal["answered", "refused", "lost"]
"""How a request ended: ``lost`` ones got no answer, which says nothing about the store's rate."""

MOST = 64.0
"""Requests under way at most: at 20 ms an answer 3,200 a second, below S3's 5,500 for a prefix."""
FIRST = 2.0
"""The window at first. It doubles in the time of an answer until the store refuses a request or
answers slowly. A larger one costs refusals where many readers start at once."""
LEAST = 1 / 1024
GROWTH, POWER = 0.05, 0.4
LARGE_LEFT, SMALL_LEFT = 0.5, 0.7
"""The shares that a refusal leaves of a window, and of one of at most one request. That one asks
seldom, so two refusals by chance would keep it small for long, and the last reader would be late.
"""
SLOW_LEAST = 4.0
"""Slow answers leave so many requests. With half as many, a reader whose machine is busy, so that
its answers take one to eight times as long from second to second, needs up to three times longer;
with twice as many, 16 readers leave 175 instead of 105 requests in a store that works on 64."""
ALSO_REFUSED = 0.65
"""The window loses so much for each further refusal of the same requests, down to one."""
PACED = 4.0
"""Requests of a smaller window begin at equal intervals; one of 1.1 would else act as two."""
LEAST_PAUSE_S, PAUSE_SHARE = 0.3, 0.5
"""A pause after a refusal lasts at most `LEAST_PAUSE_S`, four times the pauses before it, or this
share of the time since the last answer, whichever is longest: a few refusals by chance would
otherwise cost a reader half a minute."""
IDLE_S = 5.0
WRITERS_LEAST = 8.0
"""The smallest window of a commit's reads: readers yield, so a commit keeps its requests."""
LEAST_ANSWER_S = 0.02
STALLED_S, STALLED_ANSWERS = 5.0, 8.0
"""A request without an answer for so long, and for so many mean answers, leaves the window."""
SMOOTHING = 0.2
"""The weight of one answer in the mean duration."""


class RequestWindow:
    """How many requests may be under way, by what became of earlier ones. Times are in seconds, by
    the caller's clock.

    Example::

        window = RequestWindow()
        if window.opens_at(under_way=3) <= now:
            window.sent(under_way=3, now=now)
            ...  # send a request
            window.answered(began, now)
    """

    def __init__(self, most: float = MOST, least: float = LEAST) -> None:
        self.size, self.most, self.least = max(min(FIRST, most), least), most, least
        self.refusals = 0
        self._answer_s, self._answered = 0.0, False
        self._doubles_to = most
        """The size up to which the window doubles in the time of an answer."""
        self._used_at = -1.0
        self._answered_at = self._paused_s = 0.0
        """When the last answer came, and the seconds between two requests then."""
        self._shrunk_at = float("-inf")
        self._sent_at = float("-inf")
        self._times = AnswerTimes()
        self._held = False
        """The window does not grow: it became smaller, and the effect is not known yet."""
        self._untold = 0
        """The answers since the last one that could tell it."""

    def state(self) -> tuple[float, ...]:
        """Returns what `restore` takes, for another process of this host."""
        return (*(float(getattr(self, name)) for name in _STATE), *self._times.state())

    def restore(self, state: Sequence[float], now: float) -> None:
        """Takes over the state of another process's window, unless it is none, or of the time
        before a restart of the machine."""
        own, times = state[: len(_STATE)], state[len(_STATE) :]
        if self.least <= own[0] <= self.most and max(own[-_TIMES:]) <= now + 1.0:
            for name, value in zip(_STATE, own, strict=True):
                setattr(self, name, type(getattr(self, name))(value))
            self._times.restore(times)

    @property
    def request_s(self) -> float:
        """The seconds from one request to the next that this window allows."""
        return max(self._answer_s, LEAST_ANSWER_S) / self.size

    @property
    def stalled_s(self) -> float:
        """The seconds after which a request no longer counts as under way. It asks nothing more of
        the store; two requests that hang would keep all others of a small window waiting until the
        client gives up, heartbeats too."""
        return max(STALLED_S, STALLED_ANSWERS * self._answer_s)

    def opens_at(self, under_way: int) -> float:
        """Returns the time from which on one more request may begin; infinity while too many are
        under way."""
        if under_way >= max(self.size, 1.0):
            return float("inf")
        return self._sent_at + (self.request_s if self.size < PACED else 0.0)

    def sent(self, under_way: int, now: float) -> None:
        """Notes that a request begins, with ``under_way`` others. A window that was not half used
        for `IDLE_S` says nothing about the store now, so it begins again."""
        self._sent_at = now
        if under_way + 1 >= self.size / 2 or self._used_at < 0:
            self._used_at = now
        elif now - self._used_at > IDLE_S and self.size > FIRST:
            self._doubles_to, self.size = self.size / 2, max(FIRST, self.least)
            self._used_at, self._held = now, False

    def answered(self, began: float, now: float, size: int | None = None) -> None:
        """Notes an answer to a request of ``began``, an object of ``size`` bytes or None if it is
        no object."""
        taken = max(now - began, 0.0)
        self._answer_s += (taken - self._answer_s) * (SMOOTHING if self._answered else 1.0)
        self._answered = True
        if began <= self._used_at and not self._held:
            slow = GROWTH * self.size**POWER
            growth = 1.0 if self.size < self._doubles_to else min(1 / self.size, slow)
            self.size = min(self.size + growth, self.most)
        if size is None or class_of(size) is None:
            # Of listings and the like nobody will know the effect.
            self._untold += 1
            self._held = self._held and self._untold < max(ROUND, self.size)
        elif began > self._shrunk_at:
            self._untold = 0
            self._compare(self._times.note(size, taken, self.size), now)
        self._answered_at, self._paused_s = now, self.request_s

    def _compare(self, slower: float, now: float) -> None:
        """Halves the window if answers are more than `SLOW` times ``slower`` than they were; 0 is
        not known yet."""
        least = max(SLOW_LEAST, self.least)
        if slower <= SLOW:
            self._held = self._held and slower <= 0
        elif self.size > least:
            self._held = True
            self.size, self._shrunk_at = max(self.size / 2, least), now
            self._doubles_to = 0.0
            self._times.begin()
        elif self._times.settled():
            self._held = False

    def refused(self, began: float, now: float) -> None:
        """Notes that the store refused a request of ``began`` because there are too many."""
        self.refusals += 1
        self._doubles_to, self._held = 0.0, False
        if not self._answered:
            self._answer_s = max(self._answer_s, now - began)
            self._answered_at = self._answered_at or began
        if began > self._shrunk_at:  # The others were sent before this was known.
            left = LARGE_LEFT if self.size > 1 else SMALL_LEFT
            self.size, self._shrunk_at = max(self.size * left, self.least), now
        elif self.size > 1:
            # Of a large window that was refused as a whole, little is left at once.
            self.size = max(self.size - ALSO_REFUSED, 1.0, self.least)
        waited_s = now - self._answered_at
        longest_s = max(4 * self._paused_s, LEAST_PAUSE_S, PAUSE_SHARE * waited_s)
        self.size = max(self.size, min(1.0, max(self._answer_s, LEAST_ANSWER_S) / longest_s))


_STATE = (
    "size", "refusals", "_answer_s", "_answered", "_doubles_to", "_paused_s", "_held", "_untold",
    "_used_at", "_answered_at", "_sent_at", "_shrunk_at",
)  # fmt: skip
_TIMES = 4
"""How many of these, the last ones, are times."""


class Asked:
    """A request under way. Its caller sets ``size``, the bytes of the object that it got."""

    size: int | None = None


class RequestLimit:
    """Lets the requests of this process to one store begin when its window has room.

    Example::

        with limit.request(outcome_of) as asked:
            data = ...  # send one request; its error may make the window smaller
            asked.size = len(data)
    """

    nap_s = 1.0
    """The longest wait before the window is looked at again."""

    def __init__(
        self,
        window: RequestWindow | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window = window or RequestWindow()
        self._clock = clock
        self._under_way = 0
        self._begun: list[float] = []
        """When each request of this process that is under way began."""
        self._admitted_at = 0.0
        self._preferred = 0
        """The requests other than bulk ones that wait for room."""
        self._changed = threading.Condition()

    @contextmanager
    def request(
        self, outcome_of: Callable[[BaseException], Outcome], *, bulk: bool = False
    ) -> Iterator[Asked]:
        """Waits for room, and notes how the request ends; ``outcome_of`` says what its error means.
        A ``bulk`` request waits while another one does."""
        with self._changed:
            self._preferred += not bulk
            try:
                while (wait_s := self._admit(bulk=bulk)) > 0:
                    self._changed.wait(min(wait_s, self.nap_s))
            finally:
                if not bulk:
                    self._preferred -= 1
                    self._changed.notify_all()
            began = self._admitted_at
        outcome: Outcome = "answered"
        asked = Asked()
        try:
            yield asked
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            with self._changed:
                self._end(outcome, began, asked.size)
                self._changed.notify_all()

    def _admit(self, *, bulk: bool) -> float:
        """Begins a request and returns 0 if there is room, else how long to wait for it."""
        if bulk and self._preferred:
            return float("inf")
        if self._under_way >= self.window.most:
            return float("inf")
        now = self._clock()
        stalled_s = self.window.stalled_s
        counted = self._under_way - sum(now - began > stalled_s for began in self._begun)
        wait_s = max(self.window.opens_at(counted) - now, 0.0)
        if wait_s <= 0:
            self.window.sent(counted, now)
            self._under_way += 1
            self._begun.append(now)
            self._admitted_at = now
        return wait_s

    def _end(self, outcome: Outcome, began: float, size: int | None) -> None:
        """Notes the end of a request, and the bytes of an object that it got."""
        self._under_way -= 1
        with suppress(ValueError):  # A forked child ends what its parent began.
            self._begun.remove(began)
        now = self._clock()
        if outcome == "answered":
            self.window.answered(began, now, size)
        elif outcome == "refused":
            self.window.refused(began, now)


_LIMITS: dict[tuple[str, bool], RequestLimit] = {}
_SHARED: set[tuple[str, bool]] = set()
_REFUSED: dict[str, tuple[float, float]] = {}
"""When each store began to refuse requests, and when it refused the last one."""
REFUSING_S = 60.0
"""For so long after a refusal a store counts as one that refuses."""
_LOCK = threading.Lock()


def limit_of(url: str, *, first: bool = False) -> RequestLimit:
    """Returns this process's limit for the store and bucket of a URL: that of commits if ``first``,
    else that of all other reads."""
    place = _place(url), first
    with _LOCK:
        if place not in _LIMITS:
            window = RequestWindow(least=WRITERS_LEAST) if first else RequestWindow()
            _LIMITS[place] = RequestLimit(window)
        return _LIMITS[place]


def share_limit(url: str, make: Callable[[], RequestLimit]) -> None:
    """Replaces this process's limit of reads for the store of a URL by one that `make` returns, the
    same one for all callers; later calls change nothing."""
    place = _place(url), False
    with _LOCK:
        if place not in _SHARED:
            _LIMITS[place] = make()
            _SHARED.add(place)


def note_refusal(url: str) -> None:
    """Remembers that the store of a URL refused a request of this process just now."""
    count("refused")
    now = time.monotonic()
    with _LOCK:
        since, last = _REFUSED.get(_place(url), (now, now))
        _REFUSED[_place(url)] = (since if now - last < REFUSING_S else now), now


def refused_ago_s(url: str) -> float:
    """Returns how long ago the store of a URL refused a request of this process because there were
    too many; infinity if it never did."""
    found = _REFUSED.get(_place(url))
    return float("inf") if found is None else time.monotonic() - found[1]


def refusals_of(url: str) -> str:
    """Describes why this process is late: for how long the store of a URL has refused some of its
    requests, and how many it may make; empty if it does not refuse any."""
    found = _REFUSED.get(_place(url))
    if found is None or time.monotonic() - found[1] > REFUSING_S:
        return ""
    rate = 1 / limit_of(url).window.request_s
    return (
        f"late: the store has refused requests for {time.monotonic() - found[0]:.0f} s because "
        f"there are too many; this process may make {rate:.3g} reads a second"
    )


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
