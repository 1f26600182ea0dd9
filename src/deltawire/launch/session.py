"""Runs a whole job on this machine: warm start, trainer, workers, evaluator, audit, report.

::

    execute ── Supervisor ──▶ warm-start, then trainer, w0 … wN, evaluator   (child processes)
       │            ▲ check
       └── Watcher ◀─┴── events from the bucket ◀── every process

Children and parent share the bucket only. A second call with the same job continues it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from deltawire.config import RunConfig, changed_settings, require_same
from deltawire.dashboard.report import write_report
from deltawire.dashboard.summary import Summary
from deltawire.errors import InputError, RetryError
from deltawire.launch.checks import check_start
from deltawire.launch.role_keys import RunKeys
from deltawire.launch.run_limits import Deadline, StallAlarm
from deltawire.launch.status_writer import StatusWriter
from deltawire.launch.watching import Watcher, summary_of
from deltawire.private_files import open_private
from deltawire.rl.evaluate.attestation import (
    Attestation,
    attested,
    last_status,
    of_line,
    served_status,
    wait_for_workers,
)
from deltawire.runtime.children import Launcher
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.needs import config_of
from deltawire.runtime.supervisor import COMMAND, ChildError, Supervisor
from deltawire.store import Bucket, open_bucket, without_retries
from deltawire.sync.chain.objects import find_run
from deltawire.wire.roles import (
    EVALUATOR_ROLE,
    REFERENCE_ROLE,
    TRAINER_ROLE,
    WARM_START_ROLE,
    worker_role,
)
from deltawire.wire.status import TrainerStatus

try:
    import fcntl
except ImportError:  # Not on every system; there, two runs in one folder are not prevented.
    fcntl = None  # type: ignore[assignment]

WARM_RECORD = "warm_start.json"


class AuditError(InputError):
    """The bucket, or a live worker, does not hold what the run promises."""

    exit_code = 5


@dataclass(frozen=True)
class Pins:
    """Processors for each kind of process, as ``--cpus`` takes them; empty for any."""

    trainer: str = ""
    workers: str = ""


@dataclass
class Job:
    """A run on this machine: its configuration, and the places of its files.

    Example::

        job = Job(load_config(path), path, None, out, open_bucket(str(out / "bucket"), create=True))
        summary = execute(job, Console(), plain=True)
    """

    config: RunConfig
    config_path: Path
    seed: int | None
    out: Path
    bucket: Bucket
    pins: Pins = Pins()
    command: Sequence[str] = COMMAND
    """Starts a child process; its arguments follow."""
    warm_out: Path | None = None
    """The warm start's model directory, if not in ``out``: several jobs can share one."""
    engine: str | None = None
    """Replaces the configuration file's."""
    keys: RunKeys | None = None
    """The keys of a signed run."""

    @property
    def makes_model(self) -> bool:
        """Returns whether a warm start, or a build, of this job makes version 0."""
        return not self.config.model.path or self.config.warm_start.max_steps > 0

    @property
    def model(self) -> Path:
        """The directory that version 0 comes from."""
        if not self.makes_model:
            return Path(self.config.model.path)
        return (self.warm_out or self.out) / "model"

    def warm_record(self) -> str:
        """All inputs of the warm start: its model is reused while they stay the same."""
        parts = (self.config.model, self.config.task, self.config.warm_start, self.config.seed)
        return json.dumps(msgspec.to_builtins(parts), sort_keys=True)

    def seed_arguments(self) -> list[str]:
        """Returns the seed for a child's command line."""
        return [] if self.seed is None else ["--seed", str(self.seed)]

    def engine_arguments(self) -> list[str]:
        """Returns the engine for the trainer's command line."""
        return [] if self.engine is None else ["--engine", self.engine]

    @property
    def shape_file(self) -> Path:
        """The file of the profile that the run starts from."""
        return self.out / "shape.json"

    def write_shape(self) -> None:
        """Writes the profile that the run starts from, if there is one, for the trainer to read."""
        if self.config.shape:
            self.shape_file.write_bytes(msgspec.json.encode(self.config.shape))

    def shape_arguments(self) -> list[str]:
        """Returns the training shape for the trainer's command line."""
        return ["--shape", str(self.shape_file)] if self.config.shape else []

    def key_arguments(self, role: str) -> list[str]:
        """Returns the key and the pinned run for a child's command line; none in an unsigned
        run.
        """
        return [] if self.keys is None else self.keys.arguments(role)


