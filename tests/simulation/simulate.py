"""Simulates runs: one seed is one history, and a failing one is made smaller."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from time import process_time

from simulated_faults import Fault, plan
from simulated_run import BrokenError, SimulatedRun
from simulated_time import Task, begin, scheduler

from deltawire.errors import DeltawireError
from deltawire.sync.chain.gc_intents import INTENT_S, MARGIN_S, REMOTE_MARGINS_S

FAULTS_S = 3600.0
EVERY_S = 40.0
"""The simulated time with faults, and how often one comes."""

PROGRESS_S = 600.0
"""Once nothing is left of the faults, a new version reaches every reader within this time."""


@dataclass
class History:
    """The history of one seed; ``fault`` is empty if everything held."""

    seed: str
    fault: str = ""
    digest: str = ""
    hours: float = 0.0
    requests: int = 0
    faults: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    last: list[str] = field(default_factory=list)


def simulate(
    seed: str, *, faults_s: float = FAULTS_S, without: Collection[int] = (), store: str = ""
) -> History:
    """Simulates one seed, with faults for ``faults_s``, ``without`` some of them.

    ``store`` names a promise of the store that it breaks (see `Store.breaks`).
    """
    clock = begin(seed)
    run = SimulatedRun(seed)
    run.store.breaks = store
    drawn = plan(
        seed,
        seconds=faults_s,
        every_s=EVERY_S,
        limits=run.settings.limits,
        roles=run.settings.roles,
    )
    faults = [one for one in drawn if one.number not in without]
    found = History(seed, faults=faults)
    errors: list[BaseException] = []

    def failed(task: Task, error: BaseException) -> None:
        run.store.note(f"{task.process.name}: {type(error).__name__} {error}")
        errors.append(error)

    clock.failed = failed
    for one in faults:
        clock.after(one.at, _strike(run, one))
    gc.disable()
    try:
        run.begin()
        stages = _stages(run, faults_s)
        for seconds in stages:
            clock.run_until(clock.now + seconds, lambda: bool(errors))
            if errors:
                break
    except BrokenError as error:
        errors.append(error)
    finally:
        found.hours = clock.now / 3600
        for connection in run.connections.values():
            clock.kill(connection.process)
        clock.failed = lambda *_: None
        run.store.watch = lambda *_: None
        clock.run_until(clock.now)
        gc.enable()
    if errors:
        first = errors[0]
        expected = isinstance(first, BrokenError | DeltawireError)
        found.fault = str(first) if expected else f"{type(first).__name__}: {first}"
    found.digest = run.store.digest.hexdigest()
    found.requests, found.counts = run.store.requests, run.counts
    found.last = [f"{at:10.3f} {what}" for at, what in run.store.history]
    return found


def _strike(run: SimulatedRun, fault: Fault) -> Callable[[], None]:
    return lambda: run.strike(fault)


def _stages(run: SimulatedRun, faults_s: float) -> Iterator[float]:
    """Yields how long to run until the next check."""
    yield faults_s
    run.heal()
    margin_s = MARGIN_S if run.settings.local else REMOTE_MARGINS_S["s3"]
    yield INTENT_S + margin_s + PROGRESS_S  # The longest that a dead process's intent counts.
    run.quiet = True
    before = run.newest
    yield PROGRESS_S
    if run.newest <= before:
        raise BrokenError(f"no version follows {before}")
    goal = run.newest
    yield PROGRESS_S
    if late := run.late_readers(goal):
        raise BrokenError(f"{late[0]} does not reach version {goal}")
    if unsettled := run.late_groups(scheduler().now - PROGRESS_S):
        raise BrokenError(f"no version consumes or drops group {unsettled[0]}")
    run.check_all()
    yield 1.0


def shrink(
    history: History, *, faults_s: float = FAULTS_S, seconds: float = 60.0, store: str = ""
) -> History:
    """Leaves out faults of a failing history for as long as it fails, within some seconds."""
    best, until = history, process_time() + seconds
    size = max(len(best.faults) // 2, 1)
    while size and process_time() < until:
        at = 0
        while at < len(best.faults) and process_time() < until:
            kept = [f.number for f in best.faults[:at] + best.faults[at + size :]]
            gone = {number for number in range(10_000) if number not in kept}
            tried = simulate(history.seed, without=gone, faults_s=faults_s, store=store)
            if tried.fault:
                best = tried
            else:
                at += size
        size //= 2
    return best
