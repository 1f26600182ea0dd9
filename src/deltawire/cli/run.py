"""``deltawire run`` and ``deltawire report``: a whole run on this machine, watched and audited."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deltawire.cli.processes import refuse_memory, sampled_by
from deltawire.config import RunConfig, differences, flatten, load_config, run_config
from deltawire.dashboard.live import LiveView, screen
from deltawire.dashboard.report import write_report
from deltawire.dashboard.state import RunState
from deltawire.dashboard.summary import Summary, WorkerVerdict, summarize
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.events import Event, Life, Span
from deltawire.reward_monitor.watch import ProbeFigures, figures_of, read_probes
from deltawire.rl.evaluate.attestation import Attestation, attested, last_status, wait_for_workers
from deltawire.rl.evaluate.audit import audit_consumption
from deltawire.runtime.event_tail import EventFeed, EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.supervisor import COMMAND, ChildError, Supervisor
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import read_run, require_run

try:
    import fcntl
except ImportError:  # not on every system; there, two runs in one place are not prevented
    fcntl = None  # type: ignore[assignment]

INTERRUPTED = 130
DIFFERENT = 5
"""Exit code of a run whose audit found a worker with other weights than the trainer's."""
TICK_S = 0.25
PLAIN_EVERY_S = 5.0
PROBES_EVERY_S = 5.0
"""As often as a trainer stores them."""
WARM_RECORD = "warm_start.json"


@dataclass(frozen=True)
class Pins:
    """Processors for each kind of process, as ``--cpus`` takes them; empty for any."""

    trainer: str = ""
    workers: str = ""


@dataclass
class Job:
    """One invocation: its configuration and places."""

    config: RunConfig
    config_path: Path
    seed: int | None
    out: Path
    bucket: Bucket
    pins: Pins = Pins()
    command: Sequence[str] = COMMAND
    """What starts a process of the run, before its arguments."""
    warm_out: Path | None = None
    """Where the warm start's model lies, if not in ``out``: several jobs can share one."""
    engine: str | None = None
    """Instead of the configuration file's."""

    @property
    def warmed(self) -> bool:
        """Whether version 0 comes from a warm start, or a build, of this job's own."""
        return not self.config.model.path or self.config.warm_start.max_steps > 0

    @property
    def model(self) -> Path:
        """The directory that version 0 comes from."""
        if not self.warmed:
            return Path(self.config.model.path)
        return (self.warm_out or self.out) / "model"

    def warm_record(self) -> str:
        """What the warm start depends on: as long as it is the same, its model is used again."""
        parts = (self.config.model, self.config.task, self.config.warm_start, self.config.seed)
        return json.dumps(msgspec.to_builtins(parts), sort_keys=True)

    def seed_arguments(self) -> list[str]:
        """The seed for a child's command line."""
        return [] if self.seed is None else ["--seed", str(self.seed)]

    def engine_arguments(self) -> list[str]:
        """The engine for the trainer's command line."""
        return [] if self.engine is None else ["--engine", self.engine]


class ProbeTail:
    """Reads a run's probes again every `PROBES_EVERY_S`; damaged ones are shown as none, and
    while the store does not answer ``newest`` stays what it was."""

    def __init__(self, bucket: Bucket) -> None:
        self.newest: ProbeFigures | None = None
        self._bucket = bucket
        self._read_at = float("-inf")

    def read(self, *, now: bool = False) -> None:
        """Read them, if it is time to."""
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
    """Folds the run's events and shows them, at most every so often."""

    def __init__(self, job: Job, console: Console, *, plain: bool) -> None:
        self.state = RunState()
        self.view = LiveView(
            job.config.train.versions,
            job.config.train.largest_age,
            name=job.config.name,
            warm_steps=job.config.warm_start.max_steps or None,
        )
        self.console = console
        self._tail = EventTail(job.bucket)
        self._probes = ProbeTail(job.bucket)
        self._feed = EventFeed(self._tail, every_s=TICK_S, beside=self._probes.read)
        self._sessions: list[tuple[float, float]] = []
        self._printed_at = 0.0
        self._line = ""
        self.live = None if plain else Live(console=console, auto_refresh=False, transient=True)

    def tick(self) -> None:
        """Take in what is new, show it, and sleep a little."""
        self._take(self._feed.take())
        if self.live is not None:
            self.live.update(self.view.render(self.state), refresh=True)
        elif time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            line = self.view.plain_line(self.state)
            if line != self._line:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
                self._line = line
        time.sleep(TICK_S)

    def begin(self) -> None:
        """Have new events read beside everything else, until `close`."""
        self._feed.start()

    def close(self) -> None:
        """Stop, and take in what has come meanwhile."""
        self._feed.close()
        self._take(self._feed.take())

    def read(self) -> None:
        """Take in new events, and the probes as they are now, waiting for the store."""
        self._probes.read(now=True)
        self._take(self._tail.read(everything=True))

    def _take(self, events: list[Event]) -> None:
        self.state.fold(events)
        self.state.probes = self._probes.newest
        for event in sorted(events, key=_time_of):
            if isinstance(event, Life) and event.role == "supervisor" and event.what == "started":
                self._sessions.append((event.at, event.at))
            elif self._sessions:
                start, end = self._sessions[-1]
                self._sessions[-1] = (start, max(end, _time_of(event)))

    @property
    def wall_s(self) -> float:
        """Seconds that the run was going, over all its sessions."""
        return sum(end - start for start, end in self._sessions)


