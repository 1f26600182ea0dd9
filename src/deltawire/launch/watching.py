"""Watches a run from its bucket and shows it: events and probes in, a live view out.

::

    event-feed thread                        the caller's thread
    bucket → EventTail, ProbeTail  ──queue──▶ Watcher.tick → RunState → LiveView
"""

from __future__ import annotations

import time

import msgspec
from rich.console import Console
from rich.live import Live

from deltawire.config import RunConfig, flatten
from deltawire.config.served import served_precision
from deltawire.dashboard.live import LiveView
from deltawire.dashboard.readers import ReaderWatch
from deltawire.dashboard.release import CandidateFigures, candidates_of
from deltawire.dashboard.state import RunState
from deltawire.dashboard.summary import FrozenBase, Summary, WorkerVerdict, summarize
from deltawire.display import redact, safe_line
from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.events import Evaluated, Event, HeldoutScore, Life, Span
from deltawire.reward_monitor.watch import ProbeFigures, figures_of, read_probes
from deltawire.rl.evaluate.attestation import Attestation
from deltawire.rl.evaluate.audit import audit_consumption
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import EventFeed, EventTail, events_of
from deltawire.runtime.lines import line_bucket
from deltawire.store import Bucket
from deltawire.sync import find_run
from deltawire.sync.chain.base_statement import read_base
from deltawire.wire import keys
from deltawire.wire.roles import EVALUATOR_ROLE

TICK_S = 0.25
LINE_EVERY_S = 5.0
PROBES_EVERY_S = 5.0
"""Trainers store them at this interval."""


class ProbeTail:
    """Reads a run's probes every `PROBES_EVERY_S`.

    Damaged probes read as none. While the store does not answer, ``newest`` keeps its value.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.newest: ProbeFigures | None = None
        self._bucket = bucket
        self._read_at = float("-inf")

    def read(self, *, now: bool = False) -> None:
        """Reads the probes if they are due, or ``now``."""
        if not now and time.monotonic() - self._read_at < PROBES_EVERY_S:
            return
        self._read_at = time.monotonic()
        try:
            state = read_probes(self._bucket)
        except RetryError:
            return
        except CorruptError:
            state = None
        self.newest = figures_of(state) if state is not None and state.streams else None


class Watcher:
    """Collects a run's events and shows them: as a live view, or as lines with ``plain``."""

    def __init__(self, config: RunConfig, bucket: Bucket, console: Console, *, plain: bool) -> None:
        self.state = RunState()
        self.view = LiveView(
            config.train.versions,
            config.train.largest_age,
            name=config.name,
            warm_steps=config.warm_start.max_steps or None,
        )
        self.console = console
        self._tail = EventTail(bucket)
        self._probes = ProbeTail(bucket)
        self._feed = EventFeed(self._tail, every_s=TICK_S, each_round=self._probes.read)
        self._sessions: list[tuple[float, float]] = []
        self._printed_at = 0.0
        self._line = ""
        self.live = None if plain else Live(console=console, auto_refresh=False, transient=True)

    def start(self) -> None:
        """Starts reading events in the background, until `close`."""
        self._feed.start()
        if self.live is not None:
            self.live.start()

    def tick(self) -> None:
        """Shows new events, then sleeps for `TICK_S`."""
        self._add(self._feed.poll())
        if self.live is not None:
            self.live.update(self.view.render(self.state), refresh=True)
        elif time.monotonic() - self._printed_at >= LINE_EVERY_S:
            self._printed_at = time.monotonic()
            line = self.view.plain_line(self.state)
            if line != self._line:
                self.console.print(
                    safe_line(line), markup=False, emoji=False, highlight=False, soft_wrap=True
                )
                self._line = line
        time.sleep(TICK_S)

    def end_view(self) -> None:
        """Removes the live view, so that lines can be printed."""
        if self.live is not None:
            self.live.stop()

    def close(self) -> None:
        """Stops the background thread and adds the events it still had."""
        self._feed.close()
        self._add(self._feed.poll())

    def read(self) -> None:
        """Reads all events and the probes now, in the caller's thread."""
        self._probes.read(now=True)
        self._add(self._tail.read(everything=True))

    def _add(self, events: list[Event]) -> None:
        self.state.add(events)
        self.state.probes = self._probes.newest
        for event in sorted(events, key=_time_of):
            if isinstance(event, Life) and event.role == "supervisor" and event.what == "started":
                self._sessions.append((event.at, event.at))
            elif self._sessions:
                start, end = self._sessions[-1]
                self._sessions[-1] = (start, max(end, _time_of(event)))

    @property
    def wall_s(self) -> float:
        """Seconds that the run was active, summed over its sessions."""
        return sum(end - start for start, end in self._sessions)


