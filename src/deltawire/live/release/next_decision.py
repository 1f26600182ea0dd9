"""The next decision about which version serves, from what is known now.

::

    serve, promote, rollback ──▶ gate ──▶ (shadow) ──▶ canary, share by share ──▶ promote
                       ▲          │ ▲         │ ▲                      ▲
                       │          ▼ │ newer   ▼ │ more outcomes        │
                       └───────rollback ◀── hold (for data, or for a person)
                                  └── the trainer restored the version ┘

`decide_next` is a pure function, so any number of processes may decide: their decisions differ only
by when they looked, and one of each number wins. A user of this room reads `DecisionLog`, gathers a
`Situation`, and appends what `decide_next` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from deltawire.config.release import ReleaseConfig
from deltawire.display import time_of
from deltawire.errors import InputError
from deltawire.live.release.evidence import CanaryTests, Evidence
from deltawire.live.release.hold_back import HoldBackEvidence, with_hold_back
from deltawire.live.release.lineage import decline_of, with_lineage_margin
from deltawire.live.release.paired_gate import Scores, compare_sets
from deltawire.live.release.shadow_evidence import ShadowEvidence, shadow_evidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import (
    DECAYED,
    ENDED,
    GATE_FAILURES,
    MARGIN_SPENT,
    PAUSED_UNTIL,
    RESTORES,
    UNDECIDED,
    Decision,
    ServedVersion,
    Verdict,
)

FAILURES_IN_A_ROW = 3
"""After so many candidates that the evaluation gate stopped, learning pauses."""
MOST_DOUBLINGS = 16
COMPARED = "log_evidence_gate_"
"""How the figures of a comparison at the evaluation gate begin; the set's name follows."""
END_AFTER = 2
"""A canary ends at so many times ``max_outcomes``."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that a decision follows from: the ``newest`` version and the one of
    `next_candidate`, with the digests of their manifests, held-out ``scores``, the ``evidence`` of
    the canary or of the ``shadow`` that is under way, and of the ``hold_back`` version, the
    off-policy ``estimate`` of the undecided
    candidate, the version in which the trainer ``restored`` the one that serves since a rollback,
    the ``generation`` of the deployment's secret that is in use, and the time in seconds since
    1970."""

    newest: ServedVersion
    candidate: ServedVersion | None = None
    restored: ServedVersion | None = None
    scores: Scores = field(default_factory=dict)
    evidence: Evidence | None = None
    hold_back: HoldBackEvidence | None = None
    shadow: ShadowEvidence | None = None
    estimate: Mapping[str, float] = field(default_factory=dict)
    generation: int = 0
    now: float


def next_candidate(
    log: DecisionLog, release: ReleaseConfig, *, newest: int, scores: Scores, now: float
) -> int | None:
    """Returns the version that may become the candidate now: the newest that is newer than the
    serving one, was not rolled back, and has the scores that the gate compares; None if there is
    none, a candidate is undecided, or the last decision is too recent. A candidate that is held for
    data gives way to a newer one."""
    decision = log.newest
    if decision is None or (decision.verdict in UNDECIDED and not decision.gives_way):
        return None
    after = decision.serving.version
    if decision.verdict in UNDECIDED and decision.candidate is not None:
        after = decision.candidate.version
    after = max(after, log.decayed_until())
    if now < max(decision.at + release.every_s, log.paused_until()):
        return None
    known = {version for version, score in scores.items() if release.gate.keys() <= score.keys()}
    versions = known if release.gate else {newest}
    rejected = log.rejected()
    return max(
        (v for v in versions if after < v <= newest and v not in rejected),
        default=None,
    )


