"""Figures of how soon a version serves: from the optimizer's step until a worker samples with it.

The update latency of a version at a worker is the time from the end of the optimizer's step that
made it until the worker had swapped it into its serving weights. It is copied, encoded, uploaded,
committed, noticed, fetched, verified and swapped in between. A version that no step made counts
from its commit, and one that a worker passed over does not count.

Clocks. The step's end is by the trainer's clock and the swap by the worker's, so that a latency is
as wrong as the two clocks differ. Two facts bound that. No worker serves a version before its step
ended: a worker with such a swap has a clock that is slow, by at least as much, and all its times
are moved by that. And the store states when it received each process's last heartbeat, which states
the process's own time: `clock_problem` compares these, to within `CLOCKS_AGREE_S`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

from deltawire.dashboard.figure import Figure
from deltawire.dashboard.state import RunState
from deltawire.events import Generated

CLOCKS_AGREE_S = 5.0
"""Seconds by which clocks may seem to differ: a heartbeat may be replaced between the listing and
its read, a request takes a while, and stores round times to a second."""


def update_latencies(state: RunState) -> dict[int, list[float]]:
    """Returns, by version, the milliseconds until each worker that swapped to it served it."""
    found: dict[int, list[float]] = {}
    for worker in state.with_role("worker"):
        latencies = {
            version: 1e3 * (swap.at - made)
            for version, swap in worker.swaps.items()
            if (made := _made_at(state, version)) is not None
        }
        slow = max(0.0, -min(latencies.values(), default=0.0))
        for version, latency in latencies.items():
            found.setdefault(version, []).append(latency + slow)
    return found


def _made_at(state: RunState, version: int) -> float | None:
    """When the optimizer's step ended, by the trainer's clock; of a version without a step, its
    commit. None if neither is known.

    A step's event is recorded once its weights are copied for publishing.
    """
    step, published = state.steps.get(version), state.published.get(version)
    if step is not None:
        return step.at - (0.0 if published is None else published.blocked_ms / 1e3)
    return None if published is None else published.at


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _over_all(of: Callable[[Sequence[float]], float]) -> Callable[[RunState], float | None]:
    def summary(state: RunState) -> float | None:
        values = [one for each in update_latencies(state).values() for one in each]
        return of(values) if values else None

    return summary


def _last_of_newest(state: RunState) -> float | None:
    found = update_latencies(state)
    return max(found[max(found)]) if found else None


def groups_within(state: RunState) -> list[Generated]:
    """Returns the groups that workers stored in the newest ``state.recent_s`` seconds, and at least
    the last two, by time."""
    every = [group for one in state.with_role("worker") for group in one.generated.values()]
    every.sort(key=lambda group: group.at)
    opens = every[-1].at - state.recent_s if every else 0.0
    return [group for group in every[:-2] if group.at >= opens] + every[-2:]


def rate_of(weight: Callable[[Generated], float]) -> Callable[[RunState], float | None]:
    """Returns a figure: the weights of stored groups over the time between the first and the last
    of them."""

    def rate(state: RunState) -> float | None:
        groups = groups_within(state)
        if len(groups) < 2 or groups[-1].at <= groups[0].at:
            return None
        return sum(map(weight, groups[1:])) / (groups[-1].at - groups[0].at)

    return rate


def clock_problem(offsets: Mapping[str, float]) -> str:
    """Says that clocks differ; empty if none does by more than `CLOCKS_AGREE_S`.

    ``offsets`` are the seconds by which each process's clock is ahead of the store's
    (`deltawire.runtime.fleet.Fleet.clock_offsets`).
    """
    if "trainer" not in offsets:
        return ""
    differences = {name: offset - offsets["trainer"] for name, offset in offsets.items()}
    wrong = {name: by for name, by in differences.items() if abs(by) > CLOCKS_AGREE_S}
    if not wrong:
        return ""
    worst = max(wrong, key=lambda name: abs(wrong[name]))
    direction = "ahead of" if wrong[worst] > 0 else "slower than"
    more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    return (
        f"the clock of {worst} is {abs(wrong[worst]):.0f} s {direction} the trainer's{more}, by "
        "the times at which the store received heartbeats: update latencies may be wrong by as "
        "much; synchronize the machines' clocks"
    )


LATENCY_FIGURES: Final = (
    Figure(
        "update_latency_ms",
        "ms",
        "Time from an optimizer step to a worker that serves its version, median",
        _over_all(median),
        metric="update_latency_seconds",
        labels=(("statistic", "median"),),
        tracked="update_latency/median",
    ),
    Figure(
        "update_latency_p95_ms",
        "ms",
        "Time from an optimizer step to a worker that serves its version, 95th percentile",
        _over_all(lambda values: percentile(values, 0.95)),
        metric="update_latency_seconds",
        labels=(("statistic", "p95"),),
        tracked="update_latency/p95",
    ),
    Figure(
        "update_latency_last_ms",
        "ms",
        "Time until the slowest worker served the newest version that any serves",
        _last_of_newest,
        metric="update_latency_seconds",
        labels=(("statistic", "last"),),
        tracked="update_latency/last",
    ),
    Figure(
        "groups_per_s",
        "1/s",
        "Tasks that workers finished a second, each a group of completions",
        rate_of(lambda _: 1.0),
        metric="groups_per_second",
    ),
)
"""How soon versions serve, and how fast tasks finish."""
