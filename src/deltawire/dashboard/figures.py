"""The table of figures that every view of a run shows.

A figure is a name, a unit, a help text and a function of the run's state. ``deltawire status``,
the live view and the report write it by its unit, the exporter turns it into a gauge, and trackers
get it version by version, as the figure of a state that holds one version only (`RunState.at`).

To add a figure, add a row here; for ``deltawire status`` also the field of the same name in
`deltawire.dashboard.status.RunStatus`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal, TypeVar

from deltawire.dashboard.state import RunState
from deltawire.dashboard.wording import MISSING, byte_size, duration, milliseconds, percent
from deltawire.dashboard.wording import figure as significant
from deltawire.events import Generated, Parity, Published, Step

Unit = Literal["", "share", "bytes", "ms", "s", "versions", "1/min", "1/s", "nats"]
Labels = tuple[tuple[str, str], ...]

_E = TypeVar("_E", Generated, Parity, Published, Step)


@dataclass(frozen=True)
class Figure:
    """A row of the table; ``of`` returns None where nothing was measured.

    ``metric`` and ``labels`` name the gauge, ``tracked`` the series of a tracker; a figure without
    one is not exported there. A dot in the name leads into a nested part of the status.

    Example::

        Figure("reward", "", "Mean reward of the newest step's groups", lambda state: ...)
    """

    name: str
    unit: Unit
    help: str
    of: Callable[[RunState], float | None]
    metric: str = ""
    labels: Labels = ()
    tracked: str = ""

    def text(self, value: float | None) -> str:
        """Write a value for people, by the unit."""
        match self.unit:
            case _ if value is None:
                return MISSING
            case "share":
                return percent(value)
            case "bytes":
                return byte_size(value)
            case "ms":
                return milliseconds(value)
            case "s":
                return duration(value)
            case _:
                return significant(value)


def _step(of: Callable[[Step], float | None]) -> Callable[[RunState], float | None]:
    """A figure of the newest step."""
    return lambda state: of(state.steps[max(state.steps)]) if state.steps else None


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


def _generated_rate(state: RunState) -> float | None:
    """Tokens of stored groups over the time between the first and the last of them."""
    every = [group for one in state.with_role("worker") for group in one.generated.values()]
    within = recent(dict(enumerate(every)), state.recent_s).values()
    groups = sorted((group.at, group.tokens) for group in within)
    if len(groups) < 2 or groups[-1][0] <= groups[0][0]:
        return None
    return sum(tokens for _, tokens in groups[1:]) / (groups[-1][0] - groups[0][0])


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


def _heldout(part: Literal["accuracy", "greedy", "version"]) -> Callable[[RunState], float | None]:
    return lambda state: (
        getattr(state.evaluated[max(state.evaluated)], part) if state.evaluated else None
    )


FIGURES: Final = (
    Figure(
        "steps_per_minute",
        "1/min",
        "Optimizer steps a minute",
        lambda state: state.steps_per_minute,
        metric="steps_per_minute",
    ),
    Figure(
        "reward",
        "",
        "Mean reward of the newest step's groups",
        _step(lambda step: step.reward_mean),
        metric="reward",
        tracked="reward",
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
    Figure("loss", "", "Loss of the newest step", _step(lambda step: step.loss), tracked="loss"),
    Figure(
        "grad_norm",
        "",
        "Gradient norm of the newest step",
        _step(lambda step: step.grad_norm),
        tracked="grad_norm",
    ),
    Figure(
        "clipped",
        "share",
        "Share of the newest step's tokens whose ratio was clipped",
        _step(lambda step: step.clipped),
        tracked="clipped",
    ),
    Figure("tokens", "", "Tokens of the newest step", _step(lambda s: s.tokens), tracked="tokens"),
    Figure("groups", "", "Groups of the newest step", _step(lambda s: s.groups), tracked="groups"),
    Figure(
        "groups_dropped",
        "",
        "Groups dropped before the newest step",
        _step(lambda step: step.dropped),
        tracked="groups_dropped",
    ),
    Figure(
        "step_s",
        "s",
        "Duration of the newest step",
        _step(lambda step: step.seconds),
        tracked="step_seconds",
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
        _generated_rate,
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
        "The same over tokens that the trained version drew, median of the steps",
        _over(
            median,
            lambda state: (b.numeric.k3 for b in state.parity.values() if b.numeric.tokens),
        ),
        metric="k3_nats",
        labels=(("statistic", "median_same_version"),),
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
)
"""Every figure that is a function of the run's events."""

BY_NAME: Final = {row.name: row for row in FIGURES}


def value(name: str, state: RunState) -> float | None:
    """The value of one figure."""
    return BY_NAME[name].of(state)
