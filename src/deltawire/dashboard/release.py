"""The state of releases to live users, for views: the newest decision, and counts of all."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from deltawire.live.release.evidence import GAP_ALARM
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import DECAYED, RESTORES, Decision

DAY_S = 86_400.0


class CandidateFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the newest decision about a candidate: its metric as estimated from logged
    answers before users saw it, and as users showed it; null where there was none."""

    version: int
    number: int
    verdict: str
    reason: str
    snips: float | None = None
    snips_error: float | None = None
    doubly_robust: float | None = None
    doubly_robust_error: float | None = None
    effective: float | None = None
    low: float | None = None
    high: float | None = None
    clipped_mass: float | None = None
    live_candidate: float | None = None
    live_serving: float | None = None

    @property
    def words(self) -> str:
        """Returns the figures in one line."""
        found = []
        if self.snips is not None:
            found.append(f"estimated {_with_error(self.snips, self.snips_error)} (SNIPS)")
        if self.doubly_robust is not None:
            robust = _with_error(self.doubly_robust, self.doubly_robust_error)
            found.append(f"{robust} (doubly robust)")
        if self.low is not None and self.high is not None:
            found.append(f"95 % interval {self.low:.3f} to {self.high:.3f}")
        if self.clipped_mass:
            found.append(f"{self.clipped_mass:.1%} clipped")
        if self.live_candidate is not None:
            found.append(
                f"users showed {self.live_candidate:.3f}, "
                f"serving version {_with_error(self.live_serving, None)}"
            )
        return "; ".join([self.verdict, *found])


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def candidates_of(log: DecisionLog) -> list[CandidateFigures]:
    """Returns the figures of each candidate of a log, the oldest first."""
    found: dict[int, CandidateFigures] = {}
    for before, one in zip([None, *log.decisions], log.decisions, strict=False):
        candidate = one.candidate
        if one.verdict == "promote" and before is not None and before.candidate == one.serving:
            candidate = one.serving
        if candidate is None or one.verdict == "gate":
            continue
        known = found.pop(candidate.version, None)
        evidence = one.evidence
        estimate = {
            name: evidence.get(f"estimate_{name}", None if known is None else getattr(known, name))
            for name in (
                "snips", "snips_error", "doubly_robust", "doubly_robust_error", "effective",
                "low", "high", "clipped_mass",
            )
        }  # fmt: skip
        live = {
            name: evidence.get(name, None if known is None else getattr(known, name))
            for name in ("live_candidate", "live_serving")
        }
        found[candidate.version] = CandidateFigures(
            version=candidate.version,
            number=one.number,
            verdict=one.verdict,
            reason=one.reason,
            **estimate,
            **live,
        )
    return list(found.values())


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
    copies: float = 0.0
    """Share of the requests that may be captured which the candidate answers too, unseen."""
    waits_for: str
    restores: int | None
    at: float
    by: str
    reason: str
    decisions: dict[str, int]
    void: int
    gap_alarm: bool = False
    gate_failures: int = 0
    """Candidates in a row that the evaluation gate stopped."""
    paused_until: float = 0.0
    """Until when learning pauses for that, in seconds since 1970; 0 if it does not."""
    figures: CandidateFigures | None = None
    """Those of the newest candidate."""
    hold_back: int | None = None
    """The hold-back version, which serves the ``hold_back_share`` of users; null without one."""
    hold_back_share: float = 0.0
    hold_back_difference: float | None = None
    """The metric of the version that serves less that of the hold-back version, when the newest
    decision was made, with the ends of its interval; null before both have users."""
    hold_back_low: float | None = None
    hold_back_high: float | None = None
    decayed: int | None = None
    """The version that served when all users were returned to the hold-back version, since versions
    had added up to a loss; null if that was not decided since a candidate was last promoted."""

    rollbacks: int = 0
    """How many there were within a day, and why the last one was decided."""
    rollback_reason: str = ""
    upstream: str = ""
    """The other provider whose model serves, in place of the version, which is a negative number
    then; likewise for the candidate and the hold-back version."""
    candidate_upstream: str = ""
    hold_back_upstream: str = ""

    @property
    def _candidate(self) -> str:
        if self.candidate_upstream:
            return f"candidate upstream {self.candidate_upstream}"
        return f"candidate {self.candidate}"

    @staticmethod
    def _name(version: int, upstream: str) -> str:
        return f"upstream {upstream}" if upstream else f"version {version}"

    @property
    def words(self) -> str:
        """Returns the state in one sentence."""
        found = f"{self._name(self.serving, self.upstream)} serves"
        if self.upstream:
            found += " (another provider's model: nothing attests its weights)"
        if self.restores is not None:
            found += f" with the weights of version {self.restores}"
        if self.candidate is not None and self.verdict != "rollback":
            found += f", {self._candidate} "
            if self.copies:
                found += f"on copies of {self.copies:.0%} of requests"
            else:
                found += f"at {self.share:.0%} of users"
        if self.waits_for:
            found += f", held for {'a person' if self.waits_for == 'person' else 'data'}"
        found += f"; {self.verdict} by {self.by}: {self.reason}"
        if self.figures is not None and self.figures.words != self.figures.verdict:
            found += f" (candidate {self.figures.version}: {self.figures.words})"
        if self.hold_back is not None and self.hold_back_difference is not None:
            found += (
                f"; against hold-back {self._name(self.hold_back, self.hold_back_upstream)} "
                f"{self.hold_back_difference:+.3f} "
                f"({self.hold_back_low or 0:+.3f} to {self.hold_back_high or 0:+.3f})"
            )
        return found


