"""The table of figures that every view of a run shows.

A figure is a name, a unit, a help text and a function of the run's state. ``deltawire status``,
the live view and the report write it by its unit, ``report.json`` holds its value, the exporter
turns it into a gauge, and trackers get it version by version, as the figure of a state that holds
one version only (`RunState.at`).

To add a figure, add a row here. Exporter and trackers then have it, if it names a ``metric`` or
``tracked``; for ``deltawire status`` add a field of the same name to
`deltawire.dashboard.status.RunStatus`, for the report's table its name to
`deltawire.dashboard.report.REPORTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Final, Literal, TypeVar

from deltawire.dashboard.budget_figures import BUDGET_FIGURES
from deltawire.dashboard.figure import Figure, Unit
from deltawire.dashboard.latency_figures import LATENCY_FIGURES, rate_of
from deltawire.dashboard.pair_figures import PAIR_FIGURES
from deltawire.dashboard.state import RunState
from deltawire.events import Gaps, Generated, Parity, Published, Step

_E = TypeVar("_E", Generated, Parity, Published, Step)


def _of_step(
    name: str,
    unit: Unit,
    help_: str,
    of: Callable[[Step], float | None],
    *,
    metric: str = "",
    tracked: str = "",
) -> Figure:
    """A figure of the newest step, which trackers get by its name if they know no other."""

    def newest(state: RunState) -> float | None:
        return of(state.steps[max(state.steps)]) if state.steps else None

    return Figure(name, unit, help_, newest, metric=metric, tracked=tracked or name)


def _total(of: Callable[[Step], int]) -> Callable[[RunState], int | None]:
    """A count over all steps."""
    return lambda state: sum(map(of, state.steps.values())) if state.steps else None


def _newest_staleness(state: RunState) -> float | None:
    for step in reversed(state.steps_in_order):
        if step.staleness:
            return fmean(step.staleness)
    return None


def _reward_of_tenth(tenth: Literal["first", "last"]) -> Callable[[RunState], float | None]:
    """Mean training reward over the first or the last tenth of the steps."""

    def of(state: RunState) -> float | None:
        rewards = [reward for _, reward in state.reward_curve]
        count = max(1, len(rewards) // 10)
        part = rewards[:count] if tenth == "first" else rewards[-count:]
        return fmean(part) if part else None

    return of


def _restarts(state: RunState) -> int | None:
    return sum(one.restarts for one in state.processes.values()) if state.processes else None


def _published(of: Callable[[Published], float | None]) -> Callable[[RunState], float | None]:
    """A figure of the newest published version after version 0."""
    return lambda state: of(state.deltas[-1]) if state.deltas else None


def _over(
    summary: Callable[[Sequence[float]], float], values: Callable[[RunState], Iterable[float]]
) -> Callable[[RunState], float | None]:
    """A summary of several values; None if there are none."""

    def of(state: RunState) -> float | None:
        found = list(values(state))
        return summary(found) if found else None

    return of


def _queued(state: RunState) -> Iterable[int]:
    for step in state.steps.values():
        if len(step.queued) == len(step.staleness):
            yield from step.queued


def _in_flight(state: RunState) -> Iterable[int]:
    for step in state.steps.values():
        if len(step.queued) == len(step.staleness):
            yield from (a - b for a, b in zip(step.staleness, step.queued, strict=True))


def _staleness(state: RunState) -> Iterable[int]:
    return (value for step in state.steps.values() for value in step.staleness)


def _spread(
    part: str, values: Callable[[RunState], Iterable[float]], tracked: dict[str, str], help_: str
) -> list[Figure]:
    rows: list[tuple[str, Callable[[Sequence[float]], float]]] = [("mean", fmean), ("max", max)]
    return [
        Figure(
            f"staleness.{part}.{statistic}",
            "versions",
            f"{help_}, {statistic}",
            _over(summary, values),
            metric="staleness_versions",
            labels=(("part", part), ("statistic", statistic)),
            tracked=tracked.get(statistic, ""),
        )
        for statistic, summary in rows
    ]


def recent(events: dict[int, _E], window_s: float) -> dict[int, _E]:
    """The events within ``window_s`` of the latest, and at least two: a step may take longer."""
    order = sorted(events.items(), key=lambda item: (item[1].at, item[0]))
    opens = order[-1][1].at - window_s if order else 0.0
    return dict([pair for pair in order[:-2] if pair[1].at >= opens] + order[-2:])


def _trained_rate(state: RunState) -> float | None:
    if (window := state.window) is None:
        return None
    return sum(step.tokens for step in state.steps_in_order[1:]) / (window[1] - window[0])


def _window(state: RunState) -> float | None:
    return None if state.window is None else state.window[1] - state.window[0]


def _swaps(state: RunState) -> Iterable[float]:
    return (swap.swap_ms for one in state.with_role("worker") for swap in one.swaps.values())


def _preparations(state: RunState) -> Iterable[float]:
    return (swap.prepare_ms for one in state.with_role("worker") for swap in one.swaps.values())


def _heldout(
    part: Literal["accuracy", "greedy", "reward", "version", "area"],
    at: Callable[[Iterable[int]], int] = max,
) -> Callable[[RunState], float | None]:
    """A figure of the newest evaluation, or with ``min`` of the first."""
    return lambda state: (
        getattr(state.evaluated[at(state.evaluated)], part) if state.evaluated else None
    )


def _heldout_loss(
    part: Literal["loss", "perplexity"], at: Callable[[Iterable[int]], int] = max
) -> Callable[[RunState], float | None]:
    """A figure of the newest held-out loss, or with ``min`` of the first."""
    return lambda state: (
        getattr(state.heldout_losses[at(state.heldout_losses)].total, part)
        if state.heldout_losses
        else None
    )


def _numeric(of: Callable[[Gaps], float]) -> Callable[[RunState], Iterable[float]]:
    """Values over the batches that have tokens of the trained version itself."""
    return lambda state: (of(b.numeric) for b in state.parity.values() if b.numeric.tokens)


def _of_batches(of: Callable[[Parity], int]) -> Callable[[RunState], int | None]:
    return lambda state: sum(map(of, state.parity.values())) if state.parity else None


FIGURES: Final = (
    Figure(
        "steps_per_minute",
        "1/min",
        "Optimizer steps a minute",
        lambda state: state.steps_per_minute,
        metric="steps_per_minute",
    ),
    _of_step(
        "reward",
        "",
        "Mean reward of the newest step's groups",
        lambda step: step.reward_mean,
        metric="reward",
    ),
    Figure(
        "reward_first",
        "",
        "Mean reward over the first tenth of the steps",
        _reward_of_tenth("first"),
    ),
    Figure(
        "reward_last", "", "Mean reward over the last tenth of the steps", _reward_of_tenth("last")
    ),
    Figure(
        "heldout",
        "share",
        "Held-out accuracy, newest measured",
        _heldout("accuracy"),
        metric="heldout_accuracy",
        tracked="heldout/accuracy",
    ),
    Figure(
        "heldout_reward",
        "",
        "Mean reward of held-out episodes, newest measured",
        _heldout("reward"),
        metric="heldout_reward",
        tracked="heldout/reward",
    ),
    Figure(
        "heldout_area",
        "share",
        "Area under held-out accuracy over thinking budgets, newest measured",
        _heldout("area"),
        metric="heldout_area",
        tracked="heldout/area",
    ),
    Figure(
        "heldout_area_first",
        "share",
        "Area under held-out accuracy over thinking budgets, first measured",
        _heldout("area", min),
    ),
    Figure(
        "heldout_greedy",
        "share",
        "Held-out accuracy of greedy answers, newest measured",
        _heldout("greedy"),
        tracked="heldout/greedy",
    ),
    Figure(
        "heldout_version",
        "",
        "The version that held-out accuracy was measured at",
        _heldout("version"),
        metric="heldout_version",
        tracked="heldout/version",
    ),
    Figure(
        "heldout_first",
        "share",
        "Held-out accuracy, first measured",
        _heldout("accuracy", min),
    ),
    Figure(
        "heldout_greedy_first",
        "share",
        "Held-out accuracy of greedy answers, first measured",
        _heldout("greedy", min),
    ),
    Figure(
        "heldout_loss",
        "nats",
        "Loss on held-out documents a token, newest measured",
        _heldout_loss("loss"),
        metric="heldout_loss_nats",
        tracked="heldout/loss",
    ),
    Figure(
        "heldout_loss_first",
        "nats",
        "Loss on held-out documents a token, first measured",
        _heldout_loss("loss", min),
    ),
    Figure(
        "heldout_perplexity",
        "",
        "Perplexity on held-out documents, newest measured",
        _heldout_loss("perplexity"),
        metric="heldout_perplexity",
        tracked="heldout/perplexity",
    ),
    Figure(
        "heldout_loss_version",
        "",
        "The version that the held-out loss was measured at",
        lambda state: max(state.heldout_losses) if state.heldout_losses else None,
        metric="heldout_loss_version",
        tracked="heldout/loss_version",
    ),
    _of_step("loss", "", "Loss of the newest step", lambda step: step.loss),
    _of_step("grad_norm", "", "Gradient norm of the newest step", lambda step: step.grad_norm),
    _of_step(
        "clipped",
        "share",
        "Share of the newest step's tokens whose ratio was clipped",
        lambda step: step.clipped,
    ),
    _of_step(
        "entropy",
        "nats",
        "Mean entropy of the policy a token, newest step",
        lambda step: step.entropy,
        metric="entropy_nats",
    ),
    _of_step(
        "completion_length",
        "",
        "Mean tokens of an episode that the model drew, newest step",
        lambda step: step.completion_length,
        metric="completion_length_tokens",
        tracked="completion/length",
    ),
    _of_step(
        "truncated",
        "share",
        "Share of the newest step's episodes that were cut off",
        lambda step: step.truncated,
        metric="truncated_share",
        tracked="completion/truncated",
    ),
    _of_step(
        "reward_spread",
        "",
        "Mean standard deviation of the rewards in a group, newest step",
        lambda step: step.reward_spread,
        metric="reward_spread",
    ),
    _of_step(
        "zero_advantage",
        "share",
        "Share of the newest step's groups whose rewards are all equal",
        lambda step: step.zero_advantage,
        metric="zero_advantage_share",
    ),
    *PAIR_FIGURES,
    _of_step("tokens", "", "Tokens of the newest step", lambda step: step.tokens),
    Figure("tokens_total", "", "Tokens trained on", _total(lambda step: step.tokens)),
    _of_step("groups", "", "Groups of the newest step", lambda step: step.groups),
    Figure("groups_total", "", "Groups of all steps", _total(lambda step: step.groups)),
    _of_step(
        "groups_dropped", "", "Groups dropped before the newest step", lambda step: step.dropped
    ),
    Figure("groups_dropped_total", "", "Groups dropped", _total(lambda step: step.dropped)),
    _of_step(
        "step_s",
        "s",
        "Duration of the newest step",
        lambda step: step.seconds,
        tracked="step_seconds",
    ),
    Figure(
        "staleness_newest",
        "versions",
        "Mean staleness of the newest step's groups",
        _newest_staleness,
    ),
    *_spread(
        "total",
        _staleness,
        {"mean": "staleness/mean", "max": "staleness/max"},
        "Staleness of consumed groups",
    ),
    *_spread(
        "in_flight",
        _in_flight,
        {"mean": "staleness/in_flight"},
        "Staleness from a group's oldest to its newest token",
    ),
    *_spread(
        "queued",
        _queued,
        {"mean": "staleness/queued"},
        "Staleness from a group's newest token to the step that took it",
    ),
    Figure(
        "trainer_idle",
        "share",
        "Share of its time that the trainer waited",
        lambda state: state.idle(state.with_role("trainer")),
        metric="idle_share",
        labels=(("role", "trainer"),),
    ),
    Figure(
        "workers_idle",
        "share",
        "Share of their time that workers waited",
        lambda state: state.idle(state.with_role("worker")),
        metric="idle_share",
        labels=(("role", "worker"),),
    ),
    Figure(
        "tokens_generated_per_s",
        "1/s",
        "Tokens that workers drew, a second",
        rate_of(lambda group: group.tokens),
        metric="tokens_per_second",
        labels=(("kind", "generated"),),
    ),
    Figure(
        "tokens_trained_per_s",
        "1/s",
        "Tokens that were trained on, a second",
        _trained_rate,
        metric="tokens_per_second",
        labels=(("kind", "trained"),),
    ),
    Figure(
        "bytes_full",
        "bytes",
        "Size of the whole model",
        lambda state: state.bytes_full,
        metric="model_bytes",
    ),
    Figure(
        "bytes_per_version",
        "bytes",
        "Mean size of a version's delta",
        _over(fmean, lambda state: (one.bytes_delta for one in state.deltas)),
        metric="version_bytes",
        tracked="bytes/delta",
    ),
    Figure(
        "bytes_newest",
        "bytes",
        "Size of the newest version's delta",
        _published(lambda one: one.bytes_delta),
    ),
    Figure(
        "bytes_largest",
        "bytes",
        "Size of the largest delta",
        _over(max, lambda state: (one.bytes_delta for one in state.deltas)),
    ),
    Figure(
        "bytes_total",
        "bytes",
        "Size of all deltas together",
        _over(sum, lambda state: (one.bytes_delta for one in state.deltas)),
    ),
    Figure(
        "bytes_anchor",
        "bytes",
        "Size of the newest version's anchor",
        _published(lambda one: one.bytes_anchor),
        tracked="bytes/anchor",
    ),
    Figure(
        "changed_share",
        "share",
        "Mean share of the weights that a version changes",
        _over(
            fmean,
            lambda state: (one.changed / one.elements for one in state.deltas if one.elements),
        ),
        metric="changed_share",
        tracked="bytes/changed",
    ),
    Figure(
        "swap_ms",
        "ms",
        "Median pause of a worker for a swap",
        _over(median, _swaps),
        metric="swap_seconds",
    ),
    Figure("swap_max_ms", "ms", "Longest pause for a swap", _over(max, _swaps), tracked="swap_ms"),
    Figure("prepare_ms", "ms", "Median time to prepare a swap", _over(median, _preparations)),
    Figure(
        "blocked_ms",
        "ms",
        "Median pause of the trainer to publish",
        _over(median, lambda state: (one.blocked_ms for one in state.deltas)),
        metric="blocked_seconds",
        tracked="publish_blocked_ms",
    ),
    Figure(
        "upload_ms",
        "ms",
        "Time to upload the newest version",
        _published(lambda one: one.upload_ms),
        tracked="publish_upload_ms",
    ),
    Figure(
        "merge_kept",
        "share",
        "Share of the adapter's change that the newest version's merged weights contain",
        _published(lambda one: None if one.merge is None else one.merge.kept),
        metric="merge_kept_share",
        tracked="merge_kept",
    ),
    Figure(
        "served_share",
        "share",
        "Part of the training since version 0 that the newest version's published weights contain",
        _published(lambda one: None if one.served is None else one.served.share),
        metric="served_share",
        tracked="served_share",
    ),
    Figure(
        "k3",
        "nats",
        "Divergence between sampler and trainer a token (k3), median of the steps",
        _over(median, lambda state: (step.k3 for step in state.steps.values())),
        metric="k3_nats",
        labels=(("statistic", "median"),),
        tracked="parity/k3",
    ),
    Figure(
        "k3_max",
        "nats",
        "Divergence between sampler and trainer a token (k3), largest of the steps",
        _over(max, lambda state: (step.k3 for step in state.steps.values())),
        metric="k3_nats",
        labels=(("statistic", "max"),),
    ),
    Figure(
        "k3_same_version",
        "nats",
        "The same (k3) over tokens that the trained version drew, median of the steps",
        _over(median, _numeric(lambda numeric: numeric.k3)),
        metric="k3_nats",
        labels=(("statistic", "median_same_version"),),
    ),
    Figure(
        "k3_same_version_max",
        "nats",
        "The same (k3) over tokens that the trained version drew, largest of the steps",
        _over(max, _numeric(lambda numeric: numeric.k3)),
    ),
    Figure(
        "largest_gap",
        "nats",
        "Largest difference of log-probabilities on a token that the trained version drew",
        _over(max, _numeric(lambda numeric: numeric.largest_gap)),
    ),
    Figure(
        "flipped_worst",
        "share",
        "Largest share of expert choices that one layer flipped in a step",
        _over(max, lambda state: (max(b.flipped) for b in state.parity.values() if b.flipped)),
    ),
    Figure(
        "parity_warnings",
        "",
        "Steps with a parity warning",
        _of_batches(lambda batch: bool(batch.warnings)),
    ),
    Figure(
        "sequences_masked",
        "",
        "Sequences masked for their divergence",
        _of_batches(lambda batch: batch.sequences_masked),
    ),
    Figure(
        "ratio_max",
        "",
        "Largest ratio of trainer to sampler probability",
        _over(max, lambda state: (step.ratio_max for step in state.steps.values())),
        metric="ratio_max",
        tracked="parity/ratio_max",
    ),
    Figure(
        "window_s",
        "s",
        "Time that the figures over time cover",
        _window,
        metric="window_seconds",
    ),
    Figure("restarts", "", "Processes started again", _restarts),
    *LATENCY_FIGURES,
    *BUDGET_FIGURES,
)
"""Every figure that is a function of the run's events."""

BY_NAME: Final = {row.name: row for row in FIGURES}


def value(name: str, state: RunState) -> float | None:
    """The value of one figure."""
    return BY_NAME[name].of(state)


def whole(name: str, state: RunState) -> int | None:
    """The value of one figure that is a whole number."""
    found = value(name, state)
    return None if found is None else int(found)


def text(name: str, state: RunState) -> str:
    """One figure as people read it."""
    return BY_NAME[name].text(value(name, state))