def _time_of(event: Event) -> float:
    return event.end if isinstance(event, Span) else event.at


def _candidates(bucket: Bucket) -> list[CandidateFigures]:
    """Returns the candidates for live users; none in a run without decisions."""
    run = find_run(bucket)
    if run is None:
        return []
    log = DecisionLog(bucket, run.id)
    log.poll()
    return candidates_of(log)


def summary_of(
    config: RunConfig, bucket: Bucket, watcher: Watcher, verdicts: list[Attestation]
) -> Summary:
    """Summarizes a run from its events, its workers' attestations and an audit of its bucket."""
    audit = audit_consumption(bucket)
    for one in config.train.adapters:
        audit = audit.plus(audit_consumption(line_bucket(bucket, one.name)))
    summary = summarize(
        watcher.state,
        workers=[
            WorkerVerdict(
                id=verdict.worker,
                version=verdict.version,
                bit_identical=verdict.identical,
                supervised=verdict.supervised,
                groups=verdict.groups,
            )
            for verdict in verdicts
        ],
        wall_s=watcher.wall_s,
        bound=config.train.largest_age,
        target_versions=config.train.versions,
        name=config.name,
        precision=served_precision(config),
        base=_frozen_base(bucket),
        seed=config.seed,
        audit=audit,
        candidates=_candidates(bucket),
        warmup=config.train.schedule.warmup_steps,
        configuration={
            **{key: str(value) for key, value in redact(flatten(config)).items()},
            "shape": str(config.shape.get("name", "")),
        },
    )
    sets = summary.heldout_sets | line_scores(config, bucket)
    return msgspec.structs.replace(
        summary,
        heldout_sets=sets,
        continues=continuing_words(bucket, summary.versions),
        readers=ReaderWatch(bucket).lines(),
    )


def continuing_words(bucket: Bucket, version: int) -> str:
    """Says how a run is continued whose last version has no checkpoint; empty if it has one."""
    stored = set(bucket.list(keys.CHECKPOINTS))
    newest = next(
        (one for one in range(version, 0, -1) if keys.checkpoint_commit(one) in stored), 0
    )
    if newest == version:
        return ""
    steps = version - newest
    return (
        f"version {version} has no checkpoint; a run that continues, or a fork, computes "
        f"{steps} step{'s' if steps != 1 else ''} again "
        '(train.final_checkpoint = "always" stores one)'
    )


def line_scores(config: RunConfig, bucket: Bucket) -> dict[str, HeldoutScore]:
    """Reads the newest evaluation of each of several adapters, by name."""
    found = {}
    for one in config.train.adapters:
        events = events_of(line_bucket(bucket, one.name), EVALUATOR_ROLE)
        scores = [event for event in events if isinstance(event, Evaluated)]
        if scores:
            newest = max(scores, key=lambda event: event.version)
            found[one.name] = HeldoutScore(
                accuracy=newest.accuracy,
                greedy=newest.greedy,
                reward=newest.reward or 0.0,
                samples=newest.samples,
                problems=newest.problems,
            )
    return found


def _frozen_base(bucket: Bucket) -> FrozenBase | None:
    """Reads what a run states of its frozen base; None if it has none, or none that is readable."""
    try:
        run = find_run(bucket)
        stated = None if run is None else read_base(bucket, run)
    except DeltawireError:
        return None
    if stated is None:
        return None
    return FrozenBase(
        digest=stated.digest, packed=stated.packed, native=stated.native, errors=stated.errors
    )