def decide_next(
    log: DecisionLog, release: ReleaseConfig, situation: Situation, *, by: str
) -> Decision | None:
    """Returns the decision that follows from the situation; None if nothing changes. It records the
    estimate next to what users showed, and does not depend on it."""
    decision = _after_decay(log, situation, by=by)
    if decision is None:
        decision = _next(log, with_lineage_margin(log, release), situation, by=by)
    before = log.newest
    if decision is not None:
        decision = with_hold_back(log, release, decision, situation.hold_back)
    if decision is None or before is None or before.verdict not in UNDECIDED:
        return decision
    if decision.verdict == "gate":
        return decision
    evidence = {**situation.estimate, **decision.evidence}
    return msgspec.structs.replace(decision, evidence=evidence)


def _after_decay(log: DecisionLog, situation: Situation, *, by: str) -> Decision | None:
    """Return all users to the hold-back version if the versions since are shown to be worse."""
    before, found = log.newest, situation.hold_back
    if before is None or found is None or not found.worse or before.waits_for == "person":
        return None
    make = _Maker(log, situation.now, by, situation.generation)
    reason = (
        f"versions since {found.held.words} add up to a loss: {', '.join(found.worse)}; metric "
        f"{found.difference:+.3f} against the hold-back version, {found.low:+.3f} to "
        f"{found.high:+.3f}"
    )
    return make.decision(
        "rollback", found.held, before.serving, reason=reason, evidence={DECAYED: 1.0}
    )


def _next(
    log: DecisionLog, release: ReleaseConfig, situation: Situation, *, by: str
) -> Decision | None:
    make = _Maker(log, situation.now, by, situation.generation)
    before = log.newest
    if before is None:
        return make.decision(
            "serve", situation.newest, reason="the newest version serves from the start"
        )
    if before.verdict not in UNDECIDED:
        if before.verdict == "rollback" and situation.restored is not None:
            return _go_forward(before, situation.restored, make)
        if situation.candidate is None:
            return None
        return make.decision(
            "gate",
            before.serving,
            situation.candidate,
            reason=f"version {situation.candidate.version} is the next candidate",
        )
    if before.waits_for == "person" or before.candidate is None:
        return None
    newer = situation.candidate
    if before.gives_way and newer is not None and newer.version > before.candidate.version:
        reason = (
            f"version {newer.version} is newer than version {before.candidate.version}, "
            "which is undecided"
        )
        return make.decision("gate", before.serving, newer, reason=reason)
    if ENDED in before.evidence:
        return None
    if before.copies:
        return _leave_shadow(before, release, situation, make)
    if not before.share:
        return _pass_gate(before, release, situation, make)
    evidence = situation.evidence or CanaryTests(release).evidence()
    return _go_on(before, release, evidence, make)


