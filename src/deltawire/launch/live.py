"""Decides which version serves users, and shows and takes such decisions by hand."""

from __future__ import annotations

import getpass
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from deltawire.config import RunConfig
from deltawire.display import safe_line, time_of
from deltawire.errors import InputError, RetryError
from deltawire.estimates import OffPolicyEstimate
from deltawire.events import Evaluated, ServingMeasured
from deltawire.launch.live_figures import (
    finding_row,
    lineage_row,
    shadow_row,
    users_row,
    version_row,
    webhook_of,
)
from deltawire.launch.role_keys import read_signer
from deltawire.launch.upstreams import target_of
from deltawire.live.deployment_secret import generation_in_use
from deltawire.live.release.canary_outcomes import CanaryOutcomes
from deltawire.live.release.decider_liveness import DeciderLiveness
from deltawire.live.release.decision_webhook import DecisionWebhook
from deltawire.live.release.evidence import Evidence, planned_answers
from deltawire.live.release.hold_back import HoldBackEvidence
from deltawire.live.release.hold_back_outcomes import HoldBackOutcomes
from deltawire.live.release.lineage import lineage_of, with_lineage_margin
from deltawire.live.release.next_decision import (
    Situation,
    decide_by_hand,
    decide_next,
    next_candidate,
)
from deltawire.live.release.off_policy import figures_of_estimate
from deltawire.live.release.operator_mode import allows, read_operator, store_operator
from deltawire.live.release.own_gate import SET, OwnGate, measure_by
from deltawire.live.release.paired_gate import Scores, SetScore
from deltawire.live.release.shadow_evidence import ShadowEvidence, read_shadow, shadow_evidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_history, read_manifest, read_run
from deltawire.wire.decisions import (
    DECAYED,
    FORGETS,
    RESTORES,
    UNDECIDED,
    Decision,
    RestoreRecord,
    ServedVersion,
)
from deltawire.wire.operator_state import Mode, OperatorState
from deltawire.wire.roles import GATEWAY_ROLE
from deltawire.wire.run import Run

DECIDE_EVERY_S = 5.0
EVALUATOR_SILENT_S = 60.0
"""An evaluator that was not heard of for so long is not waited for."""
UNDECIDED_CODE, HELD_CODE, ROLLED_BACK_CODE = 10, 11, 12
"""Exit codes of ``status`` and ``decide --once``; 0 if a version serves and nothing is open."""

Action = Literal["status", "plan", "decide", "promote", "hold", "rollback"]


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """The name, reason, version and key of decisions by hand, and of `decide` what measures
    versions in place of an evaluator: ``gate`` is a command, a URL or ``none``."""

    trust: ReaderTrust
    gate: str = ""
    again: bool = False
    """Promote a version although it was rolled back."""
    gate_margin: float = 0.02
    gate_timeout_s: float = 3600.0
    key: str = ""
    version: int | None = None
    upstream: str = ""
    """Another provider's model, in place of a version."""
    webhook: str = ""
    """A URL that is told of each decision while `decide` runs."""
    webhook_secret_file: str = ""
    reason: str = ""
    by: str = ""


