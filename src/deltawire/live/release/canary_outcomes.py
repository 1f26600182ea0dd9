"""Outcomes of the canary that is under way, read as they come and kept in bounded memory.

::

    segments ─▶ rows of this canary ─▶ (an answer has settled) ─▶ `CanaryTests`

An answer settles `outcome_after_s` after its end, or after the end that an answer of `slow_s` would
have had, whichever is later. Counted by its end only, an arm that answers a few seconds later than
the other would have fewer outcomes at each early look, as if its users had not reached it.

Rows of other answers are read and forgotten. A row is kept until its answer settles, at most
`LATE_S` longer; after that only the sums of the tests, the names of users and of answers remain.
"""

from __future__ import annotations

from deltawire.config.live import LiveConfig
from deltawire.live.learning.records import LiveRecords
from deltawire.live.release.evidence import CanaryTests, Evidence, HeldoutAccuracy
from deltawire.live.release.outcomes import OutcomeRules, SettledAnswer
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.decisions import Decision

CANDIDATE_ACCURACY, SERVING_ACCURACY = "candidate_accuracy", "serving_accuracy"
"""Figures of the decision that let a candidate pass the evaluation gate."""
LATE_S = 3600.0
"""Reports wait this long, after they would have settled, for an answer that was uploaded late."""


class CanaryRecords(LiveRecords):
    """Answers and reports of one canary that have not settled.

    Example::

        records = CanaryRecords(bucket, OutcomeRules(config.live))
        records.follow(decision, since=log.canary_since())
        records.poll()
    """

    judges = True

    def __init__(self, bucket: Bucket, rules: OutcomeRules) -> None:
        super().__init__(bucket)
        self.settled: set[bytes] = set()
        self._rules = rules
        self._decision: Decision | None = None
        self._since = float("inf")
        self._before: dict[str, str] = {}

    def follow(self, decision: Decision, *, since: float) -> None:
        """Keeps rows of this canary from now on. Those that the last poll read, when the decision
        was not known yet, are read again."""
        self.answers.clear()
        self.reports.clear()
        self.settled.clear()
        self._decision, self._since = decision, since
        self._read = dict(self._before)

    def poll(self) -> int:
        """Reads new segments, and returns how many rows of the canary were new."""
        before = dict(self._read)
        found = super().poll()
        self._before = before
        return found

    def _add(self, row: Capture | Feedback) -> bool:
        served_at = row.at if isinstance(row, Capture) else row.served_at
        if served_at < self._since or bytes.fromhex(row.answer) in self.settled:
            return False
        if isinstance(row, Capture):
            decision = self._decision
            if decision is None or self._rules.assigned(row, decision) is None:
                return False
        return super()._add(row)

    def settle(self, answer: Capture) -> list[Feedback]:
        """Forgets an answer; returns the reports about it."""
        del self.answers[answer.answer]
        self.settled.add(bytes.fromhex(answer.answer))
        return list(self.reports.pop(answer.answer, {}).values())

    def expire(self, served_before: float) -> None:
        """Forgets reports about answers that were served earlier and are not there."""
        for answer, about in list(self.reports.items()):
            if answer not in self.answers and all(
                one.served_at < served_before for one in about.values()
            ):
                del self.reports[answer]


class CanaryOutcomes:
    """The evidence of whichever canary is under way.

    Example::

        outcomes = CanaryOutcomes(bucket, config.live)
        outcomes.poll(log, time.time())
    """

    def __init__(self, bucket: Bucket, live: LiveConfig) -> None:
        self._rules = OutcomeRules(live)
        self._release = live.release
        self.records = CanaryRecords(bucket, self._rules)
        self._canary: tuple[object, ...] = ()
        self._tests = CanaryTests(live.release)
        self._users: set[str] = set()

    def poll(self, log: DecisionLog, now: float) -> Evidence | None:
        """Reads what is new, and returns the evidence so far; None without a canary. Raises
        `RetryError`."""
        since, decision = log.canary_since(), log.newest
        if since is None or decision is None:
            return None
        canary = decision.salt, decision.candidate, decision.serving
        if canary != self._canary:
            self.records.follow(decision, since=since)
            self._canary = canary
            self._tests = CanaryTests(self._release, _heldout(log, decision))
            self._users = set()
        self.records.poll()
        self._tests.add(self._settled(decision, now))
        self.records.expire(now - self._release.outcome_after_s - LATE_S)
        return self._tests.evidence()

    def _settled(self, decision: Decision, now: float) -> list[SettledAnswer]:
        """Takes the answers that have settled since the last call, the earliest first."""
        after_s, found = self._release.outcome_after_s, []
        ends = {one.answer: self._end(one) for one in self.records.answers.values()}
        ripe = [one for one in self.records.answers.values() if ends[one.answer] <= now - after_s]
        for answer in sorted(ripe, key=lambda one: (ends[one.answer], one.answer)):
            reports = self.records.settle(answer)
            share = self._rules.assigned(answer, decision)
            first = answer.user not in self._users
            self._users.add(answer.user)
            if share is not None and (first or self._release.unit == "answer"):
                values = self._rules.values(answer, reports)
                settled = ends[answer.answer] + after_s
                found.append(SettledAnswer(settled, answer.arm, share, first, values))
        return found

    def _end(self, answer: Capture) -> float:
        """Returns when an answer ended, or when one of `slow_s` would have, in seconds since
        1970."""
        return max(answer.at, answer.at - answer.total_s + self._release.slow_s)


def _heldout(log: DecisionLog, decision: Decision) -> HeldoutAccuracy | None:
    """Returns the accuracies that the gate compared; None if it compared others, or a person let
    the candidate pass."""
    for one in reversed(log.decisions):
        figures = one.evidence
        if one.salt == decision.salt and {CANDIDATE_ACCURACY, SERVING_ACCURACY} <= figures.keys():
            return HeldoutAccuracy(figures[CANDIDATE_ACCURACY], figures[SERVING_ACCURACY])
    return None
