"""Progress alarm: detects steps that change nothing.

A run can go on for days without learning: every group has equal rewards, every token is masked or
rejected, gradients are not finite, or updates are so small that no published weight changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltawire.events import Event, NoProgress
from deltawire.train.step import StepResult

AFTER_STEPS = 3
"""Steps in a row that move nothing before the first alarm; the next follow at each doubling."""


class ProgressAlarm:
    """Records a `NoProgress` event once several steps in a row moved nothing.

    `step` is called by the main thread, `committed` by the publisher's thread.

    Example::

        alarm = ProgressAlarm(process.events.record)
        alarm.step(version, result)
        alarm.committed(version, receipt.changed)
    """

    def __init__(self, record: Callable[[Event], None], *, process: str = "trainer") -> None:
        self._record = record
        self._process = process
        self._reasons: dict[int, str] = {}
        self._in_row = 0
        self._lock = threading.Lock()

    def step(self, version: int, result: StepResult) -> None:
        """Note why the step that makes ``version`` moves nothing, if it does."""
        with self._lock:
            self._reasons[version] = _reason(result)

    def committed(self, version: int, changed: int) -> None:
        """Note how many published elements a version changed."""
        with self._lock:
            reason = self._reasons.pop(version, "")
            if not changed:
                reason = reason or "its update changes no published weight"
            self._in_row = self._in_row + 1 if reason else 0
            in_row = self._in_row
        if in_row >= AFTER_STEPS and in_row % AFTER_STEPS == 0 and _is_power(in_row // AFTER_STEPS):
            self._record(
                NoProgress(
                    process=self._process,
                    at=time.time(),
                    version=version,
                    steps=in_row,
                    reason=reason,
                )
            )


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _reason(result: StepResult) -> str:
    if result.rejected >= 1:
        return "corrections reject every token"
    if result.members and len(result.parity.masked) == len(result.members):
        return "parity.mask removes every sequence"
    if result.grad_norm != result.grad_norm:
        return "its gradient is not finite"
    if not result.grad_norm:
        return "its gradient is zero: all rewards of each group are equal, or all is clipped"
    return ""