class Releaser:
    """The decisions of one run, and what they follow from.

    Example::

        releaser = Releaser(bucket, run, config, by="g0")
        while True:
            releaser.step(time.time())
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        config: RunConfig,
        *,
        by: str,
        gate: OwnGate | None = None,
    ) -> None:
        self.gate = gate
        self.log = DecisionLog(bucket, run.id)
        self.release = config.live.release
        self.bucket = self._bucket = bucket
        self._run = run
        self.by, self.name = by, run.name
        self._configured = bool(run.config)
        self._outcomes = CanaryOutcomes(bucket, config.live)
        self._held_back = HoldBackOutcomes(bucket, config.live)
        self._digests: dict[int, str] = {}
        self._restores = self.release.restore and config.midtrain is None
        self._searched = (-1, 0)
        """A rollback, and the version up to which none restores it."""

    def step(self, now: float) -> Decision | None:
        """Makes and stores the next decision, if there is one; returns it, or None if another
        process decided first or nothing changes. Raises `RetryError`, `CorruptError`."""
        self.log.poll()
        situation = self.situation(now)
        if situation is None:
            return None
        decision = decide_next(self.log, self.release, situation, by=self.by)
        if decision is None or not allows(self.operator(), self.log.newest, decision):
            return None
        if not self.log.append(decision):
            return None
        return decision

    def operator(self) -> OperatorState:
        """Returns whether an operator has paused canaries or frozen decisions."""
        return read_operator(self._bucket, self._run.id)

    def situation(self, now: float) -> Situation | None:
        """Returns the facts for a decision now; None while the run has no version."""
        newest = newest_version(self._bucket)
        if newest is None:
            return None
        scores = self._scores(now)
        restored = self._restored()
        chosen = None
        if restored is None and not self._awaits_restore():
            release = self.release
            if self.gate is not None:  # A candidate is measured once it is at the gate.
                release = msgspec.structs.replace(release, gate={})
            chosen = next_candidate(self.log, release, newest=newest, scores=scores, now=now)
        return Situation(
            newest=self.served(newest),
            candidate=None if chosen is None else self.served(chosen),
            restored=restored,
            scores=scores,
            evidence=self.evidence(now),
            hold_back=self.hold_back(now),
            shadow=self.shadow(),
            estimate=figures_of_estimate(self.estimate()),
            generation=self._generation(),
            now=now,
        )

    def set_mode(self, mode: Mode, now: float, reason: str) -> None:
        """Stores the operator's mode."""
        state = OperatorState(run=self._run.id, mode=mode, at=now, by=self.by, reason=reason[:1024])
        store_operator(self._bucket, state)

    def generation(self) -> int:
        """Returns the generation of the secret in use."""
        return generation_in_use(self._bucket, self._run.id)

    def _generation(self) -> int:
        """Returns the generation of the secret that a shadow or canary which begins now assigns by;
        0 if none may begin."""
        decision = self.log.newest
        if decision is None or decision.verdict not in UNDECIDED or decision.salt:
            return 0
        return self.generation()

    def evidence(self, now: float) -> Evidence | None:
        """Returns what the canary that is under way has shown so far; None without one."""
        return self._outcomes.poll(self.log, now)

    def hold_back(self, now: float) -> HoldBackEvidence | None:
        """Returns the evidence from users of the hold-back version; None without one."""
        return self._held_back.compare(self.log, now)

    @property
    def warning(self) -> str:
        """Says of which kinds of feedback too many values lie outside their range."""
        return self._outcomes.warning

    @property
    def late_users(self) -> int:
        """Users of the canary who are left out, because their rows came too late."""
        return self._outcomes.late

    def shadow(self) -> ShadowEvidence | None:
        """Returns what the shadow that is under way has shown so far; None without one."""
        decision = self.log.newest
        if decision is None or not decision.copies:
            return None
        return shadow_evidence(read_shadow(self._bucket, decision), self.release)

    def estimate(self) -> OffPolicyEstimate | None:
        """Returns the off-policy estimate of the undecided candidate; None without one."""
        decision = self.log.newest
        if decision is None or decision.candidate is None or decision.verdict not in UNDECIDED:
            return None
        version = decision.candidate.version
        found = [one.off_policy for one in self._evaluated() if one.version == version]
        return found[-1] if found else None

    @property
    def measured(self) -> bool:
        """True if an evaluator has measured a version, or may do so."""
        return self._configured or bool(self._evaluated())

    def _evaluated(self) -> list[Evaluated]:
        return [e for e in events_of(self._bucket, "evaluator") if isinstance(e, Evaluated)]

    def served(self, version: int) -> ServedVersion:
        """Returns a committed version with its digest; raises `InputError` if there is none."""
        if version not in self._digests:
            manifest = read_manifest(self._bucket, self._run, version)
            if manifest is None or manifest.pruned:
                raise InputError(
                    f"the run has no version {version} that can be loaded", run=self._bucket.url
                )
            self._digests[version] = manifest.digest
        return ServedVersion(version, self._digests[version])

    def _restored(self) -> ServedVersion | None:
        """Returns the version in which the trainer followed the newest decision, a rollback."""
        decision = self.log.newest
        if decision is None or decision.verdict != "rollback" or decision.candidate is None:
            return None
        if decision.serving.upstream or decision.candidate.upstream:
            return None
        number, after = self._searched
        if number != decision.number:
            after = max(decision.candidate.version, decision.serving.version)
        # A newest version that cannot be read now is searched again by the next call.
        for manifest in read_history(self._bucket, self._run, after=after, complete=False):
            version = manifest.version
            found = RestoreRecord.of(manifest.metadata, run=self._bucket.url, version=version)
            if found is not None and found.decision == decision.number:
                return self.served(version)
            after = version
        self._searched = decision.number, after
        return None

    def _awaits_restore(self) -> bool:
        """Returns whether the run's trainer will follow the newest decision: until then, all newer
        versions come from rejected weights. Those of a forgotten user's answers are no candidates
        even if the run has finished, since it may be continued."""
        decision = self.log.newest
        if decision is None or decision.verdict != "rollback":
            return False
        if FORGETS in decision.evidence:
            return True
        of_upstream = decision.serving.upstream or (
            decision.candidate is not None and decision.candidate.upstream
        )
        if not self._restores or of_upstream:
            return False
        trainer = known_trainer(self._bucket)
        return trainer is not None and trainer.phase != "finished"

    def _scores(self, now: float) -> Scores:
        if not self.release.gate:
            return {}
        if self.gate is not None:
            decision = self.log.newest
            candidate = None if decision is None else decision.candidate
            measurable = candidate is not None and not candidate.upstream
            if decision is None or decision.serving.upstream or decision.verdict not in UNDECIDED:
                measurable = False
            if measurable and decision is not None and decision.candidate is not None:
                self.gate.poll(decision.serving, decision.candidate)
            return self._with_restores(self.gate.scores())
        scores: dict[int, Mapping[str, SetScore]] = {
            e.version: {
                "accuracy": SetScore(e.accuracy, tuple(e.correct)),
                **{name: SetScore(s.accuracy, tuple(s.correct)) for name, s in e.sets.items()},
            }
            for e in self._evaluated()
        }
        return self._with_second_results(dict(self._with_restores(scores)), now)

    def _with_second_results(self, scores: dict[int, Any], now: float) -> Scores:
        """Add the serving version's results for the candidate, or say that they are to come."""
        decision = self.log.newest
        if decision is None or decision.candidate is None or not self.release.measure_again:
            return scores
        version, candidate = decision.serving.version, decision.candidate.version
        events = events_of(self._bucket, "evaluator")
        measured = [event for event in events if isinstance(event, ServingMeasured)]
        found = [event for event in measured if event.version == version]
        # Events come in no order of time. A repeated measurement would be a second look.
        own = [event for event in found if event.candidate == candidate and not event.failed]
        first = min(own, key=lambda event: event.at, default=None)
        results = {} if first is None else {"accuracy": first.correct, **first.sets}
        awaited = not results and not any(one.failed for one in found) and self._evaluates(now)
        scores[version] = {
            name: replace(one, again=tuple(results.get(name, ())), awaited=awaited)
            for name, one in scores.get(version, {}).items()
        }
        return scores

    def _evaluates(self, now: float) -> bool:
        """Returns whether an evaluator is at work, which measures the version that serves."""
        beat = read_heartbeat(self._bucket, "evaluator")
        return beat is not None and not beat.ended and now - beat.at < EVALUATOR_SILENT_S

    def _with_restores(self, scores: dict[int, Any]) -> Scores:
        for version, earlier in self.log.restores().items():
            if earlier in scores:  # The weights are the same.
                scores.setdefault(version, scores[earlier])
        return scores