@dataclass(frozen=True)
class _Maker:
    log: DecisionLog
    now: float
    by: str
    generation: int = 0

    def decision(
        self,
        verdict: Verdict,
        serving: ServedVersion,
        candidate: ServedVersion | None = None,
        *,
        reason: str,
        **more: object,
    ) -> Decision:
        before = self.log.newest
        if before is not None and verdict != "promote":  # A person's choice ends the comparison.
            more["hold_back"] = before.hold_back
            more["hold_back_share"] = before.hold_back_share
        return Decision(
            number=self.log.next_number,
            run=self.log.run,
            verdict=verdict,
            serving=serving,
            candidate=candidate,
            at=self.now,
            by=self.by,
            reason=reason[:1024],
            **more,  # type: ignore[arg-type]
        )

    def hold(self, before: Decision, reason: str, evidence: Mapping[str, float]) -> Decision | None:
        """Wait for data, and show the candidate to the same users meanwhile."""
        if before.gives_way:
            return None
        return self.decision(
            "hold",
            before.serving,
            before.candidate,
            reason=reason,
            share=before.share,
            copies=before.copies,
            salt=before.salt,
            generation=before.generation,
            waits_for="data",
            evidence=dict(evidence),
        )

    def beyond_gate(
        self,
        before: Decision,
        release: ReleaseConfig,
        reason: str,
        evidence: Mapping[str, float],
    ) -> Decision | None:
        """Begin what follows the evaluation gate."""
        if release.shadow:
            return self.shadow(before, release.shadow_share, reason, evidence)
        return self.canary(before, release.stages[0], reason, evidence)

    def hold_hidden(
        self, before: Decision, reason: str, waits_for: str, evidence: Mapping[str, float]
    ) -> Decision:
        """Return all users to the serving version while the candidate waits."""
        return self.decision(
            "hold",
            before.serving,
            before.candidate,
            reason=reason,
            waits_for=waits_for,
            evidence=dict(evidence),
        )

    def stop_at_gate(
        self, before: Decision, pause_s: float, reason: str, evidence: Mapping[str, float]
    ) -> Decision:
        """Roll back before any user saw the candidate; learning pauses after some in a row."""
        failures = self.log.gate_failures() + 1
        figures = {**evidence, GATE_FAILURES: float(failures)}
        if failures >= FAILURES_IN_A_ROW and pause_s:
            waits_s = pause_s * 2.0 ** min(failures - FAILURES_IN_A_ROW, MOST_DOUBLINGS)
            figures[PAUSED_UNTIL] = self.now + waits_s
            reason = f"{failures} in a row, learning pauses for {waits_s:g} s; {reason}"
        return self.decision(
            "rollback", before.serving, before.candidate, reason=reason, evidence=figures
        )

    def canary(
        self, before: Decision, share: float, reason: str, evidence: Mapping[str, float]
    ) -> Decision:
        assert before.candidate is not None
        return self.decision(
            "canary",
            before.serving,
            before.candidate,
            reason=reason,
            share=share,
            salt=before.salt or self.salt(before.candidate),
            generation=before.generation if before.salt else self.generation,
            evidence=dict(evidence),
        )

    def shadow(
        self, before: Decision, copies: float, reason: str, evidence: Mapping[str, float]
    ) -> Decision:
        assert before.candidate is not None
        return self.decision(
            "shadow",
            before.serving,
            before.candidate,
            reason=reason,
            copies=copies,
            salt=self.salt(before.candidate),
            generation=self.generation,
            evidence=dict(evidence),
        )

    def salt(self, candidate: ServedVersion) -> str:
        return f"{self.log.next_number}-{candidate.digest}"


def _go_forward(before: Decision, restored: ServedVersion, make: _Maker) -> Decision | None:
    """Serve the version that a rollback restored by its new number: the weights are the same, and
    replicas that only go forward can load it."""
    if restored.digest != before.serving.digest:
        return None
    return make.decision(
        "promote",
        restored,
        reason=f"it has the weights of version {before.serving.version}, which serves",
        evidence={RESTORES: float(before.serving.version)},
    )


def _pass_gate(
    before: Decision, release: ReleaseConfig, situation: Situation, make: _Maker
) -> Decision | None:
    """Compare the candidate with the serving version on held-out sets."""
    candidate, serving = before.candidate, before.serving
    assert candidate is not None
    if serving.upstream or candidate.upstream:
        name = serving.words if serving.upstream else candidate.words
        reason = f"{name} is measured by users only: not compared on held-out sets"
        return make.canary(before, release.stages[0], reason, {})
    if before.verdict == "hold" and any(key.startswith(COMPARED) for key in before.evidence):
        # A second look would be a second chance to stop an equal candidate.
        if situation.now < before.at + release.gate_wait_s:
            return None
        # A trainer that waits for this decision makes no newer version, so users decide.
        reason = f"undecided at the evaluation gate for {release.gate_wait_s:g} s, and none newer"
        return make.beyond_gate(before, release, reason, before.evidence)
    mine, theirs = (situation.scores.get(v.version, {}) for v in (candidate, serving))
    missing = sorted(name for name in release.gate if name not in mine or name not in theirs)
    if missing:
        if situation.now < before.at + release.gate_wait_s:
            return None
        names = ", ".join(missing)
        return make.hold(before, f"versions without held-out results: {names}", {})
    awaited = any(theirs[name].awaited for name in release.gate)
    if awaited and situation.now < before.at + release.gate_wait_s:
        return None
    findings, figures = compare_sets(release, mine, theirs), {}
    for one in findings:
        figures[f"candidate_{one.name}"] = one.candidate
        figures[f"serving_{one.name}"] = one.serving
        figures[f"{COMPARED}{one.name}"] = one.log_evidence
    if failed := [one.words for one in findings if one.failed]:
        reason = f"evaluation gate: {'; '.join(failed)}"
        return make.stop_at_gate(before, release.pause_s, reason, figures)
    reason = "passed the evaluation gate" if release.gate else "no evaluation gate"
    if undecided := [one.words for one in findings if one.below]:
        reason = f"evaluation gate, undecided: {'; '.join(undecided)}"
        return make.hold_hidden(before, reason, "data", figures)
    return make.beyond_gate(before, release, reason, figures)


