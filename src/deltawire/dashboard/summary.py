"""Summarizes a finished run: the contract of ``report.json``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from deltawire.config.served import ServedPrecision
from deltawire.dashboard.allocation import AllocationTotals
from deltawire.dashboard.figures import value, whole
from deltawire.dashboard.readers import ReaderLine
from deltawire.dashboard.release import CandidateFigures
from deltawire.dashboard.state import RunState
from deltawire.dashboard.training_warnings import training_warnings
from deltawire.estimates import BudgetScore
from deltawire.events import (
    HeldoutScore,
    SourceLoss,
)
from deltawire.reward_monitor.watch import ProbeFigures
from deltawire.rl.control.drop_bias import PolicyCost, cost_of
from deltawire.rl.evaluate.audit import Consumption

LAST_STEP = (
    "entropy",
    "completion_length",
    "truncated",
    "reward_spread",
    "zero_advantage",
    "heldout_reward",
)
"""Figures of the newest step, and of the newest evaluation, that the summary holds as they are."""


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


class HeldoutLosses(msgspec.Struct, frozen=True, kw_only=True):
    """The loss on held-out documents at the first and the last version that was measured, in nats a
    token, the curve between, and the last of each source."""

    first: float | None
    last: float | None
    perplexity: float | None
    curve: list[tuple[int, float]]
    sources: dict[str, SourceLoss]


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


class ChangedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that the run was continued with, after ``version``; values are JSON."""

    version: int
    key: str
    old: str
    new: str


