"""A clock of a test, which passes only while somebody waits for a store."""

from __future__ import annotations

from collections.abc import Callable


class OutageClock:
    """Seconds for an `Outage`; calls ``then`` once ``seconds`` of them have passed.

    Example::

        clock = OutageClock(300, bucket.heal)
        publisher.outage.clock, publisher.outage.wait = clock, clock.wait
    """

    def __init__(self, seconds: float, then: Callable[[], None] | None) -> None:
        self.now = 0.0
        self._at, self._then = seconds, then

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Lets ``seconds`` pass at once."""
        self.now += seconds
        if self._then is not None and self.now >= self._at:
            then, self._then = self._then, None
            then()

    def start(self, seconds: float, then: Callable[[], None]) -> None:
        """Calls ``then`` once ``seconds`` more have passed."""
        self._at, self._then = self.now + seconds, then
