"""Detects answers that take longer because too many requests wait in a store at once.

Many stores do not refuse requests: they let them wait. Above their knee, more requests at once get
no more answers a second, and each takes longer. So the mean time of the latest answers is compared
with the lowest mean so far, for objects of about the same size::

    within SLOW times the lowest mean     the store keeps up
    above it, by more than chance         a third of the requests or more wait for others

Means have an error, which the variance of their answers tells, and a difference within `ERRORS` of
these is none: one answer in a hundred may take ten times as long in a store that keeps up. A store
that is far away has a high lowest mean, too, so its latency says nothing against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

SLOW = 1.5
"""Answers count as slow from this multiple of the lowest mean on."""
ROUND = 16
"""The answers after a change of the window before its effect is known, at least; a whole window of
them if that is more."""
FIRST_ROUND = 4
"""As `ROUND`, before anything is known: the window still grows from its smallest size."""
ERRORS = 2.0
"""Standard errors of a mean within which it may be by chance."""
FORGOTTEN = 1e-4
"""With each answer, the lowest mean moves by this share to the present one: chance made it low."""
PATIENCE = 8
"""The rounds with the fewest requests before slow answers count as the store's own time: other
readers may have more under way for so long. With four, 16 readers raise their lowest means one
after another until 200 requests wait in a store that works on 64; with eight it is 104."""
SMALL_BITS, CLASSES = 16, 29
"""Objects below 64 KiB are alike; from there on those within a factor of the square root of two,
below 1 GiB. That is less than `SLOW`: a link takes twice as long for twice as many bytes, and must
not count as a store that is slow. Larger objects are not compared."""


class AnswerTimes:
    """How long answers take, in seconds, by the size of the object.

    Example::

        times = AnswerTimes()
        if times.note(len(data), taken_s=0.31, window=8.0) > SLOW:
            ...  # fewer requests at once
            times.begin()
    """

    def __init__(self) -> None:
        self._count = [0.0] * CLASSES
        self._mean_s = [0.0] * CLASSES
        self._squares = [0.0] * CLASSES
        """The mean of the squares."""
        self._lowest_s = [0.0] * CLASSES
        self._waited = 0.0
        """The slow rounds with the fewest requests so far."""

    def state(self) -> list[float]:
        """Returns what `restore` takes."""
        return [self._waited, *chain(*self._figures())]

    def restore(self, state: Sequence[float]) -> None:
        """Takes over what `state` returned elsewhere."""
        self._waited = state[0]
        for place, of_classes in enumerate(self._figures()):
            of_classes[:] = state[1 + place * CLASSES : 1 + (place + 1) * CLASSES]

    def _figures(self) -> tuple[list[float], ...]:
        return self._count, self._mean_s, self._squares, self._lowest_s

    def begin(self) -> None:
        """Begins a round: the window is another one now, so earlier answers count no more."""
        self._count[:] = [0.0] * CLASSES

    def note(self, size: int, taken_s: float, window: float) -> float:
        """Notes an answer of ``size`` bytes with ``window`` requests at once. Returns how many
        times the lowest mean the present one is, for certain; 0 before the round is over, and for
        an object that is not compared."""
        at = class_of(size)
        if at is None:
            return 0.0
        count = self._count[at] = self._count[at] + 1
        span = max(float(ROUND), window)
        weight = 1 / min(count, span)
        mean_s = self._mean_s[at] + (taken_s - self._mean_s[at]) * weight
        self._mean_s[at] = mean_s
        self._squares[at] += (taken_s * taken_s - self._squares[at]) * weight
        lowest_s = self._lowest_s[at]
        if count < (ROUND if lowest_s > 0 else FIRST_ROUND):
            return 0.0
        error_s = self._error_s(at, weight)
        if not 0 < lowest_s < mean_s + error_s:
            self._lowest_s[at] = mean_s + error_s
            return 1.0
        self._lowest_s[at] += max(mean_s - lowest_s, 0.0) * FORGOTTEN
        return (mean_s - error_s) / lowest_s if count >= span else 0.0

    def settled(self) -> bool:
        """Ends a round of slow answers with the fewest requests. Returns whether that was so for
        `PATIENCE` rounds; then the store takes so long by itself, and later answers are compared
        with these."""
        self._waited += 1
        settled = self._waited >= PATIENCE
        if settled:
            self._waited = 0.0
            for at, count in enumerate(self._count):
                if count >= ROUND:
                    self._lowest_s[at] = self._mean_s[at] + self._error_s(at, 1 / count)
        self.begin()
        return settled

    def _error_s(self, at: int, weight: float) -> float:
        """Returns `ERRORS` standard errors of a mean."""
        variance = max(self._squares[at] - self._mean_s[at] ** 2, 0.0)
        return ERRORS * math.sqrt(variance * weight)


def class_of(size: int) -> int | None:
    """Returns the number of the sizes that an object of ``size`` bytes is compared with; None if
    there are none."""
    bits = size.bit_length()
    if bits <= SMALL_BITS:
        return 0
    upper = size * size >= 1 << (2 * bits - 1)
    at = 2 * (bits - SMALL_BITS) - 1 + upper
    return at if at < CLASSES else None
