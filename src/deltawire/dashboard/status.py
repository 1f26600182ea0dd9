"""Reads how a run stands, from its bucket only, for ``deltawire status`` and the exporter.

Everything except ``run.json`` is optional: missing or damaged objects are listed as problems, and
the rest is shown. Figures over time cover the last minutes only, because a run of days has written
more events than a view should read. Ages compare this machine's clock with the
processes' own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from deltawire.config import FaultsConfig, RunConfig
from deltawire.config.served import ServedPrecision, served_precision
from deltawire.dashboard.allocation import AllocationTotals
from deltawire.dashboard.builds import builds_of, builds_problem
from deltawire.dashboard.figures import BY_NAME, recent, value, whole
from deltawire.dashboard.latency_figures import clock_problem
from deltawire.dashboard.live_processes import (
    LiveProcess,
    gateway_totals,
    live_processes,
    read_decider,
    read_gateways,
)
from deltawire.dashboard.readers import ReaderLine, ReaderWatch
from deltawire.dashboard.release import ReleaseStatus, release_of
from deltawire.dashboard.state import ProcessState, RunState
from deltawire.dashboard.training_warnings import training_warnings
from deltawire.dashboard.users import UserView, users_of
from deltawire.display import safe_line
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.estimates import BudgetScore
from deltawire.events import (
    Controlled,
    Forecasted,
    HeldoutScore,
    Life,
    Role,
    SourceLoss,
)
from deltawire.reward_monitor.monitor import ProbeState
from deltawire.reward_monitor.watch import describe_flag, excesses, flagged_in, read_probes
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_window import RecentEvents
from deltawire.runtime.fleet import Fleet, read_trainer
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.store.retrying import with_one_retry
from deltawire.sync import newest_version, read_run
from deltawire.sync.chain.version_poller import VersionPoller
from deltawire.wire import keys
from deltawire.wire.objects import decode_json
from deltawire.wire.run import Run
from deltawire.wire.status import Heartbeat, Incident, StoreTraffic, TrainerStatus

WINDOW_S = 300.0
READERS = 16
MAX_PROCESSES = 4096
MAX_STATUS_OBJECT_BYTES = 16 << 20
FRESH_S = 60.0
"""A stored status that is older, by this machine's clock, is not shown."""
MAX_STREAMS_NAMED = 12
"""Streams of events with unreadable segments that are named; the rest are counted."""

State = Literal["alive", "silent", "stalled", "ended", "unknown"]
_ROLES: tuple[Role, ...] = ("trainer", "worker", "evaluator", "reference", "warm-start")


class ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``state`` is ``silent`` if its last sign of life is older than
    ``faults.silence_s``, ``stalled`` if it reports that its own work has stopped. ``build`` is
    empty for a release that does not name it."""

    name: str
    role: Role | None
    state: State
    doing: str
    version: int | None
    lag: int | None
    idle: float | None
    groups: int | None
    restarts: int
    supervised: bool
    age_s: float | None
    host: str
    build: str = ""
    traffic: StoreTraffic | None = None
    """Its requests to its stores, counted; null for a release that does not say."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and largest of the recent steps' groups, in versions; null without such a step."""

    mean: float | None
    max: int | None


class StalenessSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness and its two parts: ``in_flight`` from a group's oldest to its newest token, and
    ``queued`` from its newest token to the step that consumed it."""

    bound: int | None
    total: Spread
    in_flight: Spread
    queued: Spread


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run; a figure that was not measured is null.

    Rates and shares are over ``window_s`` seconds, the time that the events read cover. ``tokens``
    are those that the models drew. ``k3_same_version`` is over tokens that the trained version
    itself drew: what differs there is arithmetic. ``failures`` counts, by cause, episodes that
    failed, groups that were dropped, thresholds of parity that were crossed, and processes that
    died. ``settings`` are those that differ from the run's first configuration, ``precision`` is
    what the sampler serves by that configuration. ``probes`` is by how much rewards exceed each
    probe.
    """

    format: Literal[1] = 1
    name: str
    bucket: str
    at: float
    phase: str
    version: int | None
    target: int | None
    window_s: float | None
    steps_per_minute: float | None
    reward: float | None
    loss: float | None
    reward_spread: float | None
    zero_advantage: float | None
    pairs: float | None = None
    pairs_total: float | None = None
    completion_length: float | None
    truncated: float | None
    entropy: float | None
    allocation: AllocationTotals | None = None
    heldout: float | None
    heldout_reward: float | None
    heldout_version: int | None
    heldout_sets: dict[str, HeldoutScore]
    heldout_loss: float | None
    heldout_perplexity: float | None
    heldout_loss_version: int | None
    heldout_area: float | None
    heldout_budgets: list[BudgetScore]
    heldout_sources: dict[str, SourceLoss]
    staleness: StalenessSplit
    trainer_idle: float | None
    workers_idle: float | None
    tokens_generated_per_s: float | None
    tokens_trained_per_s: float | None
    bytes_full: int | None
    bytes_per_version: float | None
    changed_share: float | None
    swap_ms: float | None
    blocked_ms: float | None
    update_latency_ms: float | None = None
    """Time from an optimizer step until a worker serves its version, by the clocks of the two
    processes: the median, the 95th percentile, and the slowest worker of the newest version."""
    update_latency_p95_ms: float | None = None
    update_latency_last_ms: float | None = None
    groups_per_s: float | None = None
    merge_kept: float | None
    served_share: float | None = None
    k3: float | None
    k3_max: float | None
    k3_same_version: float | None
    ratio_max: float | None
    groups_in_flight: int | None
    groups_stored: int
    settings: dict[str, Any]
    precision: ServedPrecision | None = None
    lines: dict[str, int | None] = {}
    """The newest version in each precision of ``train.also_publish``."""
    failures: dict[str, int]
    probes: dict[str, float]
    processes: list[ProcessLine]
    problems: list[str]
    incidents: list[Incident] = []
    """Incidents under workers' names that no honest worker of the run causes, and the workers that
    are quarantined."""
    self_attested: list[str] = []
    """The claims of workers that the trainer trusts without recomputing them."""
    alarm: str = ""
    """Why the latest steps moved nothing; empty if they moved something."""
    thinking_length: float | None = None
    """Mean tokens of thinking in a turn of the newest step, null without budgets; and the share of
    turns whose thinking was closed by force."""
    forced_share: float | None = None
    reused_length: float | None = None
    """Mean tokens of an episode of the newest step that another episode of its group drew."""
    forecast: Forecasted | None = None
    """The trainer's newest forecast; null without ``budget.stop_when``."""
    controlled: Controlled | None = None
    """The controller's newest decision; null without ``budget.controller = "auto"``."""
    budget_thinking: int | None = None
    budget_completions: int | None = None
    budget_steps: int | None = None
    budget_price: float | None = None
    budget_moves: int | None = None
    gateways: dict[str, float] = {}
    """Totals of the counters of the run's gateways, and the mean rates of their detectors; empty
    without a gateway."""
    upstreams: dict[str, str] = {}
    """The models of other providers that gateways can ask, by the upstream's name; nothing attests
    them."""
    live_processes: list[LiveProcess] = []
    """Gateways, their replicas, and what decides which version serves."""
    users: UserView | None = None
    """How users fared, by arm and version, over time; null without a gateway that says so."""
    release: ReleaseStatus | None = None
    """Which version serves live users, and who decided it; null without decisions."""
    sampled_episodes: int = 0
    """Episodes that the workers' present processes have ended, those of unfinished groups among
    them, and the tokens that they have drawn."""
    sampled_tokens: int = 0
    readers: list[ReaderLine] = []
    """Pulls, relays and ranks of vLLM that follow the run and report themselves."""


