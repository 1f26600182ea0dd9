"""Outlier detection: leaves out, for a while, a replica whose requests keep failing.

::

    taking ──`FAILURES` in a row──▶ left out, `LEFT_OUT_S` · 2^(times before) ──▶ on trial
      ▲                               ▲                                             │ │
      └───────────────────────────────┼──────────────one success────────────────────┘ │
                                      └──────────────one failure──────────────────────┘

On trial it gets one request at a time. So a replica that always fails gets `FAILURES` requests, if
they come one after another, and then one in ever longer times. At most half of the replicas are
left out, and none where there is one only: if all fail, the cause is no replica's own. Source: the
outlier detection of Envoy, consecutive 5xx; there, a replica that comes back is on no trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAILURES: Final = 5
LEFT_OUT_S: Final = 10.0
LEFT_OUT_AT_MOST_S: Final = 300.0


@dataclass
class Outlier:
    """The outcomes of one replica's requests; times are of a monotonic clock.

    Example::

        outlier = Outlier()
        outlier.report(ok=False, now=time.monotonic(), may_leave_out=True)
        outlier.is_left_out(time.monotonic())
    """

    failures: int = 0
    times: int = 0
    until: float = 0.0

    def is_left_out(self, now: float) -> bool:
        """Returns whether the replica gets no requests now."""
        return now < self.until

    def takes(self, now: float, *, requests: int) -> bool:
        """Returns whether the replica gets one more request now, besides ``requests``."""
        on_trial = self.times > 0
        return not self.is_left_out(now) and not (on_trial and requests)

    def report(self, *, ok: bool, now: float, may_leave_out: bool) -> None:
        """Counts a request that ended. Those that began before the replica was left out change
        nothing while it is."""
        if self.is_left_out(now):
            return
        if ok:
            self.failures = self.times = 0
            return
        self.failures += 1
        if self.failures >= FAILURES and may_leave_out:
            self.until = now + min(LEFT_OUT_S * 2.0**self.times, LEFT_OUT_AT_MOST_S)
            self.times += 1
            self.failures = FAILURES - 1
