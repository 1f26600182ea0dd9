"""Limits of a session of ``deltawire run`` in hours and dollars, and the command that is told of
them, of failures and of stalls."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable

from deltawire.errors import InputError

NOTIFY_S = 60.0
"""The longest that the command is waited for."""


class Deadline:
    """Asks a session to stop once its time is over, as a signal does.

    Example::

        deadline = Deadline(3600.0)
        deadline.start(stop)
        ...
        deadline.cancel()
    """

    def __init__(self, limit_s: float) -> None:
        self.reached = False
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def start(self, stop: list[int]) -> None:
        """Begins; appends 0 to ``stop`` when the time is over."""

        def expire() -> None:
            self.reached = True
            stop.append(0)

        # A timer waits at most as long as its lock can.
        self._timer = threading.Timer(min(self._limit_s, threading.TIMEOUT_MAX), expire)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()


class StallAlarm:
    """Reports once each time in which no version was committed for ``limit_s``.

    ``report`` gets the reason, in a thread: the command that it runs may take a minute.

    Example::

        alarm = StallAlarm(1800.0, lambda reason: print(reason))
        alarm.observe(version)
    """

    def __init__(
        self,
        limit_s: float,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._report, self._clock = limit_s, report, clock
        self._version: int | None = None
        self._since = clock()
        self._told = False

    def observe(self, version: int | None) -> None:
        """Notes the newest version, None before the first."""
        now = self._clock()
        if version != self._version:
            self._version, self._since, self._told = version, now, False
        elif not self._told and now - self._since >= self._limit_s:
            self._told = True
            held = "no version was committed" if version is None else f"no version after {version}"
            reason = f"{held} for {self._limit_s:.0f} s (faults.long_s)"
            threading.Thread(target=self._report, args=(reason,), daemon=True).start()


def deadline_of(
    max_hours: float | None, max_dollars: float | None, hourly_dollars: float | None
) -> Deadline | None:
    """Returns the earlier of both limits, None without any.

    Raises `InputError` for a number that is not above 0, or dollars without their rate.
    """
    given = {
        "--max-hours": max_hours,
        "--max-dollars": max_dollars,
        "--hourly-dollars": hourly_dollars,
    }
    for flag, value in given.items():
        if value is not None and not 0 < value < 1e9:
            raise InputError(f"{flag} {value} is no number above 0")
    if (max_dollars is None) != (hourly_dollars is None):
        raise InputError(
            "--max-dollars and --hourly-dollars are given together",
            hint="--hourly-dollars is what all machines of the run cost in an hour",
        )
    limits = [] if max_hours is None else [max_hours]
    if max_dollars is not None and hourly_dollars is not None:
        limits.append(max_dollars / hourly_dollars)
    return Deadline(3600.0 * min(limits)) if limits else None


def notify(command: str, *, event: str, run: str, reason: str) -> str:
    """Runs a command with ``DELTAWIRE_EVENT``, ``DELTAWIRE_RUN`` and ``DELTAWIRE_REASON`` in its
    environment; returns why it failed, empty if it did not. Nothing is done without a command."""
    if not command:
        return ""
    told = {"DELTAWIRE_EVENT": event, "DELTAWIRE_RUN": run, "DELTAWIRE_REASON": reason[:4096]}
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command, without a shell
            shlex.split(command), env={**os.environ, **told}, timeout=NOTIFY_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as failure:
        return f"--notify: {failure}"
    return f"--notify ended with status {done.returncode}" if done.returncode else ""