class Watch:
    """Reads a run's status repeatedly, fetching only what is new of its events.

    A large run's supervisor stores the status (`deltawire.launch.status_writer`), and then two
    requests suffice. It is made from the objects of all processes with ``stored`` false or another
    ``window_s``, in signed runs, and where the stored status is old or damaged. ``retrying`` is the
    same bucket with retries, where ``bucket`` has none: the run itself, without which there is no
    status, is read from it with at most one retry, because a view that waits shows nothing.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        window_s: float = WINDOW_S,
        stored: bool = True,
        retrying: Bucket | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._retrying = bucket if retrying is None else with_one_retry(retrying)
        self._stored = stored and window_s == WINDOW_S
        self._bucket = bucket
        self._window_s = window_s
        self._clock = clock
        self._events = RecentEvents(bucket, window_s)
        self._newest: int | None = None
        self._lines_held: dict[str, int | None] = {}
        self._poller: VersionPoller | None = None
        self._decisions: DecisionLog | None = None
        self._readers = ReaderWatch(bucket, clock=clock)

    def poll(self) -> RunStatus:
        """Reads the run's current status.

        Raises `InputError` if there is no run, `CorruptError` if its ``run.json`` is damaged,
        `RetryError` if the store does not answer.
        """
        bucket = self._bucket
        run = read_run(self._retrying)
        if (found := self._read_stored(run)) is not None:
            return found
        problems: list[str] = []
        config = _config(bucket, run, problems)
        trainer = _attempt(lambda: read_trainer(bucket), problems)
        probes = _attempt(lambda: read_probes(bucket), problems)
        problems += [
            f"{describe_flag(stream)}; see deltawire probes" for stream in flagged_in(probes)
        ]
        faults = config.faults if config else FaultsConfig()
        fleet = Fleet(bucket, silence_s=faults.silence_s, wall_clock=self._clock)
        fleet.poll()
        problems += [str(error) for error in fleet.errors]
        state = RunState()
        state.add(self._events.read())
        warmup = config.train.schedule.warmup_steps if config else 0
        problems += training_warnings(state, warmup=warmup)
        # The last segment of a process is read at any age, so old steps are left out here.
        state.recent_s = self._window_s
        state.steps = recent(state.steps, self._window_s)
        state.published = recent(state.published, self._window_s)
        state.parity = recent(state.parity, self._window_s)
        problems += _unreadable(self._events.unreadable)
        newest = self._newest = self._newest_version(run, problems)
        problems += _alarms(fleet)
        problems += filter(None, [clock_problem(fleet.clock_offsets)])
        lines = [
            _line(name, state, fleet, newest, self._clock())
            for name in sorted(_names(state) | fleet.heartbeats.keys())
        ]
        problems += filter(None, [builds_problem(builds_in(lines))])
        readers = self._readers.lines()
        problems += self._readers.problems
        return self._status(
            run, config, trainer, fleet.heartbeats, probes, state, newest, lines, readers, problems
        )

    def _read_stored(self, run: Run) -> RunStatus | None:
        """The status that the run's supervisor stored; None unless it is fresh."""
        if not self._stored or run.public_key:  # Nobody signs it.
            return None
        try:
            data = self._bucket.get(keys.STATUS, limit=MAX_STATUS_OBJECT_BYTES)
            if data is None:
                return None
            found = decode_json(data, RunStatus, run=self._bucket.url, key=keys.STATUS)
        except CorruptError:
            return None
        fresh = abs(self._clock() - found.at) <= FRESH_S and found.name == run.name
        return msgspec.structs.replace(found, bucket=self._bucket.url) if fresh else None

    def _release(self, run: Run) -> ReleaseStatus | None:
        """Reads new decisions about which version serves."""
        if self._decisions is None or self._decisions.run != run.id:
            self._decisions = DecisionLog(self._bucket, run.id)
        self._decisions.poll()
        return release_of(self._decisions)

    def _newest_version(self, run: Run, problems: list[str]) -> int | None:
        """The newest version that can be read; why a newer manifest cannot be is a problem."""
        if self._poller is None or self._poller.run.id != run.id:
            self._poller, self._newest = VersionPoller(self._bucket, run), None
        poller, held = self._poller, -1 if self._newest is None else self._newest
        found = _attempt(lambda: poller.newer(held), problems)
        if poller.alarm is not None:
            problems.append(f"readers pass over a manifest: {poller.alarm}")
        return self._newest if found is None else found.version

    def _lines(self, config: RunConfig | None) -> dict[str, int | None]:
        """The newest version of each line in a further precision; None if it cannot be read."""
        found: dict[str, int | None] = {}
        for name in config.train.also_publish if config else []:
            held = self._lines_held.get(name)
            try:
                newer = newest_version(line_bucket(self._bucket, name), newer_than=held)
            except InputError:  # The run's start has not come to this line yet.
                newer = None
            found[name] = self._lines_held[name] = held if newer is None else newer
        return found

    def _status(
        self,
        run: Run,
        config: RunConfig | None,
        trainer: TrainerStatus | None,
        beats: dict[str, Heartbeat],
        probes: ProbeState | None,
        state: RunState,
        newest: int | None,
        lines: list[ProcessLine],
        readers: list[ReaderLine],
        problems: list[str],
    ) -> RunStatus:
        workers = [beat.worker for beat in beats.values() if beat.worker]
        tokens = sum(one.tokens for one in workers)
        gateways = _attempt(lambda: read_gateways(self._bucket), problems) or []
        decider = _attempt(lambda: read_decider(self._bucket), problems)
        release = self._release(run)
        return RunStatus(
            **_measured(state, config),
            name=run.name,
            bucket=self._bucket.url,
            at=self._clock(),
            phase=_phase(trainer, newest, lines, drawing=tokens > 0),
            version=newest,
            target=config.train.versions if config else None,
            groups_in_flight=_in_flight(trainer, beats, lines),
            groups_stored=sum(one.stored for one in workers),
            sampled_episodes=sum(one.episodes for one in workers),
            sampled_tokens=tokens,
            heldout_sets=tested.sets if (tested := state.newest_evaluation) else {},
            heldout_budgets=tested.budgets if tested else [],
            **_thinking(state),
            allocation=AllocationTotals.of(state),
            heldout_sources=lost.sources if (lost := state.newest_heldout_loss) else {},
            settings=trainer.settings if trainer else {},
            precision=served_precision(config) if config else None,
            lines=self._lines(config),
            failures=failures_by_cause(state),
            probes=excesses(probes),
            processes=lines,
            problems=problems,
            incidents=trainer.incidents if trainer else [],
            self_attested=trainer.self_attested if trainer else [],
            alarm=_no_progress(state),
            forecast=state.newest_forecast,
            controlled=state.newest_decision,
            gateways=gateway_totals(gateways),
            upstreams={name: model for one in gateways for name, model in one.upstreams.items()},
            live_processes=live_processes(gateways, decider, self._clock()),
            users=users_of(gateways, self._decisions, self._clock()),
            release=release,
            readers=readers,
        )