def _leave_shadow(
    before: Decision, release: ReleaseConfig, situation: Situation, make: _Maker
) -> Decision | None:
    """Look at a shadow: harm first, then whether enough copies were compared."""
    candidate, evidence = before.candidate, situation.shadow
    assert candidate is not None
    evidence = evidence or shadow_evidence([], release)
    figures = evidence.figures()
    if harmful := evidence.harmful():
        reason = f"worse than {before.serving.words} on copies: {', '.join(harmful)}"
        return make.decision("rollback", before.serving, candidate, reason=reason, evidence=figures)
    if evidence.copies >= release.shadow:
        reason = f"no harm in {evidence.copies} copies of requests"
        return make.canary(before, release.stages[0], reason, figures)
    if situation.now >= before.at + release.gate_wait_s:
        reason = f"only {evidence.copies} of {release.shadow} copies were compared"
        return make.hold(before, reason, figures)
    return None


def _go_on(
    before: Decision, release: ReleaseConfig, evidence: Evidence, make: _Maker
) -> Decision | None:
    """Look at a canary: its sample ratio first, then harm, then whether it may go on."""
    candidate, figures = before.candidate, evidence.figures()
    assert candidate is not None
    if evidence.mismatched:
        reason = "sample-ratio mismatch: users did not reach the arms as assigned"
        return make.hold_hidden(before, reason, "person", figures)
    if harmful := evidence.harmful():
        reason = f"worse than {before.serving.words}: {', '.join(harmful)}"
        return make.decision("rollback", before.serving, candidate, reason=reason, evidence=figures)
    following = next((share for share in release.stages if share > before.share), None)
    mine, theirs = evidence.counts.get(before.share, (0, 0))
    if following is not None:
        if mine < release.stage_outcomes:
            return None
        reason = f"no harm in {mine} outcomes at a share of {before.share:g}"
        return make.canary(before, following, reason, figures)
    if mine >= release.stage_outcomes and evidence.metric.rejects:
        declines, figures["log_evidence_decline"] = decline_of(make.log, release, figures)
        if declines:
            return make.hold_hidden(before, declines, "person", figures)
        reason = f"not worse than {before.serving.words} by {release.margin:.3g}"
        figures |= {MARGIN_SPENT: release.margin}
        return make.decision("promote", candidate, reason=reason, evidence=figures)
    reason = f"undecided after {mine + theirs} outcomes at a share of {before.share:g}"
    if mine + theirs >= END_AFTER * release.max_outcomes:
        reason += "; ended, a newer version is tested next"
        return make.hold_hidden(before, reason, "data", {**figures, ENDED: 1.0})
    if mine + theirs >= release.max_outcomes:
        return make.hold(before, reason, figures)
    return None


