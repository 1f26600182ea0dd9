"""Summarizes a finished run: the contract of ``report.json``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from deltawire.dashboard.figures import value
from deltawire.dashboard.state import RunState
from deltawire.reward_monitor.watch import ProbeFigures
from deltawire.rl.control.drop_bias import PolicyCost, cost_of
from deltawire.rl.evaluate.audit import Consumption


class WorkerVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The closing audit's finding on one worker.

    ``bit_identical`` says whether its serving weights equalled its version's to the bit; None
    where it left before it could be asked.
    """

    id: str
    version: int | None
    bit_identical: bool | None
    supervised: bool = True
    groups: int = 0


class Heldout(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy at the first and the last evaluated version, and the curve between."""

    first: float | None
    last: float | None
    greedy_first: float | None
    greedy_last: float | None
    problems: int | None
    samples: int | None
    curve: list[tuple[int, float]]


class DeltaSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the whole model, and of the deltas after version 0."""

    full: int | None
    delta_mean: float | None
    delta_max: int | None
    delta_total: int
    changed_mean: float | None
    """The mean share of the model's elements that a version changed."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness of the consumed groups, in versions."""

    max: int | None
    mean: float | None
    bound: int
    histogram: dict[int, int]
    max_by_step: list[tuple[int, int]]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of reading every manifest, and every group that one names, from the bucket.

    ``groups`` were read, the largest staleness of their tokens was ``staleness_max``; ``repeated``
    groups were consumed twice and ``lost`` ones could not be read.
    """

    versions: int
    groups: int
    staleness_max: int
    repeated: int
    lost: int


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Idle shares of the time between the first and the last step; workers count together."""

    trainer: float | None
    workers: float | None


class StepDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """k3 between sampler and trainer over the steps, in nats a token: over all tokens, and so with
    the policy's own change where they were stale."""

    median: float | None
    max: float | None


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Sampler and trainer over the steps: the numeric k3 is over tokens that the trained version
    itself drew, null where there were none. ``flipped_worst`` is the largest share of flipped
    expert choices that any layer had in a step. ``warnings`` counts steps that had one, ``masked``
    sequences, and ``stopped`` is what stopped the run."""

    numeric_k3_median: float | None
    numeric_k3_max: float | None
    largest_gap: float | None
    flipped_worst: float | None
    warnings: int
    masked: int
    stopped: list[str]


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean training reward over the first and over the last tenth of the steps."""

    first: float | None
    last: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``report.json``. A figure that nothing was measured for is null."""

    format: Literal[1] = 1
    name: str
    seed: int
    wall_s: float
    versions: int
    target_versions: int
    steps_per_minute: float | None
    heldout: Heldout
    reward: Reward
    bytes: DeltaSizes
    staleness: Staleness
    proof: Proof | None
    idle: Idle
    workers: list[WorkerVerdict]
    groups_consumed: int
    groups_dropped: int
    policy_cost: PolicyCost
    tokens: int
    restarts: int
    trainer_blocked_ms: float | None
    swap_ms: float | None
    prepare_ms: float | None
    k3: StepDivergence
    configuration: dict[str, str]
    configuration_sha256: str
    parity: Agreement
    probes: ProbeFigures | None = None


def summarize(
    state: RunState,
    *,
    workers: Sequence[WorkerVerdict],
    wall_s: float,
    bound: int,
    target_versions: int,
    name: str,
    seed: int,
    audit: Consumption | None = None,
    configuration: Mapping[str, str] | None = None,
) -> Summary:
    """Compute every figure of the report; times in ``*_ms`` are medians, in milliseconds."""
    steps = state.steps_in_order
    settings = dict(configuration or {})
    return Summary(
        name=name,
        seed=seed,
        wall_s=wall_s,
        versions=audit.versions if audit else state.versions,
        target_versions=target_versions,
        steps_per_minute=value("steps_per_minute", state),
        heldout=_heldout(state),
        reward=_reward(state),
        bytes=_bytes(state),
        staleness=_staleness(state, bound, audit),
        proof=None if audit is None else _proof(audit),
        idle=Idle(
            trainer=value("trainer_idle", state),
            workers=value("workers_idle", state),
        ),
        workers=sorted(workers, key=lambda worker: worker.id),
        groups_consumed=audit.groups if audit else sum(step.groups for step in steps),
        groups_dropped=sum(step.dropped for step in steps),
        policy_cost=cost_of(
            [step.families for step in steps],
            [step.causes for step in steps],
            [step.failures for step in steps],
        ),
        tokens=sum(step.tokens for step in steps),
        restarts=sum(process.restarts for process in state.processes.values()),
        trainer_blocked_ms=value("blocked_ms", state),
        swap_ms=value("swap_ms", state),
        prepare_ms=value("prepare_ms", state),
        k3=StepDivergence(median=value("k3", state), max=value("k3_max", state)),
        configuration=settings,
        configuration_sha256=_digest(settings),
        parity=_agreement(state),
        probes=state.probes,
    )


def _heldout(state: RunState) -> Heldout:
    curve = state.accuracy_curve
    return Heldout(
        first=curve[0][1] if curve else None,
        last=curve[-1][1] if curve else None,
        greedy_first=state.evaluated[curve[0][0]].greedy if curve else None,
        greedy_last=state.evaluated[curve[-1][0]].greedy if curve else None,
        problems=state.evaluated[curve[-1][0]].problems if curve else None,
        samples=state.evaluated[curve[-1][0]].samples if curve else None,
        curve=curve,
    )


def _reward(state: RunState) -> Reward:
    rewards = [reward for _, reward in state.reward_curve]
    tenth = max(1, len(rewards) // 10)
    return Reward(
        first=fmean(rewards[:tenth]) if rewards else None,
        last=fmean(rewards[-tenth:]) if rewards else None,
    )


def _bytes(state: RunState) -> DeltaSizes:
    sizes = [event.bytes_delta for event in state.deltas]
    return DeltaSizes(
        full=state.bytes_full,
        delta_mean=value("bytes_per_version", state),
        delta_max=max(sizes, default=None),
        delta_total=sum(sizes),
        changed_mean=value("changed_share", state),
    )


def _proof(audit: Consumption) -> Proof:
    return Proof(
        versions=audit.versions,
        groups=audit.groups,
        staleness_max=audit.staleness_max,
        repeated=audit.repeated,
        lost=audit.lost,
    )


def _staleness(state: RunState, bound: int, audit: Consumption | None) -> Staleness:
    """Prefer the audit of the bucket: a killed process loses events."""
    by_version = (
        audit.staleness
        if audit
        else {step.version: step.staleness for step in state.steps_in_order}
    )
    counts = Counter(value for values in by_version.values() for value in values)
    groups = counts.total()
    weighted = sum(value * count for value, count in counts.items())
    return Staleness(
        max=max(counts, default=None),
        mean=weighted / groups if groups else None,
        bound=bound,
        histogram=dict(sorted(counts.items())),
        max_by_step=[
            (version, max(values)) for version, values in sorted(by_version.items()) if values
        ],
    )


def _agreement(state: RunState) -> Agreement:
    batches = [state.parity[version] for version in sorted(state.parity)]
    seen = [batch.numeric for batch in batches if batch.numeric.tokens]
    return Agreement(
        numeric_k3_median=value("k3_same_version", state),
        numeric_k3_max=max((one.k3 for one in seen), default=None),
        largest_gap=max((one.largest_gap for one in seen), default=None),
        flipped_worst=max((max(b.flipped) for b in batches if b.flipped), default=None),
        warnings=sum(bool(batch.warnings) for batch in batches),
        masked=sum(batch.sequences_masked for batch in batches),
        stopped=[name for batch in batches for name in batch.stopped],
    )


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(settings.items()))).hexdigest()