def _no_progress(state: RunState) -> str:
    """The alarm that steps move nothing, unless a later step changed weights."""
    alarm = state.no_progress
    if alarm is None or any(
        one.changed and one.version > alarm.version for one in state.published.values()
    ):
        return ""
    return f"{alarm.steps} steps up to version {alarm.version} moved nothing: {alarm.reason}"


def _config(bucket: Bucket, run: Run, problems: list[str]) -> RunConfig | None:
    """Returns the configuration; None for a run that another trainer published."""
    if not run.config:
        return None
    try:
        return config_of(run, url=bucket.url)
    except InputError as error:
        problems.append(error.message)
        return None


_V = TypeVar("_V")


def _attempt(action: Callable[[], _V | None], problems: list[str]) -> _V | None:
    try:
        return action()
    except (CorruptError, ResyncError) as error:
        problems.append(str(error))
        return None


def _alarms(fleet: Fleet) -> list[str]:
    """Why workers pass over an object: each reason once, with the number of workers; and what
    other processes do not do because they cannot read an object."""
    reasons = Counter(
        beat.worker.alarm
        for name, beat in fleet.heartbeats.items()
        if beat.worker and beat.worker.alarm and fleet.states[name] != "ended"
    )
    found = [
        f"{number} {'worker passes' if number == 1 else 'workers pass'} over an object: {reason}"
        for reason, number in reasons.items()
    ]
    for name, beat in sorted(fleet.heartbeats.items()):
        if beat.alarm and fleet.states[name] != "ended":
            found.append(f"{name}: {beat.alarm}")
        if beat.worker and beat.worker.waits and fleet.states[name] == "alive":
            found.append(f"{name} learns nothing: {beat.worker.waits}")
    return found


def _unreadable(segments: dict[str, int]) -> list[str]:
    """Names the streams in which segments hold no event of their process, the first few of them."""
    found = [
        f"{safe_line(stream)}: {count} {'segment' if count == 1 else 'segments'} of events that its"
        " process did not store, or that are damaged"
        for stream, count in sorted(segments.items(), key=lambda one: (-one[1], one[0]))
    ]
    more = len(found) - MAX_STREAMS_NAMED
    return found if more <= 0 else [*found[:MAX_STREAMS_NAMED], f"and {more} more such streams"]


def _names(state: RunState) -> set[str]:
    return {name for name, one in state.processes.items() if one.role not in ("supervisor", None)}