def open_releaser(location: str, options: ReleaseOptions, *, writes: bool) -> Releaser:
    """Opens a run's decisions. In a signed run, writing needs the gateway role's key."""
    signer = read_signer(options.key)
    bucket = open_trusted(location, options.trust, signer=signer, role=GATEWAY_ROLE)
    if writes:
        bucket.check_writer()
    run = read_run(bucket)
    config = config_of(run, url=bucket.url) if run.config else RunConfig(name="live")
    gate = None
    if options.gate:
        config, gate = _with_own_gate(config, options, bucket.url)
    by = (options.by or getpass.getuser())[:64]
    releaser = Releaser(bucket, run, config, by=by, gate=gate)
    releaser.log.poll()
    return releaser


def _with_own_gate(
    config: RunConfig, options: ReleaseOptions, url: str
) -> tuple[RunConfig, OwnGate | None]:
    """Returns the configuration with the gate of ``--gate``, and what measures versions for it."""
    own = options.gate != "none"
    if not 0 <= options.gate_margin < 1 or not options.gate_timeout_s > 0:
        raise InputError("--gate-margin must be from 0 to below 1, and --gate-timeout above 0")
    sets = {SET: options.gate_margin} if own else {}
    release = msgspec.structs.replace(config.live.release, gate=sets)
    live = msgspec.structs.replace(config.live, release=release)
    gate = None
    if own:
        stopping = threading.Event()
        measure = measure_by(options.gate, url, timeout_s=options.gate_timeout_s, stopping=stopping)
        gate = OwnGate(measure, stopping=stopping)
    return msgspec.structs.replace(config, live=live), gate