def release_of(log: DecisionLog) -> ReleaseStatus | None:
    """Returns the state after a log's newest decision; None without decisions. ``log.poll`` reads
    them."""
    newest = log.newest
    if newest is None:
        return None
    restores = newest.evidence.get(RESTORES)
    candidates = candidates_of(log)
    since = time.time() - DAY_S
    rollbacks = [one for one in log.decisions if one.verdict == "rollback" and one.at >= since]
    return ReleaseStatus(
        number=newest.number,
        verdict=newest.verdict,
        serving=newest.serving.version,
        digest=newest.serving.digest,
        candidate=None if newest.candidate is None else newest.candidate.version,
        upstream=newest.serving.upstream,
        candidate_upstream="" if newest.candidate is None else newest.candidate.upstream,
        hold_back_upstream="" if newest.hold_back is None else newest.hold_back.upstream,
        share=newest.share,
        copies=newest.copies,
        waits_for=newest.waits_for,
        restores=None if restores is None else int(restores),
        at=newest.at,
        by=newest.by,
        reason=newest.reason,
        decisions=dict(Counter(one.verdict for one in log.decisions)),
        void=len(log.void),
        gate_failures=log.gate_failures(),
        paused_until=log.paused_until(),
        gap_alarm=newest.evidence.get(GAP_ALARM, 0.0) > 0,
        figures=candidates[-1] if candidates else None,
        hold_back=None if newest.hold_back is None else newest.hold_back.version,
        hold_back_share=newest.hold_back_share,
        decayed=_decayed(log),
        rollbacks=len(rollbacks),
        rollback_reason=rollbacks[-1].reason if rollbacks else "",
        **_compared(newest),
    )


def _compared(newest: Decision) -> dict[str, float]:
    """Returns the comparison with the hold-back version in a decision, once it has users."""
    if not newest.evidence.get("hold_back_users"):
        return {}
    names = ("hold_back_difference", "hold_back_low", "hold_back_high")
    return {name: newest.evidence[name] for name in names if name in newest.evidence}


def _decayed(log: DecisionLog) -> int | None:
    for one in reversed(log.decisions):
        if DECAYED in one.evidence and one.candidate is not None:
            return one.candidate.version
        if one.verdict == "promote" and RESTORES not in one.evidence:
            return None
    return None