def open_output(out: Path, location: str) -> Bucket:
    """Creates the output folder and opens the job's bucket, which lies in it by default."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}", hint="choose --out") from error
    return open_bucket(location or str(out / "bucket"), create=True)


@contextlib.contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Locks ``out`` against a second ``deltawire run``; the lock ends with the process."""
    with os.fdopen(open_private(out / "lock", os.O_RDWR | os.O_CREAT), "w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"another deltawire run is using {out}",
                    hint="join it with deltawire worker, or choose another --out",
                ) from error
        yield


def check_audit(summary: Summary) -> None:
    """Raises `AuditError` if the run did not end as it promises."""
    wrong = [worker.id for worker in summary.workers if worker.bit_identical is False]
    if wrong:
        raise AuditError(
            f"workers whose weights are not the trainer's: {', '.join(wrong)}",
            hint="see report.json",
        )
    proof = summary.proof
    if proof and (proof.repeated or proof.lost or proof.staleness_max > summary.staleness.bound):
        raise AuditError(
            f"of {proof.groups} consumed groups {proof.repeated} were consumed twice and "
            f"{proof.lost} are lost; the largest staleness is {proof.staleness_max}",
            hint="see report.json",
        )


def execute(
    job: Job,
    console: Console,
    *,
    plain: bool,
    launcher: Launcher | None = None,
    deadline: Deadline | None = None,
    on_stall: Callable[[str], None] = lambda _: None,
) -> Summary | None:
    """Runs a job to its end and writes its report; None if it was interrupted. ``launcher`` decides
    where its processes run, by default on this machine. ``on_stall`` is told in a thread if,
    once all processes were started, no version is committed for ``faults.long_s``.

    On the first SIGINT or SIGTERM, and at the ``deadline``, the processes store what must be kept
    and end; the second signal kills them.
    """
    stop: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        stop.append(number)

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    # These ask again each second anyway, and must not wait for a store meanwhile.
    once = without_retries(job.bucket)
    supervisor = Supervisor(
        once,
        job.out / "logs",
        faults=job.config.faults,
        command=job.command,
        launcher=launcher,
    )
    watcher = Watcher(job.config, once, console, plain=plain)
    status_writer = StatusWriter(once)
    watcher.read()
    try:
        watcher.start()
        status_writer.start()
        if deadline is not None:
            deadline.start(stop)
        verdicts = _stages(job, supervisor, watcher, stop, on_stall)
    finally:
        if deadline is not None:
            deadline.cancel()
        watcher.end_view()
        if stop:
            console.print("stopping; interrupt again to stop now")
        supervisor.stop(hurry=lambda: len(stop) > 1)
        for number, handler in before.items():
            signal.signal(number, handler)
        status_writer.close()
        watcher.close()
    watcher.read()
    if verdicts is None:
        status = known_trainer(job.bucket)
        at = f" at version {status.version}" if status else ""
        console.print(f"stopped{at}; the same command continues it", markup=False, emoji=False)
        return None
    summary = summary_of(job.config, job.bucket, watcher, verdicts)
    write_report(summary, watcher.state, job.out)
    return summary


def _stages(
    job: Job,
    supervisor: Supervisor,
    watcher: Watcher,
    stop: list[int],
    on_stall: Callable[[str], None],
) -> list[Attestation] | None:
    supervisor.start()
    existing = find_run(job.bucket)
    if existing is not None:
        url = job.bucket.url
        require_same(job.config, config_of(existing, url=url, role="trainer"), url=url)
        status = known_trainer(job.bucket)
        if status and status.phase == "finished" and status.version >= job.config.train.versions:
            return attested(job.bucket, served_status(job.bucket, job.config, status))
    else:
        check_start(job.config)
        if not _make_model(job, supervisor, watcher, stop):
            return None
    _start_all(job, supervisor, watcher, stop)
    # Only now: a warm start commits no version, however long it takes.
    stalls = StallAlarm(job.config.faults.long_s, on_stall)
    while not supervisor.check():
        watcher.tick()
        stalls.observe(watcher.state.version)
        if stop:
            return None
    status = last_status(job.bucket)
    if status.phase != "finished":
        return None

    def tick() -> None:
        supervisor.check()
        watcher.tick()

    silence_s = job.config.faults.silence_s
    status = served_status(job.bucket, job.config, status)
    # It asks again itself, and ticks meanwhile.
    once = without_retries(job.bucket)
    verdicts = wait_for_workers(once, status, tick, silence_s=silence_s)
    for one in job.config.train.adapters:
        place = line_bucket(job.bucket, one.name)
        last = last_status(place)
        waited = wait_for_workers(without_retries(place), last, tick, silence_s=silence_s)
        verdicts += of_line(one.name, waited)
    while supervisor.running() and not stop:
        tick()
    return verdicts


