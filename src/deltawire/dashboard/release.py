"""The state of releases to live users, for views: the newest decision, and counts of all."""

from __future__ import annotations

from collections import Counter

import msgspec

from deltawire.live.release.evidence import GAP_ALARM
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import RESTORES


class ReleaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest decision about which version serves, and how many there were by verdict.

    ``restores`` is the version whose weights the serving one has, since a trainer followed a
    rollback. ``void`` are objects in place of decisions that every reader skips. ``gap_alarm`` says
    that users did not see the candidate's held-out gain when it was decided about.
    """

    number: int
    verdict: str
    serving: int
    digest: str
    candidate: int | None
    share: float
    waits_for: str
    restores: int | None
    at: float
    by: str
    reason: str
    decisions: dict[str, int]
    void: int
    gap_alarm: bool = False

    @property
    def words(self) -> str:
        """Returns the state in one sentence."""
        found = f"version {self.serving} serves"
        if self.restores is not None:
            found += f" with the weights of version {self.restores}"
        if self.candidate is not None and self.verdict != "rollback":
            found += f", candidate {self.candidate} at {self.share:.0%} of users"
        if self.waits_for:
            found += f", held for {'a person' if self.waits_for == 'person' else 'data'}"
        return f"{found}; {self.verdict} by {self.by}: {self.reason}"


def release_of(log: DecisionLog) -> ReleaseStatus | None:
    """Returns the state after a log's newest decision; None without decisions. ``log.poll`` reads
    them."""
    newest = log.newest
    if newest is None:
        return None
    restores = newest.evidence.get(RESTORES)
    return ReleaseStatus(
        number=newest.number,
        verdict=newest.verdict,
        serving=newest.serving.version,
        digest=newest.serving.digest,
        candidate=None if newest.candidate is None else newest.candidate.version,
        share=newest.share,
        waits_for=newest.waits_for,
        restores=None if restores is None else int(restores),
        at=newest.at,
        by=newest.by,
        reason=newest.reason,
        decisions=dict(Counter(one.verdict for one in log.decisions)),
        void=len(log.void),
        gap_alarm=newest.evidence.get(GAP_ALARM, 0.0) > 0,
    )