def _time_of(event: Event) -> float:
    return event.end if isinstance(event, Span) else event.at


def run(arguments: argparse.Namespace) -> int:
    """``deltawire run``: exit code 0 once every live worker was found identical."""
    path = Path(arguments.config)
    config = load_config(path)
    if arguments.seed is not None:
        config = msgspec.structs.replace(config, seed=arguments.seed)
    config = sampled_by(config, arguments.engine)
    out = Path(arguments.out or f"runs/{config.name}")
    console = Console(stderr=arguments.json)
    if arguments.dry_run:
        _print_config(console, config, out, as_json=arguments.json)
        return 0
    if config.rollout.engine == "vllm" and config.rollout.workers:
        from deltawire.engines.server import vllm_python

        vllm_python()
    bucket = _open(out, arguments.bucket)
    refuse_memory(bucket)
    job = Job(config, path, arguments.seed, out, bucket, engine=arguments.engine)
    with only_one(out):
        summary = execute(job, console, plain=arguments.plain or not console.is_terminal)
    if summary is None:
        return INTERRUPTED
    if arguments.json:
        Console().print_json(msgspec.json.encode(summary).decode())
    else:
        console.print(screen(summary, report=str(out / "report.html")))
    return _verdict(summary)


def _open(out: Path, location: str) -> Bucket:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}", hint="choose --out") from error
    return open_bucket(location or str(out / "bucket"), create=True)