def _make_model(job: Job, supervisor: Supervisor, watcher: Watcher, stop: list[int]) -> bool:
    """Makes the model directory unless it exists; False if interrupted."""
    if not job.makes_model:
        if not job.model.is_dir():
            raise InputError(
                f"model.path {job.model} is not a directory",
                hint="give a model directory in the Hugging Face layout",
            )
        return True
    job.model.parent.mkdir(parents=True, exist_ok=True)
    record = job.model.with_name(WARM_RECORD)
    if not record.is_file() and job.model.exists():
        raise InputError(
            f"{job.model} exists but was not created by a warm start",
            hint="choose another --out, or move it away",
        )
    if record.is_file() and record.read_text() == job.warm_record() and job.model.is_dir():
        return True
    record.write_text("")  # From here on the folder is this job's, finished or not.

    def tick() -> None:
        watcher.tick()
        if stop:
            supervisor.stop()

    arguments = ["warm-start", str(job.config_path), "--out", str(job.model), "--supervised"]
    arguments += ["--bucket", job.bucket.url, *job.seed_arguments()]
    arguments += job.key_arguments(WARM_START_ROLE)
    try:
        supervisor.run("warm-start", "warm-start", arguments, tick)
    except ChildError:
        if not stop:
            raise
    if stop:
        return False
    record.write_text(job.warm_record())
    return True


def _holds_old_status(job: Job) -> bool:
    """Returns whether the trainer's status is from before this start: from an earlier end of the
    run, or with other settings than the processes to start should read. True if the store does not
    answer: the caller asks again, and meanwhile heeds signals and looks after the processes.
    """
    bucket = without_retries(job.bucket)
    try:
        status = known_trainer(bucket)
        return status is not None and _is_old(job, bucket, status)
    except RetryError:
        return True


def _is_old(job: Job, bucket: Bucket, status: TrainerStatus) -> bool:
    run = find_run(bucket)
    if status.phase == "finished" or run is None or not job.model.is_dir():
        return status.phase == "finished"
    origin = config_of(run, url=job.bucket.url)
    return status.settings != changed_settings(job.config, origin)


def _start_all(job: Job, supervisor: Supervisor, watcher: Watcher, stop: list[int]) -> None:
    """Starts the trainer, then its readers once its status is not from before this start."""
    arguments = ["trainer", job.bucket.url, "--supervised", "--cpus", job.pins.trainer]
    if job.model.is_dir():
        arguments += ["--config", str(job.config_path), "--model", str(job.model)]
        arguments += [*job.seed_arguments(), *job.engine_arguments(), *job.shape_arguments()]
    arguments += job.key_arguments(TRAINER_ROLE)
    supervisor.add("trainer", "trainer", arguments)
    while _holds_old_status(job):
        if stop or supervisor.check():
            return
        watcher.tick()
    pinned = ["--supervised", "--cpus", job.pins.workers]
    for number in range(job.config.rollout.workers):
        name = f"w{number}"
        signs = job.key_arguments(worker_role(name))
        supervisor.add(name, "worker", ["worker", job.bucket.url, "--id", name, *pinned, *signs])
    if job.config.reference_mode == "process":
        signs = job.key_arguments(REFERENCE_ROLE)
        supervisor.add("reference", "reference", ["reference", job.bucket.url, *pinned, *signs])
    if job.config.evaluate.every:
        signs = job.key_arguments(EVALUATOR_ROLE)
        supervisor.add("evaluator", "evaluator", ["evaluator", job.bucket.url, *pinned, *signs])