def _line(name: str, state: RunState, fleet: Fleet, newest: int | None, now: float) -> ProcessLine:
    process = state.processes.get(name, ProcessState(name))
    beat = fleet.heartbeats.get(name)
    worker = beat.worker if beat else None
    role: Role | None = process.role
    if role is None and beat is not None:
        role = next((known for known in _ROLES if known == beat.role), None)
    how: State = fleet.states[name] if beat else "ended" if process.gone else "unknown"
    version = worker.version if worker else newest if role == "trainer" else process.version
    lag = None
    if role != "trainer" and how != "ended" and version is not None and newest is not None:
        lag = max(0, newest - version)
    return ProcessLine(
        name=name,
        role=role,
        state=how,
        doing=process.doing or (beat.doing if beat else ""),
        version=version,
        lag=lag,
        idle=state.idle([process]),
        groups=worker.stored if worker else None,
        restarts=process.restarts,
        supervised=beat.supervised if beat else process.supervised,
        age_s=max(0.0, now - beat.at) if beat else None,
        host=beat.host if beat else "",
        build=beat.build if beat else "",
        traffic=beat.traffic if beat else None,
    )


def builds_in(lines: Sequence[ProcessLine]) -> dict[str, list[str]]:
    """Returns the names of the processes that have not ended, by build."""
    present = ("alive", "silent", "stalled")
    return builds_of((line.build, line.name) for line in lines if line.state in present)


def _thinking(state: RunState) -> dict[str, Any]:
    """The figures of thinking and of reused tokens of the newest step; none without a step."""
    steps = state.steps_in_order
    names = ("thinking_length", "forced_share", "reused_length")
    return {name: getattr(steps[-1], name) for name in names} if steps else {}


def _phase(
    trainer: TrainerStatus | None,
    newest: int | None,
    lines: list[ProcessLine],
    *,
    drawing: bool,
) -> str:
    """Names the phase; a trainer that is silent or stalled has its own. ``drawing`` says that
    workers have drawn tokens."""
    if trainer is None:
        warming = any(line.role == "warm-start" and line.state == "alive" for line in lines)
        return "warm start" if warming else "starting" if newest is None else "published"
    state = next((line.state for line in lines if line.role == "trainer"), "unknown")
    if trainer.phase in ("starting", "training") and state in ("silent", "stalled"):
        return f"trainer {state}"
    if trainer.phase == "training" and not newest and drawing:
        return "drawing the first groups"
    return trainer.phase


def _measured(state: RunState, config: RunConfig | None) -> dict[str, Any]:
    """The fields of a status that are figures of the run's events."""
    bound = config.train.largest_age if config else None
    spreads = {
        part: Spread(
            mean=value(f"staleness.{part}.mean", state), max=whole(f"staleness.{part}.max", state)
        )
        for part in ("total", "in_flight", "queued")
    }
    names = BY_NAME.keys() & set(RunStatus.__struct_fields__)
    return {
        **{name: value(name, state) for name in names},
        "staleness": StalenessSplit(bound=bound, **spreads),
    }


def _in_flight(
    trainer: TrainerStatus | None, beats: dict[str, Heartbeat], lines: Sequence[ProcessLine]
) -> int | None:
    """Counts the groups that living workers were granted and have not stored."""
    if trainer is None:
        return None
    live = [beats[line.name] for line in lines if line.state == "alive" and line.name in beats]
    return sum(
        max(0, trainer.credits.get(one.process, 0) - one.worker.stored)
        for one in live
        if one.worker
    )


ALLOCATED: Final = ("skipped", "deferred")
"""Causes for which allocation leaves groups out on purpose; they are no failures."""


def failures_by_cause(state: RunState) -> dict[str, int]:
    """Counts failures of episodes, groups and processes by cause, from the events read."""
    counts: Counter[str] = Counter()
    for process in state.processes.values():
        for life in process.lives:
            if life.what == "died":
                counts[f"{process.role or 'process'} {_death(life)}"] += 1
        for group in process.generated.values():
            if group.failed:
                counts[f"episode: {group.cause}"] += group.failed
    for step in state.steps.values():
        failed = {cause: count for cause, count in step.causes.items() if cause not in ALLOCATED}
        counts.update({f"group dropped: {cause}": count for cause, count in failed.items()})
        if step.grad_norm is None:
            counts["step without effect: a gradient that is no number"] += 1
        if untold := step.dropped - sum(step.causes.values()):
            counts["group dropped"] += max(0, untold)
    for batch in state.parity.values():
        for crossed in (*batch.warnings, *batch.stopped):
            counts[f"parity: {crossed.split(' ')[0]}"] += 1
        if batch.masked:
            counts["parity: sequences masked"] += batch.sequences_masked
    return dict(counts.most_common())


def _death(life: Life) -> str:
    """Describes why a process died, without details that differ each time."""
    for word in ("no sign of life", "no progress"):
        if word in life.detail:
            return f"killed: {word}"
    return f"died: {life.detail}"