@contextlib.contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Hold ``out`` against a second ``deltawire run``; the lock goes with the process."""
    with (out / "lock").open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"another deltawire run is at work in {out}",
                    hint="join it with deltawire worker, or choose another --out",
                ) from error
        yield


def _verdict(summary: Summary) -> int:
    wrong = [worker.id for worker in summary.workers if worker.bit_identical is False]
    if wrong:
        raise AuditError(
            f"workers whose weights are not the trainer's: {', '.join(wrong)}",
            hint="see report.json",
        )
    proof = summary.proof
    if proof and (proof.repeated or proof.lost or proof.staleness_max > summary.staleness.bound):
        raise AuditError(
            f"of {proof.groups} consumed groups {proof.repeated} were consumed twice, {proof.lost} "
            f"are lost, and the largest staleness is {proof.staleness_max}",
            hint="see report.json",
        )
    return 0


class AuditError(InputError):
    """The bucket, or a live worker, does not hold what the run promises."""

    exit_code = DIFFERENT


def execute(job: Job, console: Console, *, plain: bool) -> Summary | None:
    """Run a job to its end and write its report; None if it was interrupted."""
    stop: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        stop.append(number)

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    supervisor = Supervisor(
        job.bucket, job.out / "logs", faults=job.config.faults, command=job.command
    )
    watcher = Watcher(job, console, plain=plain)
    watcher.read()
    try:
        watcher.begin()
        if watcher.live is not None:
            watcher.live.start()
        verdicts = _stages(job, supervisor, watcher, stop)
    finally:
        if watcher.live is not None:
            watcher.live.stop()
        if stop:
            console.print("stopping: what is half done is finished first; once more ends it now")
        supervisor.stop(hurry=lambda: len(stop) > 1)
        for number, handler in before.items():
            signal.signal(number, handler)
        watcher.close()
    watcher.read()
    if verdicts is None:
        status = read_trainer(job.bucket)
        at = f" at version {status.version}" if status else ""
        console.print(f"stopped{at}; the same command continues it", markup=False)
        return None
    return _report(job, watcher, verdicts)


def _stages(
    job: Job, supervisor: Supervisor, watcher: Watcher, stop: list[int]
) -> list[Attestation] | None:
    supervisor.start()
    existing = read_run(job.bucket)
    if existing is not None:
        theirs = run_config(existing.config, url=job.bucket.url)
        if changed := differences(job.config, theirs):
            raise InputError(
                f"the run that is here was started with another {', '.join(changed[:4])}",
                hint="choose another --out or bucket to start a new run",
                run=job.bucket.url,
            )
        status = read_trainer(job.bucket)
        if status and status.phase == "finished" and status.version >= job.config.train.versions:
            return attested(job.bucket, status)
    elif not _warm(job, supervisor, watcher, stop):
        return None
    _start_all(job, supervisor, watcher, stop)
    while not supervisor.check():
        watcher.tick()
        if stop:
            return None
    status = last_status(job.bucket)
    if status.phase != "finished":
        return None

    def tick() -> None:
        supervisor.check()
        watcher.tick()

    verdicts = wait_for_workers(job.bucket, status, tick, silence_s=job.config.faults.silence_s)
    while supervisor.running() and not stop:
        tick()
    return verdicts


def _warm(job: Job, supervisor: Supervisor, watcher: Watcher, stop: list[int]) -> bool:
    """Make the model directory unless it is there; False if interrupted."""
    if not job.warmed:
        return True
    job.model.parent.mkdir(parents=True, exist_ok=True)
    record = job.model.with_name(WARM_RECORD)
    if not record.is_file() and job.model.exists():
        raise InputError(
            f"{job.model} is there, and no warm start of deltawire run made it",
            hint="choose another --out, or move it away",
        )
    if record.is_file() and record.read_text() == job.warm_record() and job.model.is_dir():
        return True
    record.write_text("")  # What lies there from now on is ours, finished or not.

    def tick() -> None:
        watcher.tick()
        if stop:
            supervisor.stop()

    arguments = ["warm-start", str(job.config_path), "--out", str(job.model), "--supervised"]
    arguments += ["--bucket", job.bucket.url, *job.seed_arguments()]
    try:
        supervisor.run("warm-start", "warm-start", arguments, tick)
    except ChildError:
        if not stop:
            raise
    if stop:
        return False
    record.write_text(job.warm_record())
    return True


def _start_all(job: Job, supervisor: Supervisor, watcher: Watcher, stop: list[int]) -> None:
    """Start the trainer, then the readers: not while an older end is still written there."""
    arguments = ["trainer", job.bucket.url, "--supervised", "--cpus", job.pins.trainer]
    if job.model.is_dir():
        arguments += ["--config", str(job.config_path), "--model", str(job.model)]
        arguments += [*job.seed_arguments(), *job.engine_arguments()]
    supervisor.add("trainer", "trainer", arguments)
    while (status := read_trainer(job.bucket)) is not None and status.phase == "finished":
        if stop or supervisor.check():
            return
        watcher.tick()
    pinned = ["--supervised", "--cpus", job.pins.workers]
    for number in range(job.config.rollout.workers):
        name = f"w{number}"
        supervisor.add(name, "worker", ["worker", job.bucket.url, "--id", name, *pinned])
    supervisor.add("evaluator", "evaluator", ["evaluator", job.bucket.url, *pinned])


def _report(job: Job, watcher: Watcher, verdicts: list[Attestation]) -> Summary:
    summary = summary_of(job.config, job.bucket, watcher, verdicts)
    write_report(summary, watcher.state, job.out)
    return summary


def summary_of(
    config: RunConfig, bucket: Bucket, watcher: Watcher, verdicts: list[Attestation]
) -> Summary:
    """The figures of a run from its events and its audit."""
    return summarize(
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
        seed=config.seed,
        audit=audit_consumption(bucket),
        configuration={key: str(value) for key, value in flatten(config).items()},
    )


def report(arguments: argparse.Namespace) -> int:
    """``deltawire report``: from the bucket alone."""
    bucket = open_bucket(arguments.run)
    config = run_config(require_run(bucket).config, url=bucket.url)
    out = Path(arguments.out)
    console = Console()
    watcher = Watcher(Job(config, Path(), None, out, bucket), console, plain=True)
    watcher.read()
    status = last_status(bucket)
    verdicts = attested(bucket, status)
    summary = summary_of(config, bucket, watcher, verdicts)
    try:
        write_report(summary, watcher.state, out)
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror or error}", hint="choose --out"
        ) from error
    if arguments.json:
        console.print_json(msgspec.json.encode(summary).decode())
    else:
        console.print(screen(summary, report=str(out / "report.html")))
    return 0


def _print_config(console: Console, config: RunConfig, out: Path, *, as_json: bool) -> None:
    flat = {**flatten(config), "out": str(out)}
    if as_json:
        Console().print_json(data=flat)
        return
    table = Table("key", "value", title=f"deltawire run {config.name}", title_justify="left")
    for key, value in flat.items():
        table.add_row(key, repr(value) if isinstance(value, str) else str(value))
    console.print(table)
