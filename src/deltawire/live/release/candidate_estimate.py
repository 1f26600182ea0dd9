"""Estimates a candidate's metric before any user sees it, in the evaluator, which has its weights.

::

    captures, feedback ─▶ newest answers with an outcome ─▶ log π of their tokens ─▶ SNIPS, DR
                          (`estimate_answers`)               (one forward pass each)

The cost is bounded: one forward pass over at most ``estimate_answers`` answers and `MAX_TOKENS`
tokens for each version that is measured. Log-probabilities were logged by a replica's engine and
are computed here by the trainer's model, so ratios also hold the difference of their arithmetic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from deltawire.chat.requests import RequestSettings
from deltawire.config import RunConfig
from deltawire.engines.base import EVERYTHING
from deltawire.errors import DeltawireError
from deltawire.estimates import OffPolicyEstimate
from deltawire.live.learning.grouping import MaturedAnswer, trajectory_of
from deltawire.live.learning.records import LiveRecords
from deltawire.live.release.off_policy import (
    bounds,
    clipped_mass,
    clipped_ratios,
    doubly_robust,
    effective_answers,
    predicted_outcomes,
    self_normalized,
)
from deltawire.live.release.outcomes import METRIC, OutcomeRules
from deltawire.rl.rollout.policy_server import ServedPolicy
from deltawire.runtime.compacted_segments import newer_than, stored_owners
from deltawire.runtime.process import Process
from deltawire.train.batch import collate
from deltawire.train.policy import token_logprobs
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.compacted import Stream
from deltawire.wire.rollouts import Group

MAX_TOKENS = 1 << 19
"""Tokens that one estimate reads, at most."""
BATCH_TOKENS = 1 << 14
"""Tokens of one forward pass, padding included; one answer may have more."""
MAX_KEPT = 20_000
"""Answers in memory, the newest ones."""
FIRST_SEGMENTS = 64
"""Of what was stored before the evaluator began, it reads so many segments of each gateway."""

Array = NDArray[np.float64]

_FAULTS = (DeltawireError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


class RecentAnswers(LiveRecords):
    """The newest answers that gateways stored, at most `MAX_KEPT`, and the reports about them.

    Example::

        records = RecentAnswers(bucket)
        records.poll()
    """

    def _poll(self, stream: Stream, kind: type[Capture] | type[Feedback]) -> int:
        for gateway in stored_owners(self._bucket, stream):
            place = keys.live_segments(stream, gateway)
            if place in self._read:
                continue
            listed = [keys.trailing_number(key) or 0 for key in self._bucket.list(place)]
            listed += [name.span[1] for name in newer_than(self._bucket, stream, gateway, None)]
            if listed and max(listed) >= FIRST_SEGMENTS:
                self._read[place] = f"{place}{max(listed) - FIRST_SEGMENTS:010d}"
        new = super()._poll(stream, kind)
        if kind is Feedback:
            self._keep_newest()
        return new

    def _keep_newest(self) -> None:
        if len(self.answers) > MAX_KEPT:
            newest = sorted(self.answers.values(), key=lambda one: one.at)[-MAX_KEPT:]
            self.answers = {one.answer: one for one in newest}
        oldest = min((one.at for one in self.answers.values()), default=0.0)
        for answer, about in list(self.reports.items()):
            if answer not in self.answers and all(r.served_at < oldest for r in about.values()):
                del self.reports[answer]


class CandidateEstimator:
    """Estimates the live metric of the versions that an evaluator measures.

    Calling it with a policy returns the estimate; None if the run has no answers of live users or
    wants none. Nothing that goes wrong here stops the evaluation: the estimate says so.

    Example::

        estimator = CandidateEstimator(process, config)
        estimator(served, process.heartbeat.progress)
    """

    def __init__(self, process: Process, config: RunConfig) -> None:
        self._release = config.live.release
        self._temperature = config.rollout.temperature
        self._context = config.rollout.context
        self._restricted = RequestSettings.of(config.rollout).truncation != EVERYTHING
        self._rules: OutcomeRules | None = None
        self._live = config.live
        self._bucket = process.bucket
        self._records = RecentAnswers(process.bucket)

    def __call__(
        self, served: ServedPolicy, progress: Callable[[str], None]
    ) -> OffPolicyEstimate | None:
        """Returns the estimate for the version that ``served`` holds."""
        if not self._release.estimate_answers:
            return None
        began = time.monotonic()
        try:
            if not stored_owners(self._bucket, "captures"):
                return None
            self._records.poll()
            self._rules = self._rules or OutcomeRules(self._live)
            found = self._measured(served, progress)
        except _FAULTS as error:
            found = OffPolicyEstimate(answers=0, refused=f"{type(error).__name__}: {error}"[:300])
        return replace(found, seconds=time.monotonic() - began)

    def _measured(self, served: ServedPolicy, progress: Callable[[str], None]) -> OffPolicyEstimate:
        if self._restricted:
            reason = "the run samples from likely tokens only, and ratios need all probabilities"
            return OffPolicyEstimate(answers=0, refused=reason)
        model = getattr(served.engine, "model", None)
        if model is None:
            return OffPolicyEstimate(answers=0, refused="the engine runs in another process")
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        answers, left_out = self._chosen(time.time(), vocabulary)
        if len(answers) < 2:
            return OffPolicyEstimate(answers=len(answers), refused=_too_few(left_out))
        return self._estimate(answers, log_ratios(model, answers, progress))

    def _chosen(self, now: float, vocabulary: int) -> tuple[list[Capture], Counter[str]]:
        """Returns the newest answers that have an outcome and were sampled as in training, and
        counts why others were left out."""
        until = now - self._release.outcome_after_s
        chosen: list[Capture] = []
        left_out: Counter[str] = Counter()
        tokens = 0
        for one in sorted(self._records.answers.values(), key=lambda c: (-c.at, c.answer)):
            count = (len(one.prompt) + len(one.tokens)) // 4
            if one.at > until:
                left_out["without an outcome yet"] += 1
            elif one.unusable:
                left_out["without tokens"] += 1
            elif one.truncated or one.temperature != self._temperature or not one.temperature:
                left_out["sampled by other settings than the run's"] += 1
            elif count > self._context:
                left_out["longer than the context"] += 1
            elif max(one.prompt_ids.max(), one.token_ids.max()) >= vocabulary:
                left_out["with tokens that the model does not have"] += 1
            elif len(chosen) < self._release.estimate_answers and tokens + count <= MAX_TOKENS:
                chosen.append(one)
                tokens += count
        return chosen, left_out

    def _estimate(self, answers: Sequence[Capture], log_ratios_N: Array) -> OffPolicyEstimate:
        release, rules = self._release, self._rules
        assert rules is not None
        if np.isnan(log_ratios_N).any():
            reason = "the version gives logged answers log-probabilities that are no numbers"
            return OffPolicyEstimate(answers=len(answers), refused=reason)
        about = self._records.reports
        outcomes_N = np.array(
            [rules.values(one, about.get(one.answer, {}).values())[METRIC] for one in answers]
        )
        users = [one.user for one in answers]
        ratios_N = clipped_ratios(log_ratios_N, release.estimate_clip)
        clip = release.estimate_clip
        whole_N = clipped_ratios(log_ratios_N, 0.0)
        effective = effective_answers(ratios_N)
        facts = OffPolicyEstimate(
            answers=len(answers),
            users=len(set(users)),
            tokens=sum((len(one.prompt) + len(one.tokens)) // 4 for one in answers),
            effective=effective,
            mean_ratio=float(whole_N.mean()),
            clipped=float((whole_N > clip).mean()) if clip else 0.0,
            clipped_mass=clipped_mass(ratios_N),
            logged=float(outcomes_N.mean()),
        )
        if effective < release.estimate_least:
            return replace(
                facts,
                refused=f"the effective sample size is {effective:.1f} of {len(answers)} answers, "
                f"below {release.estimate_least:g}: the version is too far from those that "
                "answered, or there are too few answers",
            )
        if facts.clipped_mass > release.estimate_mass:
            return replace(
                facts,
                refused=f"{facts.clipped_mass:.0%} of the version's own answers are clipped, more "
                f"than {release.estimate_mass:.0%}: logged answers say too little about it",
            )
        cases = [MaturedAnswer(one, 0.0, 0.0) for one in answers]
        predicted_N = predicted_outcomes(cases, outcomes_N, users)
        snips = self_normalized(ratios_N, outcomes_N, users)
        robust = doubly_robust(
            ratios_N, outcomes_N, users, logged_N=predicted_N, candidate_N=predicted_N
        )
        low, high = bounds(ratios_N, outcomes_N, users)
        if not all(np.isfinite([snips.error, robust.error])):
            return replace(facts, refused="all answers are of one user")
        return replace(
            facts,
            snips=snips.value,
            snips_error=snips.error,
            doubly_robust=robust.value,
            doubly_robust_error=robust.error,
            low=low,
            high=high,
        )


def log_ratios(
    model: Any, answers: Sequence[Capture], progress: Callable[[str], None] = lambda _: None
) -> Array:
    """Returns log π(answer) − log μ(answer) in nats of whole answers, with the ``model`` as π:
    float64[N]."""
    found_N = np.zeros(len(answers))
    for places in _batches(answers):
        progress("estimate")
        trajectories = [trajectory_of(answers[n], episode=i) for i, n in enumerate(places)]
        first = answers[places[0]]
        group = Group("live", "", "live", first.temperature, first.prompt_ids, trajectories)
        with torch.no_grad():
            logprobs_NC = token_logprobs(model, collate([group])).double().cpu().numpy()
        for row, place in zip(logprobs_NC, places, strict=True):
            logged = answers[place].token_logprobs.astype(np.float64)
            found_N[place] = float((row[: len(logged)] - logged).sum())
    return found_N


def _batches(answers: Sequence[Capture]) -> Iterator[list[int]]:
    """Yields the places of the answers of each forward pass, shorter answers first."""
    size = {n: (len(one.prompt) + len(one.tokens)) // 4 for n, one in enumerate(answers)}
    batch: list[int] = []
    for place in sorted(size, key=lambda n: (size[n], n)):
        if batch and (len(batch) + 1) * size[place] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _too_few(left_out: Counter[str]) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    return f"too few logged answers: {why}" if why else "too few logged answers"
