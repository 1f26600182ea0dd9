"""Outcomes of users who keep the hold-back version, and of those whom they are compared with."""

from __future__ import annotations

from deltawire.live.release.canary_outcomes import CanaryOutcomes, CanaryRecords
from deltawire.live.release.hold_back import (
    HoldBackEvidence,
    HoldBackPeriod,
    HoldBackTests,
    period_of,
)
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.captures import Capture
from deltawire.wire.decisions import HOLD_BACK, Decision
from deltawire.wire.receipts import SERVING


class HoldBackRecords(CanaryRecords):
    """Answers and reports of the version that serves now and of the hold-back version."""

    def share_of(self, answer: Capture, decision: Decision) -> float | None:
        """Returns the serving version's share among the users who are compared; None for an answer
        that is not compared."""
        compared = answer.arm in (SERVING, HOLD_BACK) and answer.user
        if answer.kept is None or not compared or decision.held_back is None:
            return None
        return 1 - answer.kept


class HoldBackOutcomes(CanaryOutcomes):
    """The evidence of the comparison with the hold-back version.

    Users who have not settled when another version is promoted are left out, in both arms alike.

    Example::

        outcomes = HoldBackOutcomes(bucket, config.live)
        outcomes.compare(log, time.time())
    """

    kind = HoldBackRecords
    _compared: HoldBackTests | None = None

    def compare(self, log: DecisionLog, now: float) -> HoldBackEvidence | None:
        """Reads new rows and returns the evidence so far; None without a hold-back version.
        Raises `RetryError`."""
        period, decision = period_of(log, self._release), log.newest
        if period is None or decision is None:
            return None
        if self.follow(_name(period), decision, period.since) or self._compared is None:
            self._compared = HoldBackTests(self._release, period)
        self._compared.add(self.settled(decision, now))
        return self._compared.evidence()


def _name(period: HoldBackPeriod) -> tuple[object, ...]:
    return period.serving, period.held, period.share, period.since