def take_decision(location: str, action: Action, options: ReleaseOptions) -> dict[str, Any]:
    """Stores a person's decision, and returns the state after it.

    Raises `InputError` if there is nothing to decide about, or another decision came first.
    """
    assert action in ("promote", "hold", "rollback")
    releaser = open_releaser(location, options, writes=True)
    target = target_of(options.version, options.upstream, releaser.served)
    decision = decide_by_hand(
        releaser.log,
        action,
        by=releaser.by,
        now=time.time(),
        reason=options.reason,
        target=target,
        again=options.again,
    )
    if not releaser.log.append(decision):
        raise InputError(
            "another decision came first", hint="look at deltawire live status, and decide again"
        )
    return state_of(releaser, time.time())


def decide_until_stopped(
    location: str,
    options: ReleaseOptions,
    *,
    once: bool,
    report: Callable[[Decision], None],
) -> dict[str, Any]:
    """Decides every `DECIDE_EVERY_S` seconds, or ``once``: until nothing more follows from what is
    known. Returns the state after it."""
    releaser = open_releaser(location, options, writes=True)
    if not releaser.measured and not options.gate:
        raise InputError(
            "this run has no configuration, so no evaluator measures its versions",
            hint="give --gate COMMAND or a URL that scores a version, or --gate none to let every "
            "version go to users in a canary",
            run=location,
        )
    liveness = DeciderLiveness(releaser.bucket, releaser.log.run, by=releaser.by)
    webhook = webhook_of(options.webhook, options.webhook_secret_file, releaser.name, releaser.log)
    try:
        state = _decide(releaser, liveness, webhook, once=once, report=report)
        if once:
            liveness.end()  # It looked; a timer may start the next one.
        return state
    finally:
        if not once:
            liveness.end()
        if webhook is not None:
            webhook.close()
        if releaser.gate is not None:
            releaser.gate.close()


def _decide(
    releaser: Releaser,
    liveness: DeciderLiveness,
    webhook: DecisionWebhook | None,
    *,
    once: bool,
    report: Callable[[Decision], None],
) -> dict[str, Any]:
    told, gate = "", releaser.gate
    while True:
        try:
            while (decision := releaser.step(time.time())) is not None:
                report(decision)
            if webhook is not None:
                webhook.report_new(releaser.log)
            if not once:
                liveness.beat(alarm=gate.alarm if gate is not None else "")
            if gate is not None and gate.alarm != told:
                told = gate.alarm
                print(told or "the gate measures again", file=sys.stderr)  # noqa: T201
            if once and (gate is None or not gate.measuring):
                return state_of(releaser, time.time())
        except RetryError as error:
            if once:
                raise
            print(safe_line(f"waits for the store: {error.message}"), file=sys.stderr)  # noqa: T201
        if once and gate is not None:
            gate.wait()
        else:
            time.sleep(DECIDE_EVERY_S)