class FrozenBase(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen base of an adapter run, as run.json states it.

    Trainer, reference and sampler compared their bits with ``digest`` when they started. ``native``
    stored tensors were in the format ``packed`` already and kept their codes; ``errors`` is the
    relative error of each layer that was quantized.
    """

    digest: str
    packed: str
    native: int
    errors: dict[str, float]


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
    update_latency_ms: float | None = None
    update_latency_p95_ms: float | None = None
    update_latency_last_ms: float | None = None
    groups_per_s: float | None = None
    k3: StepDivergence
    configuration: dict[str, str]
    configuration_sha256: str
    parity: Agreement
    probes: ProbeFigures | None = None
    settings_changed: list[ChangedSetting] = []
    heldout_sets: dict[str, HeldoutScore] = {}
    """The newest evaluation of each named set, and of each of several adapters."""
    heldout_loss: HeldoutLosses | None = None
    heldout_budgets: dict[int, list[BudgetScore]] = {}
    """By version, accuracy over thinking budgets."""
    heldout_area: tuple[float | None, float | None] = (None, None)
    """The area under that curve at the first and at the last version that was measured."""
    """Null where no held-out documents were measured."""
    precision: ServedPrecision | None = None
    """Null where another trainer published the run."""
    base: FrozenBase | None = None
    """Null where the whole model is trained."""
    last_step: dict[str, float | None] = {}
    """The figures of `LAST_STEP`, by name."""
    allocation: AllocationTotals | None = None
    """Null with a fixed group size."""
    candidates: list[CandidateFigures] = []
    """The candidates for live users, as their newest decisions record them."""
    warnings: list[str] = []
    """Warnings about the training, a sentence each."""
    continues: str = ""
    """How this run is continued or forked, if its last version has no checkpoint."""
    readers: list[ReaderLine] = []
    """Pulls, relays and ranks of vLLM that reported in the last day."""


def summarize(
    state: RunState,
    *,
    workers: Sequence[WorkerVerdict],
    wall_s: float,
    bound: int,
    target_versions: int,
    name: str,
    precision: ServedPrecision | None = None,
    base: FrozenBase | None = None,
    seed: int,
    audit: Consumption | None = None,
    configuration: Mapping[str, str] | None = None,
    candidates: Sequence[CandidateFigures] = (),
    warmup: int = 0,
) -> Summary:
    """Computes every figure of the report; times in ``*_ms`` are medians, in milliseconds.

    ``warmup`` is the number of steps in which the learning rate rises.
    """
    steps = state.steps_in_order
    settings = dict(configuration or {})
    return Summary(
        name=name,
        precision=precision,
        base=base,
        seed=seed,
        wall_s=wall_s,
        versions=audit.versions if audit else state.versions,
        target_versions=target_versions,
        steps_per_minute=value("steps_per_minute", state),
        heldout=_heldout(state),
        reward=Reward(first=value("reward_first", state), last=value("reward_last", state)),
        bytes=_bytes(state),
        staleness=_staleness(state, bound, audit),
        proof=None if audit is None else _proof(audit),
        idle=Idle(trainer=value("trainer_idle", state), workers=value("workers_idle", state)),
        workers=sorted(workers, key=lambda worker: worker.id),
        groups_consumed=audit.groups if audit else (whole("groups_total", state) or 0),
        groups_dropped=whole("groups_dropped_total", state) or 0,
        policy_cost=cost_of(
            [step.families for step in steps],
            [step.causes for step in steps],
            [step.failures for step in steps],
        ),
        tokens=whole("tokens_total", state) or 0,
        restarts=whole("restarts", state) or 0,
        trainer_blocked_ms=value("blocked_ms", state),
        swap_ms=value("swap_ms", state),
        prepare_ms=value("prepare_ms", state),
        update_latency_ms=value("update_latency_ms", state),
        update_latency_p95_ms=value("update_latency_p95_ms", state),
        update_latency_last_ms=value("update_latency_last_ms", state),
        groups_per_s=value("groups_per_s", state),
        k3=StepDivergence(median=value("k3", state), max=value("k3_max", state)),
        configuration=settings,
        configuration_sha256=_digest(settings),
        parity=_agreement(state),
        probes=state.probes,
        settings_changed=_settings(state),
        heldout_sets=newest.sets if (newest := state.newest_evaluation) else {},
        heldout_budgets=_heldout_budgets(state),
        allocation=AllocationTotals.of(state),
        heldout_area=(value("heldout_area_first", state), value("heldout_area", state)),
        heldout_loss=_heldout_losses(state),
        last_step={name: value(name, state) for name in LAST_STEP},
        candidates=list(candidates),
        warnings=training_warnings(state, warmup=warmup),
    )


def _heldout_budgets(state: RunState) -> dict[int, list[BudgetScore]]:
    evaluated = sorted(state.evaluated.items())
    return {version: one.budgets for version, one in evaluated if one.budgets}


def _heldout_losses(state: RunState) -> HeldoutLosses | None:
    newest = state.newest_heldout_loss
    if newest is None:
        return None
    return HeldoutLosses(
        first=value("heldout_loss_first", state),
        last=newest.total.loss,
        perplexity=newest.total.perplexity,
        curve=state.heldout_loss_curve,
        sources=newest.sources,
    )


def _heldout(state: RunState) -> Heldout:
    newest = state.evaluated[max(state.evaluated)] if state.evaluated else None
    return Heldout(
        first=value("heldout_first", state),
        last=value("heldout", state),
        greedy_first=value("heldout_greedy_first", state),
        greedy_last=value("heldout_greedy", state),
        problems=newest.problems if newest else None,
        samples=newest.samples if newest else None,
        curve=state.accuracy_curve,
    )


def _settings(state: RunState) -> list[ChangedSetting]:
    return [
        ChangedSetting(version=version, key=key, old=_json(old), new=_json(new))
        for version, event in sorted(state.settings.items())
        for key, (old, new) in event.changes.items()
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _bytes(state: RunState) -> DeltaSizes:
    return DeltaSizes(
        full=whole("bytes_full", state),
        delta_mean=value("bytes_per_version", state),
        delta_max=whole("bytes_largest", state),
        delta_total=whole("bytes_total", state) or 0,
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
    """Prefers the audit of the bucket: a killed process loses events."""
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
    return Agreement(
        numeric_k3_median=value("k3_same_version", state),
        numeric_k3_max=value("k3_same_version_max", state),
        largest_gap=value("largest_gap", state),
        flipped_worst=value("flipped_worst", state),
        warnings=whole("parity_warnings", state) or 0,
        masked=whole("sequences_masked", state) or 0,
        stopped=[name for batch in batches for name in batch.stopped],
    )


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(settings.items()))).hexdigest()