def decide_by_hand(
    log: DecisionLog,
    verdict: Verdict,
    *,
    by: str,
    now: float,
    reason: str = "",
    target: ServedVersion | None = None,
    again: bool = False,
) -> Decision:
    """Returns a person's decision: ``promote`` the candidate or the ``target``, ``hold`` the
    candidate until a person decides, unseen by users, or ``rollback`` the candidate or, without
    one, to the version that served before or to the ``target``. A version that was rolled back, or
    that has the weights of one, is promoted only ``again``.

    Raises `InputError` if there is nothing to decide about, and for such a version.
    """
    before, make = log.newest, _Maker(log, now, by)
    if before is None:
        if verdict != "promote" or target is None:
            raise InputError("no version serves by decision yet", hint="promote one: --version N")
        return make.decision("serve", target, reason=reason or "begun by hand")
    candidate = before.candidate if before.verdict in UNDECIDED else None
    if verdict == "hold":
        if candidate is None:
            raise InputError("there is no candidate to hold")
        if before.waits_for == "person":
            raise InputError("the candidate is held for a person already")
        return make.hold_hidden(before, reason or "held by hand", "person", {})
    if verdict == "promote":
        chosen = target or candidate
        if chosen is None:
            raise InputError("there is no candidate to promote", hint="name one: --version N")
        if chosen == before.serving:
            raise InputError(f"version {chosen.version} serves already")
        if not again:
            _refuse_rolled_back(log, chosen)
        return make.decision("promote", chosen, reason=reason or "promoted by hand")
    if candidate is not None and target is None:
        return make.decision(
            "rollback", before.serving, candidate, reason=reason or "rolled back by hand"
        )
    earlier = log.before_serving()
    chosen = target or (earlier.serving if earlier else None)
    if chosen is None or chosen == before.serving:
        raise InputError(
            "no version with other weights served before",
            hint="name the version to restore: --version N",
        )
    return make.decision("rollback", chosen, before.serving, reason=reason or "rolled back by hand")


def _refuse_rolled_back(log: DecisionLog, chosen: ServedVersion) -> None:
    """Raises `InputError` if a version, or one with its weights, was rolled back."""
    for one in reversed(log.decisions):
        taken = one.candidate if one.verdict == "rollback" else None
        if taken is not None and taken.digest == chosen.digest:
            same = "" if taken.version == chosen.version else f", as version {taken.version},"
            raise InputError(
                f"{chosen.words}{same} was rolled back at {time_of(one.at)} by "
                f"{one.by}: {one.reason}",
                hint="deltawire live promote --again promotes it all the same",
            )


def canary_by_hand(
    log: DecisionLog,
    target: ServedVersion,
    share: float,
    *,
    by: str,
    now: float,
    reason: str = "",
    generation: int = 0,
) -> Decision | None:
    """Returns the next decision that a person's canary of ``target`` at a ``share`` of users needs:
    it becomes the candidate first, without a gate, and is then shown. None once it is shown to so
    many. The tests of any canary judge it, and spend the same error rate, once for each version: a
    version that was tried until it passes would pass.

    Raises `InputError` if another candidate is undecided, if the version was shown to users in an
    earlier canary, or was rolled back.
    """
    before, make = log.newest, _Maker(log, now, by, generation)
    if before is None:
        raise InputError("no version serves by decision yet", hint="promote one: --version N")
    if target.digest == before.serving.digest:
        raise InputError(f"{target.words} serves already, or has the same weights")
    if not 0 < share < 1:
        raise InputError("the share of a canary is above 0 and below 1")
    reason = reason or "begun by hand"
    candidate = before.candidate if before.verdict in UNDECIDED else None
    if candidate is not None and candidate != target:
        raise InputError(
            f"{candidate.words} is undecided",
            hint="deltawire live rollback takes it back",
        )
    if candidate is not None and before.share:
        if before.verdict == "canary" and share <= before.share:
            return None
        return make.canary(before, share, reason, {})
    shown = [one for one in log.decisions if one.share and one.candidate is not None]
    if target.version in log.rejected() or any(one.candidate == target for one in shown):
        raise InputError(
            f"{target.words} was shown to users in a canary before, or was rolled back: "
            "its error rate is spent",
            hint="deltawire live promote --version N serves it to all users",
        )
    if candidate is None:
        return make.decision("gate", before.serving, target, reason=f"{reason}; without a gate")
    return make.canary(before, share, reason, {})
