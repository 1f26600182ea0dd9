"""Collects the events of all processes of a run into its state.

Events arrive interleaved and late, so nothing here depends on their order: an entry with a key (a
version, a sequence) keeps its latest event, and a series is sorted when it is read.

The memory for this is bounded, however long the run. Views may have `MAX_ENTRIES` spans, swaps and
groups, at about 150 bytes each, so 150 MB; a process has an equal share of them. Beyond its share,
older spans are merged 64 at a time, which keeps the seconds of each activity and blurs where they
lie; of swaps and groups the newest stay, and the number of groups. Of a step's groups, their
staleness is kept one by one for the newest `MAX_STALENESS` groups, 16 bytes each and thus 64 MB; an
older step keeps `SAMPLED` of them, the largest included. Steps, versions and evaluations stay, one
entry a version.

Idle time is counted in the window from the first to the last training step; the start and the
warm start are not part of it. There, a process's idle share is ``wait / (wait + busy)``, where
busy is every span that is neither ``wait`` nor ``start``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from deltawire.events import (
    Activity,
    Allocated,
    Attempt,
    Controlled,
    Diverged,
    Evaluated,
    Event,
    Forecasted,
    Generated,
    HeldoutLoss,
    Life,
    NoProgress,
    Parity,
    Published,
    Restored,
    Role,
    SettingsChanged,
    Span,
    Step,
    Swapped,
    WarmStep,
)
from deltawire.reward_monitor.watch import ProbeFigures

Window = tuple[float, float]

MAX_ENTRIES = 1 << 20
"""Spans, swaps and groups of all processes together."""
MIN_SHARE = 64
"""The least entries of one kind that a process keeps."""
MERGED = 64
"""Old spans that are merged at a time, into one for each activity."""
MAX_STALENESS = 1 << 22
SAMPLED = 64

_LATELY_S = 3.0

# A trainer may do the warm start too, and an evaluator may swap: the most specific role first.
_SPECIFIC: tuple[Role, ...] = ("trainer", "evaluator", "reference", "worker", "warm-start")

_Timed = TypeVar(
    "_Timed",
    Allocated,
    Evaluated,
    Controlled,
    Forecasted,
    Generated,
    HeldoutLoss,
    Parity,
    Published,
    Restored,
    SettingsChanged,
    Step,
    Swapped,
    WarmStep,
)


@dataclass(slots=True)
class ProcessState:
    """One process of the run, by the events it and its supervisor wrote."""

    name: str
    lives: list[Life] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    last_span: Span | None = None
    swaps: dict[int, Swapped] = field(default_factory=dict)
    """Keyed by version."""
    generated: dict[int, Generated] = field(default_factory=dict)
    """Keyed by sequence."""
    forgotten: int = 0
    """Groups that it stored before those in ``generated``."""
    first_kept: int = 0
    """Groups with lower sequence numbers are counted in ``forgotten``."""
    first_at: float = math.inf
    heard_at: float = -math.inf
    """Times of its first and its latest event, in seconds since the epoch."""
    version: int | None = None
    """The newest version it was seen to hold."""
    implied_role: Role | None = None
    """The role that its events imply, until one of its Life events arrives."""

    @property
    def last_life(self) -> Life | None:
        """The latest of its Life events."""
        return max(self.lives, key=lambda life: (life.at, life.what), default=None)

    @property
    def role(self) -> Role | None:
        """Its role in the run; None while no event implies one."""
        life = self.last_life
        return life.role if life else self.implied_role

    @property
    def supervised(self) -> bool:
        """False for a worker that someone started by hand."""
        life = self.last_life
        return life.supervised if life else True

    @property
    def restarts(self) -> int:
        """Number of times that its supervisor started it again."""
        return sum(life.what == "restarted" for life in self.lives)

    @property
    def gone(self) -> bool:
        """Returns whether its latest Life event is that it stopped or died."""
        life = self.last_life
        return life is not None and life.what in {"stopped", "died"}

    @property
    def doing(self) -> str:
        """The activity that took most of its last seconds, or its end.

        Spans are recorded when they end, so the last span by itself would always name the short
        activity at the end of each round.
        """
        life, span = self.last_life, self.last_span
        if life and (self.gone or span is None or life.at > span.end):
            return "start" if life.what in {"started", "restarted"} else life.what
        if span is None:
            return ""
        spent = self.seconds((span.end - _LATELY_S, span.end))
        return max(spent, key=lambda activity: (spent[activity], activity), default=span.activity)

    @property
    def groups(self) -> int:
        """Groups it has stored."""
        return len(self.generated) + self.forgotten

    def limit(self, entries: int) -> None:
        """Keeps about ``entries`` spans, swaps and groups, or up to twice as many."""
        if len(self.spans) > 2 * entries:
            self.spans = _merge_older(self.spans, entries)
        if len(self.swaps) > 2 * entries:
            self.swaps = _newest(self.swaps, entries)
        if len(self.generated) > 2 * entries:
            self.forgotten += len(self.generated) - entries
            self.generated = _newest(self.generated, entries)
            self.first_kept = min(self.generated)

    def add_span(self, span: Span) -> None:
        """Adds an activity."""
        self.spans.append(span)
        last = self.last_span
        if last is None or (span.end, span.start) > (last.end, last.start):
            self.last_span = span

    def holds(self, *versions: int) -> None:
        """Notes that it holds ``versions``."""
        known = () if self.version is None else (self.version,)
        self.version = max((*known, *versions), default=None)

    def imply(self, role: Role) -> None:
        """Notes an event of a kind that ``role`` writes."""
        if self.implied_role is None or _SPECIFIC.index(role) < _SPECIFIC.index(self.implied_role):
            self.implied_role = role

    def seconds(self, window: Window) -> dict[Activity, float]:
        """Seconds spent on each activity, its spans clipped to ``window``."""
        opens, closes = window
        spent: dict[Activity, float] = {}
        for span in self.spans:
            inside = min(span.end, closes) - max(span.start, opens)
            if inside > 0:
                spent[span.activity] = spent.get(span.activity, 0.0) + inside
        return spent


def wait_and_busy(spent: dict[Activity, float]) -> tuple[float, float]:
    """Seconds of ``wait``, and seconds of all other activities but ``start``."""
    busy = sum(seconds for what, seconds in spent.items() if what not in {"wait", "start"})
    return spent.get("wait", 0.0), busy


def _merge_older(spans: list[Span], kept: int) -> list[Span]:
    """Merges all spans but the newest ``kept``: chunks of them become one span an activity."""
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    older, merged = ordered[:-kept], []
    for first in range(0, len(older), MERGED):
        spent: dict[Activity, float] = {}
        for span in older[first : first + MERGED]:
            spent[span.activity] = spent.get(span.activity, 0.0) + span.end - span.start
        at = older[first].start
        for activity, seconds in spent.items():
            merged.append(
                Span(process=older[first].process, activity=activity, start=at, end=at + seconds)
            )
            at += seconds
    return merged + ordered[-kept:]


def _newest(events: dict[int, _Timed], kept: int) -> dict[int, _Timed]:
    return {number: events[number] for number in sorted(events)[-kept:]}


def _sampled(step: Step) -> Step:
    """Keeps `SAMPLED` groups of a step, at equal distances in the order of their staleness."""
    if len(step.queued) != len(step.staleness):
        return msgspec.structs.replace(step, staleness=sorted(step.staleness)[-SAMPLED:], queued=[])
    pairs = sorted(zip(step.staleness, step.queued, strict=True), reverse=True)
    chosen = pairs[:: -(-len(pairs) // SAMPLED)]
    return msgspec.structs.replace(
        step, staleness=[age for age, _ in chosen], queued=[queued for _, queued in chosen]
    )


class RunState:
    """Everything that the views of a run need; `add` more events to it at any time."""

    def __init__(self) -> None:
        self.processes: dict[str, ProcessState] = {}
        self._groups_added = 0
        self.steps: dict[int, Step] = {}
        """Keyed by the version that the step made."""
        self.allocated: dict[int, Allocated] = {}
        """The decisions of allocation before each step; empty with a fixed group size."""
        self.restored: dict[int, Restored] = {}
        """The versions that restore an earlier one after a rollback."""
        self.published: dict[int, Published] = {}
        self.evaluated: dict[int, Evaluated] = {}
        self.heldout_losses: dict[int, HeldoutLoss] = {}
        self.warm: dict[int, WarmStep] = {}
        self.no_progress: NoProgress | None = None
        """The latest alarm that steps move nothing."""
        self.parity: dict[int, Parity] = {}
        """Keyed by the version that the batch made, or would have made."""
        self.settings: dict[int, SettingsChanged] = {}
        """Keyed by the version that the run had when its settings changed."""
        self.decisions: dict[int, Controlled] = {}
        """The controller's, keyed by the version that was evaluated."""
        self.forecasts: dict[int, Forecasted] = {}
        """Keyed by the newest version that was measured."""
        self.probes: ProbeFigures | None = None
        """As the trainer stored them last; set by the reader of the bucket, not by events."""
        self.recent_s = math.inf
        """Rates that need no window of steps are measured over this much time."""

    def add(self, events: Iterable[Event]) -> None:
        """Adds ``events``, in any order."""
        for event in events:
            self._add(event)
        share = max(MAX_ENTRIES // (6 * max(len(self.processes), 1)), MIN_SHARE)
        for process in self.processes.values():
            process.limit(share)
        self._limit_staleness()

    def _limit_staleness(self) -> None:
        """Samples the groups of old steps, beyond `MAX_STALENESS` groups in all."""
        if self._groups_added <= MAX_STALENESS // 2:
            return
        self._groups_added = kept = 0
        for version in sorted(self.steps, reverse=True):
            step = self.steps[version]
            kept += len(step.staleness)
            if kept > MAX_STALENESS // 2 and len(step.staleness) > SAMPLED:
                self.steps[version] = _sampled(step)

    def _add_notice(self, event: Event) -> None:
        if isinstance(event, NoProgress):
            self.no_progress = max(event, self.no_progress or event, key=lambda one: one.at)
        elif isinstance(event, SettingsChanged):
            _keep_latest(self.settings, event.version, event)
        elif isinstance(event, Controlled):
            _keep_latest(self.decisions, event.version, event)
        elif isinstance(event, Forecasted):
            _keep_latest(self.forecasts, event.version, event)
        elif isinstance(event, Allocated):
            _keep_latest(self.allocated, event.version, event)
        elif isinstance(event, Restored):
            _keep_latest(self.restored, event.version, event)

    def _add(self, event: Event) -> None:
        process = self.processes.setdefault(event.process, ProcessState(event.process))
        match event:
            case Life():
                process.lives.append(event)
            case Span():
                process.add_span(event)
            case Step():
                process.imply("trainer")
                self._groups_added += len(event.staleness)
                _keep_latest(self.steps, event.version, event)
            case Published():
                _keep_published(self.published, event)
            case Swapped():
                process.holds(event.version)
                _keep_latest(process.swaps, event.version, event)
            case Generated():
                process.imply("worker")
                process.holds(*event.versions)
                if event.sequence >= process.first_kept:
                    _keep_latest(process.generated, event.sequence, event)
            case Evaluated():
                process.imply("evaluator")
                process.holds(event.version)
                _keep_latest(self.evaluated, event.version, event)
            case HeldoutLoss():
                process.imply("trainer")
                _keep_latest(self.heldout_losses, event.version, event)
            case WarmStep():
                process.imply("warm-start")
                _keep_latest(self.warm, event.step, event)
            case (
                Allocated()
                | Attempt()
                | Diverged()
                | Forecasted()
                | Controlled()
                | NoProgress()
                | Restored()
                | SettingsChanged()
            ):
                process.imply("trainer")
                self._add_notice(event)
            case Parity():
                process.imply("trainer")
                _keep_latest(self.parity, event.version, event)
        begins, ends = (event.start, event.end) if isinstance(event, Span) else (event.at, event.at)
        process.first_at = min(process.first_at, begins)
        process.heard_at = max(process.heard_at, ends)

    @property
    def version(self) -> int | None:
        """The newest version published."""
        return max(self.published, default=None)

    @property
    def versions(self) -> int:
        """Number of versions published after version 0, from the newest number: a killed publisher
        may lose an event or two. Numbers that a publisher skipped are counted."""
        return max(self.version or 0, 0)

    @property
    def steps_in_order(self) -> list[Step]:
        """The steps by the version they made."""
        return [self.steps[version] for version in sorted(self.steps)]

    @property
    def deltas(self) -> list[Published]:
        """The published versions after version 0, in order."""
        return [self.published[version] for version in sorted(self.published) if version > 0]

    @property
    def bytes_full(self) -> int | None:
        """The size of the whole model, by the newest version that states it."""
        stated = [version for version, event in self.published.items() if event.bytes_full > 0]
        return self.published[max(stated)].bytes_full if stated else None

    @property
    def accuracy_curve(self) -> list[tuple[int, float]]:
        """(version, held-out accuracy), in order of version."""
        return [(version, self.evaluated[version].accuracy) for version in sorted(self.evaluated)]

    @property
    def newest_evaluation(self) -> Evaluated | None:
        """The evaluation of the newest version that was measured."""
        return self.evaluated[max(self.evaluated)] if self.evaluated else None

    @property
    def heldout_loss_curve(self) -> list[tuple[int, float]]:
        """(version, loss on held-out documents), in order of version."""
        return [
            (version, loss)
            for version in sorted(self.heldout_losses)
            if (loss := self.heldout_losses[version].total.loss) is not None
        ]

    @property
    def newest_heldout_loss(self) -> HeldoutLoss | None:
        """The losses of the newest version that was measured."""
        return self.heldout_losses[max(self.heldout_losses)] if self.heldout_losses else None

    @property
    def reward_curve(self) -> list[tuple[int, float]]:
        """(version, mean training reward of the groups that made it), in order of version."""
        return [(step.version, step.reward_mean) for step in self.steps_in_order]

    @property
    def staleness(self) -> Counter[int]:
        """Returns how many consumed groups had each staleness."""
        return Counter(value for step in self.steps.values() for value in step.staleness)

    @property
    def last_parity(self) -> Parity | None:
        """The newest batch's."""
        return self.parity[max(self.parity)] if self.parity else None

    @property
    def newest_decision(self) -> Controlled | None:
        """The controller's decision from the newest evaluation."""
        return self.decisions[max(self.decisions)] if self.decisions else None

    @property
    def newest_forecast(self) -> Forecasted | None:
        """The trainer's forecast from the newest measurements."""
        return self.forecasts[max(self.forecasts)] if self.forecasts else None

    @property
    def last_warm(self) -> WarmStep | None:
        """The newest step of the warm start."""
        return self.warm[max(self.warm)] if self.warm else None

    @property
    def training(self) -> bool:
        """Returns whether the reinforcement-learning phase has begun."""
        return bool(self.steps) or self.versions > 0

    @property
    def window(self) -> Window | None:
        """From the first to the last training step; None before there are two."""
        times = [step.at for step in self.steps.values()]
        return (min(times), max(times)) if times and max(times) > min(times) else None

    @property
    def extent(self) -> Window | None:
        """From the first event to the last.

        A worker that joined by hand counts only without others: its clock may be wrong.
        """
        heard = [process for process in self.processes.values() if process.supervised]
        heard = heard or list(self.processes.values())
        if not heard:
            return None
        return min(one.first_at for one in heard), max(one.heard_at for one in heard)

    @property
    def steps_per_minute(self) -> float | None:
        """The pace between the first and the last step."""
        if (window := self.window) is None:
            return None
        return 60 * (len(self.steps) - 1) / (window[1] - window[0])

    def at(self, version: int, *, swaps: bool = True) -> RunState:
        """Returns the part of the state that belongs to one version; without ``swaps`` in a time
        that does not depend on the number of workers."""
        part = RunState()
        for theirs, own in (
            (part.steps, self.steps),
            (part.published, self.published),
            (part.evaluated, self.evaluated),
            (part.heldout_losses, self.heldout_losses),
            (part.parity, self.parity),
        ):
            if version in own:
                theirs[version] = own[version]  # type: ignore[assignment]
        for process in self.with_role("worker") if swaps else ():
            if version in process.swaps:
                part.processes[process.name] = ProcessState(
                    process.name, swaps={version: process.swaps[version]}, implied_role="worker"
                )
        return part

    def with_role(self, role: Role) -> list[ProcessState]:
        """The processes of one role."""
        return [process for process in self.processes.values() if process.role == role]

    def lag(self, process: ProcessState) -> int | None:
        """The newest version minus the one that ``process`` holds."""
        if process.version is None or self.version is None:
            return None
        return max(0, self.version - process.version)

    def idle(self, processes: Iterable[ProcessState]) -> float | None:
        """The share of their time that ``processes`` together waited; None if none was seen."""
        if (window := self.window) is None:
            return None
        parts = [wait_and_busy(process.seconds(window)) for process in processes]
        wait, busy = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return wait / (wait + busy) if wait + busy > 0 else None


def _keep_published(events: dict[int, Published], event: Published) -> None:
    """Keeps the later event of a version; of two at one time, that with its anchor's bytes."""
    kept = events.get(event.version)
    if kept is None or (event.at, event.bytes_anchor) >= (kept.at, kept.bytes_anchor):
        events[event.version] = event


def _keep_latest(events: dict[int, _Timed], key: int, event: _Timed) -> None:
    """Keeps the later of two events: after a crash a step may be repeated."""
    kept = events.get(key)
    if kept is None or event.at >= kept.at:
        events[key] = event