def state_of(releaser: Releaser, now: float) -> dict[str, Any]:
    """Returns the state of a run's releases as plain data: the version that serves, the candidate,
    its tests, and all decisions."""
    newest = releaser.log.newest
    state: dict[str, Any] = {
        "state": newest.verdict if newest else "none",
        "serving": version_row(newest.serving if newest else None),
        "restores": None,
        "candidate": None,
        "lineage": lineage_row(lineage_of(releaser.log, releaser.release), releaser.release),
        "hold_back": _hold_back_row(releaser, now),
        "gate_failures": releaser.log.gate_failures(),
        "paused_until": releaser.log.paused_until(),
        "now": now,
        "operator": msgspec.structs.asdict(releaser.operator()),
        "decisions": [_row(one) for one in releaser.log.decisions],
        "users": users_row(releaser.bucket, releaser.log, now),
        "void": {str(number): fault for number, fault in releaser.log.void.items()},
    }
    if newest is not None and RESTORES in newest.evidence:
        state["restores"] = int(newest.evidence[RESTORES])
    if newest is None or newest.verdict not in UNDECIDED:
        return state
    state |= {
        "candidate": version_row(newest.candidate),
        "share": newest.share,
        "copies": newest.copies,
        "waits_for": newest.waits_for,
        "shadow": shadow_row(releaser.shadow(), releaser.release.shadow),
    }
    estimate = releaser.estimate()
    state["estimate"] = None if estimate is None else msgspec.structs.asdict(estimate)
    evidence = releaser.evidence(now)
    if evidence is not None:
        state["late_users"] = releaser.late_users
        state["warning"] = releaser.warning
        state["outcomes"] = {
            f"{share:g}": {"candidate": mine, "serving": theirs}
            for share, (mine, theirs) in evidence.counts.items()
        }
        tests = {"not_worse": evidence.metric, "worse": evidence.worse, **evidence.guardrails}
        state["tests"] = {name: finding_row(one) for name, one in tests.items()}
        state["sample_ratio_mismatch"] = evidence.mismatched
        state["live"] = {"candidate": evidence.live[0], "serving": evidence.live[1]}
        gap = evidence.gap
        state["heldout_less_live"] = (
            None if gap is None else {"candidate": gap.candidate, "serving": gap.serving}
        )
        state["alarm"] = evidence.alarm
    return state


def plan_of(releaser: Releaser, *, effect: float, rate: float) -> dict[str, Any]:
    """Returns the outcomes that each stage needs for a candidate better by ``effect``."""
    release = with_lineage_margin(releaser.log, releaser.release)
    stages = planned_answers(release, effect=effect, rate=rate)
    return {
        "effect": effect,
        "rate": rate,
        "shadow": releaser.release.shadow,
        "stages": [
            {"share": share, "outcomes": count}
            for share, count in zip(releaser.release.stages, stages, strict=True)
        ],
        "outcomes": sum(stages),
    }


def exit_code(state: dict[str, Any]) -> int:
    """Returns the exit code for a state. A promotion of restored weights ends a rollback."""
    if state["restores"] is not None:
        return ROLLED_BACK_CODE
    codes = {"hold": HELD_CODE, "rollback": ROLLED_BACK_CODE}
    verdict = state["state"]
    return UNDECIDED_CODE if verdict in UNDECIDED - {"hold"} else codes.get(verdict, 0)


def line_of(decision: Decision) -> str:
    """Returns a decision as one line for people."""
    number = f"{time_of(decision.at)} {decision.number}"
    words = [f"{number}: {decision.verdict}", f"{decision.serving.words} serves"]
    if decision.candidate is not None:
        words.append(f"candidate {decision.candidate.words.removeprefix('version ')}")
    if decision.share:
        words.append(f"share {decision.share:g}")
    if decision.copies:
        words.append(f"copies {decision.copies:g}")
    if decision.waits_for:
        words.append(f"waits for {decision.waits_for}")
    return safe_line(f"{', '.join(words)}; by {decision.by}: {decision.reason}")


def _hold_back_row(releaser: Releaser, now: float) -> dict[str, Any] | None:
    """Returns what promotions add up to against the hold-back version; None if there is none."""
    newest = releaser.log.newest
    if newest is None or newest.hold_back is None:
        return None
    row: dict[str, Any] = {
        "version": None if newest.hold_back.upstream else newest.hold_back.version,
        "upstream": newest.hold_back.upstream,
        "share": newest.hold_back_share,
        "returned": DECAYED in newest.evidence,
        "comparison": None,
    }
    found = releaser.hold_back(now)
    if found is not None:
        row["comparison"] = {
            "users": {"serving": found.counts[0], "hold_back": found.counts[1]},
            "metric": {"serving": found.means[0], "hold_back": found.means[1]},
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "log_evidence": found.log_evidence,
            "log_threshold": found.log_threshold,
            "worse": list(found.worse),
            "better": found.better,
        }
    return row


def _row(one: Decision) -> dict[str, Any]:
    return {
        "number": one.number,
        "verdict": one.verdict,
        "serving": None if one.serving.upstream else one.serving.version,
        "serving_upstream": one.serving.upstream,
        "candidate": None
        if one.candidate is None or one.candidate.upstream
        else one.candidate.version,
        "candidate_upstream": "" if one.candidate is None else one.candidate.upstream,
        "share": one.share,
        "copies": one.copies,
        "waits_for": one.waits_for,
        "at": one.at,
        "by": one.by,
        "reason": one.reason,
        "evidence": one.evidence,
    }
