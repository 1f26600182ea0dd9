"""Outcomes of the canary that is under way, read as they come and kept in bounded memory.

::

    segments ─▶ rows of this canary ─▶ (a user has settled) ─▶ `CanaryTests`

Outcomes are in the order in which users first asked. A user settles at a fixed age since then,
``horizon_s`` and ``outcome_after_s``, in both arms alike: in the order in which answers end, a slow
arm would come later than the other. The clock is that of uploads: a time has passed once all
gateways have uploaded what they took until then (`deltawire.live.release.upload_progress`), so a
gateway that was cut off from the bucket delays outcomes, and loses none.

Rows of other answers are read and forgotten. A row is kept until its user settles, at most
`LATE_S` longer; after that only the sums of the tests, the names of users and of answers remain.
"""

from __future__ import annotations

from collections import Counter

from deltawire.config.live import LiveConfig
from deltawire.live.learning.records import LiveRecords
from deltawire.live.release.evidence import CanaryTests, Evidence, HeldoutAccuracy
from deltawire.live.release.lineage import with_lineage_margin
from deltawire.live.release.outcomes import OutcomeRules, SettledAnswer
from deltawire.live.release.upload_progress import complete_until
from deltawire.runtime.compacted_segments import read_index
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.compacted import CompactedName
from deltawire.wire.decisions import Decision

CANDIDATE_ACCURACY, SERVING_ACCURACY = "candidate_accuracy", "serving_accuracy"
"""Figures of the decision that let a candidate pass the evaluation gate."""
LATE_S = 3600.0
"""Reports wait this long, after they would have settled, for an answer that was uploaded late."""
MOST_ANSWERS = 16
"""With ``unit = "answer"``, so many answers of one user count, so that no user decides alone."""


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
        self._compacted_before: dict[tuple[str, str], set[str]] = {}

    def follow(self, decision: Decision, *, since: float) -> None:
        """Keeps rows of this canary from now on. Those that the last poll read, when the decision
        was not known yet, are read again."""
        self.answers.clear()
        self.reports.clear()
        self.settled.clear()
        self._decision, self._since = decision, since
        self._read = dict(self._before)
        self._compacted = {place: set(names) for place, names in self._compacted_before.items()}

    def poll(self) -> int:
        """Reads new segments, and returns how many rows of the canary were new."""
        before = dict(self._read)
        compacted = {place: set(names) for place, names in self._compacted.items()}
        found = super().poll()
        self._before, self._compacted_before = before, compacted
        return found

    def _wanted(self, name: CompactedName) -> bool:
        """Leaves out compacted segments whose rows are all from before this canary."""
        index = read_index(self._bucket, name)
        return index is None or index.newest >= self._since

    def _add(self, row: Capture | Feedback) -> bool:
        served_at = row.at if isinstance(row, Capture) else row.served_at
        if served_at < self._since or bytes.fromhex(row.answer) in self.settled:
            return False
        if isinstance(row, Capture):
            decision = self._decision
            if decision is None or self.share_of(row, decision) is None:
                return False
        return super()._add(row)

    def share_of(self, answer: Capture, decision: Decision) -> float | None:
        """Returns the candidate's share when an answer was assigned to its arm at random; None for
        an answer that is not compared."""
        return self._rules.assigned(answer, decision)

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

    kind: type[CanaryRecords] = CanaryRecords

    def __init__(self, bucket: Bucket, live: LiveConfig) -> None:
        self._rules = OutcomeRules(live)
        self._release = live.release
        self._bucket = bucket
        by_user = live.release.unit == "user"
        self._horizon_s = live.release.horizon_s if by_user else 0.0
        self._settles_s = self._horizon_s + live.release.outcome_after_s
        self.records = self.kind(bucket, self._rules)
        self._canary: tuple[object, ...] = ()
        self._tests = CanaryTests(live.release)
        self._users: Counter[str] = Counter()
        self._asked_until = float("-inf")
        self.late = 0
        """Users of the canary whose first row came when others that asked later had settled."""

    @property
    def warning(self) -> str:
        """Says of which kinds of feedback too many values lie outside their range."""
        return self._rules.warning

    def poll(self, log: DecisionLog, now: float) -> Evidence | None:
        """Reads what is new, and returns the evidence so far; None without a canary. Raises
        `RetryError`."""
        since, decision = log.canary_since(), log.newest
        if since is None or decision is None:
            return None
        if self.follow((decision.salt, decision.candidate, decision.serving), decision, since):
            release = with_lineage_margin(log, self._release)
            self._tests = CanaryTests(release, _heldout(log, decision))
        self._tests.add(self.settled(decision, now))
        return self._tests.evidence()

    def follow(self, canary: tuple[object, ...], decision: Decision, since: float) -> bool:
        """Begins to read the outcomes of a comparison; returns False if they are read already."""
        if canary == self._canary:
            return False
        self.records.follow(decision, since=since)
        self._rules.reported.clear()
        self._rules.clipped.clear()
        self._canary = canary
        self._users, self._asked_until, self.late = Counter(), float("-inf"), 0
        return True

    def settled(self, decision: Decision, now: float) -> list[SettledAnswer]:
        """Reads what is new, and returns the outcomes that have settled since the last call."""
        complete = complete_until(self._bucket, now)  # Before rows are read: they may be newer.
        self.records.poll()
        found = self._settled(decision, complete)
        self.records.expire(complete - self._settles_s - LATE_S)
        return found

    def _settled(self, decision: Decision, complete: float) -> list[SettledAnswer]:
        """Takes the units that have settled since the last call, in the order in which they
        asked."""
        units: dict[str, list[Capture]] = {}
        for answer in self.records.answers.values():
            name = answer.user if self._release.unit == "user" else answer.answer
            units.setdefault(name, []).append(answer)
        until, found = complete - self._settles_s, []
        for name, answers in units.items():
            answers.sort(key=lambda one: (one.asked_at, one.answer))
            if answers[0].asked_at <= until:
                found.append((answers[0].asked_at, name))
        settled = []
        for asked, name in sorted(found):
            outcome = self._outcome(units[name], decision)
            if outcome is None:
                continue
            if asked < self._asked_until:
                self.late += 1
            else:
                settled.append(outcome)
        self._asked_until = max(self._asked_until, until)
        return settled

    def _outcome(self, answers: list[Capture], decision: Decision) -> SettledAnswer | None:
        """Forgets the answers of a unit, the earliest first, and returns its outcome; None if its
        user has settled before."""
        begun, share = answers[0], self.records.share_of(answers[0], decision)
        about = [(one, self.records.settle(one)) for one in answers]
        place = self._users[begun.user]
        self._users[begun.user] += 1
        if share is None or place >= (1 if self._release.unit == "user" else MOST_ANSWERS):
            return None
        counted = [
            (one, reports)
            for one, reports in about
            # A later stage assigns users again, and not those of both arms alike.
            if one.asked_at <= begun.asked_at + self._horizon_s
            and self.records.share_of(one, decision) == share
        ]
        values = self._rules.outcome(counted, decision)
        return SettledAnswer(begun.asked_at, begun.arm, share, not place, values)


def _heldout(log: DecisionLog, decision: Decision) -> HeldoutAccuracy | None:
    """Returns the accuracies that the gate compared; None if it compared others, or a person let
    the candidate pass."""
    for one in reversed(log.decisions):
        figures = one.evidence
        if one.salt == decision.salt and {CANDIDATE_ACCURACY, SERVING_ACCURACY} <= figures.keys():
            return HeldoutAccuracy(figures[CANDIDATE_ACCURACY], figures[SERVING_ACCURACY])
    return None
