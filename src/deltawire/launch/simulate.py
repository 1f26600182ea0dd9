"""Runs the whole live loop on this machine, with simulated users, and reports what they thought.

::

    deltawire run ── trainer ◀── groups ── learner ◀── captures, feedback ── gateway ◀── users
                        └── versions ──▶ replica (embedded engine) ◀── requests ──┘    (here)

All processes are the commands that a deployment runs; they share the bucket in ``out``. The users
are in this process and reach the gateway over the loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO

import msgspec

from deltawire.config import RunConfig
from deltawire.dashboard.simulation import (
    Simulated,
    SimulationReport,
    report_of,
    write_simulation,
)
from deltawire.envs.simulated_users import SimulatedUserTasks, covered_kinds
from deltawire.errors import InputError, RetryError
from deltawire.launch.gateway import REPLICA_KEY_VARIABLE
from deltawire.launch.live import ReleaseOptions, take_decision
from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.launch.tokens import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from deltawire.live.learning.learner import check_learnable
from deltawire.live.release.evidence import planned_answers
from deltawire.runtime.guard import guarded
from deltawire.runtime.supervisor import COMMAND
from deltawire.runtime.trusted import ReaderTrust
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_version, read_run
from deltawire.testing.users.driver import ServedNote, UserDriver
from deltawire.testing.users.population import Population
from deltawire.wire.receipts import Receipt, read_receipt

ENVIRONMENT = "simulated_users"
START_WITHIN_S = 1800.0
"""Each of the warm start, a server's and the gateway's start may take so long. They are ended
sooner if their process ends. At a load of 16 on two cores the example's warm start took 11 minutes.
"""
STOP_WITHIN_S = 60.0
POLL_S = 0.2
PLANNED_EFFECT = 0.05
PLANNED_POWER = 0.9
"""That of `planned_answers`."""
REPORT_EVERY_S = 10.0
MOST_SECONDS = 30 * 86_400.0
MOST_RATE = 10_000.0
MOST_REQUESTS = 1_000_000_000
_URL = re.compile(rb"serving .* on (http://\S+)")

ReportLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How long users come, how many requests a second, where files go, and the run's seed.

    With ``requests``, so many are sent, at most ``rate`` a second, however long the machine takes,
    and ``seconds`` does not count.
    """

    out: Path
    seconds: float = 180.0
    rate: float = 20.0
    requests: int | None = None
    seed: int | None = None

    @property
    def planned_s(self) -> float:
        """Returns the seconds that users come, on a machine that keeps the rate."""
        return self.seconds if self.requests is None else self.requests / self.rate


def population_of(config: RunConfig) -> Population:
    """Returns the users that a configuration describes; raises `InputError` if it does not."""
    if config.task.environment != ENVIRONMENT:
        raise InputError(
            f"task.environment is {config.task.environment!r}; a simulation needs {ENVIRONMENT!r}",
            hint="start from examples/live.toml",
        )
    return SimulatedUserTasks(config.task, seed=config.seed).population


def releases(config: RunConfig) -> bool:
    """Returns whether versions reach users by a gate and a canary: ``evaluate.every`` is set."""
    return config.evaluate.every > 0


def check_simulation(config: RunConfig, options: SimulationOptions) -> Population:
    """Returns the users; raises `InputError` for a configuration or options that cannot work."""
    if not (0 < options.seconds <= MOST_SECONDS and 0 < options.rate <= MOST_RATE):
        raise InputError(
            "--seconds and --rate must be above 0, and at most "
            f"{MOST_SECONDS:,.0f} and {MOST_RATE:,.0f}"
        )
    if options.requests is not None and not 0 < options.requests <= MOST_REQUESTS:
        raise InputError(f"--requests must be from 1 to {MOST_REQUESTS:,}")
    check_learnable(config, "")
    if config.live.planted and not releases(config):
        raise InputError("live.planted needs releases", hint="set evaluate.every")
    if "users" in config.live.planted:
        covered_kinds(config)
    at = sorted(config.live.planted.values())
    if any(after - before <= config.train.max_staleness for before, after in pairwise(at)):
        raise InputError(
            f"live.planted: versions {at[0]} and {at[1]} may be in one candidate",
            hint="name versions more than train.max_staleness apart",
        )
    return population_of(config)


def derived(config: RunConfig, options: SimulationOptions) -> dict[str, float]:
    """Returns what a simulation amounts to, for ``--dry-run``."""
    population = check_simulation(config, options)
    settings = population.settings
    users = [user.role for user in population.users]
    answers = options.rate * options.planned_s
    a_version = config.rollout.group_size * config.train.groups_per_step
    return {
        "users": len(users),
        "liars": users.count("liar"),
        "gullible": users.count("gullible"),
        "coordinated": users.count("cohort"),
        "answers": answers,
        "reports_expected": answers * (1 - settings.silence),
        "answers_a_version": a_version,
        "versions_at_most": answers // a_version,
        "indifferent": population.indifferent(),
        "optimum": population.optimum(options.planned_s),
    }


class PlannedStage(msgspec.Struct, frozen=True):
    """One stage of a canary: the share of users that see the candidate, the outcomes of both arms
    that it needs, the answers until so many different users asked, and minutes until the last has
    its outcome. Answers and minutes are None if there are too few users."""

    share: float
    outcomes: int
    answers: int | None
    minutes: float | None


class PlannedRelease(msgspec.Struct, frozen=True):
    """A candidate's way to all users, from the tests of ``[live.release]``: with probability
    ``power``, a candidate better by ``effect`` is promoted in so many minutes."""

    margin: float
    error_rate: float
    power: float
    effect: float
    unit: str
    stages: list[PlannedStage]
    minutes: float | None


def planned_release(config: RunConfig, options: SimulationOptions) -> PlannedRelease | None:
    """Returns what a candidate's release needs, for ``--dry-run``; None without releases.

    Where the unit is the user, A answers come from N (1 − exp(−A / N)) of N users, on average.
    """
    if not releases(config):
        return None
    release, users = config.live.release, len(population_of(config).users)
    stages, asked = [], 0
    settles_s = release.outcome_after_s + (release.horizon_s if release.unit == "user" else 0.0)
    for share, outcomes in zip(
        release.stages, planned_answers(release, effect=PLANNED_EFFECT), strict=True
    ):
        asked += outcomes  # Each user counts once in a canary.
        answers: int | None = outcomes
        if release.unit == "user":
            answers = _answers_of(asked, users)
            if answers is not None:
                answers -= _answers_of(asked - outcomes, users) or 0
        minutes = None
        if answers is not None:
            minutes = (answers / options.rate + settles_s) / 60
        stages.append(PlannedStage(share, outcomes, answers, minutes))
    every = [stage.minutes for stage in stages]
    total = None if None in every else sum(one for one in every if one is not None)
    return PlannedRelease(
        release.margin, release.error_rate, PLANNED_POWER, PLANNED_EFFECT, release.unit, stages,
        total,
    )  # fmt: skip


def _answers_of(asked: int, users: int) -> int | None:
    """Return the answers until ``asked`` different users asked; None if there are not so many."""
    return None if asked >= users else math.ceil(-users * math.log(1 - asked / users))


@dataclass
class _Child:
    """A started command and its log. ``process`` is its guard: the command ends with it, and with
    this process, however that dies."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command unless it ended; its guard ignores SIGINT and SIGTERM."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def require_alive(self) -> None:
        """Raises `InputError` with the end of its log if it ended."""
        if self.process.poll() is not None:
            tail = self.log.read_bytes()[-600:].decode("utf-8", "replace").strip()
            raise InputError(f"{self.name} ended early: {tail}", hint=f"see {self.log}")

    def url(self) -> str:
        """Waits until it listens and returns its URL."""
        deadline = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline:
            self.require_alive()
            found = _URL.search(self.log.read_bytes())
            if found is not None:
                return found[1].decode()
            time.sleep(POLL_S)
        raise RetryError(f"{self.name} does not listen", hint=f"see {self.log}")


@dataclass
class LiveStack:
    """The processes of a live run on this machine.

    Example::

        options = SimulationOptions(out=Path("runs/live"))
        with LiveStack(config, Path("live.toml"), options) as stack:
            stack.gateway_url, stack.token
    """

    config: RunConfig
    config_path: Path
    options: SimulationOptions
    report_line: ReportLine = lambda _: None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    gateway_url: str = ""
    _children: list[_Child] = field(default_factory=list)

    @property
    def bucket_folder(self) -> Path:
        """The folder that is the run's bucket."""
        return self.options.out / "bucket"

    def __enter__(self) -> LiveStack:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        out = self.options.out
        (out / "logs").mkdir(parents=True, exist_ok=True)
        seed = [] if self.options.seed is None else ["--seed", str(self.options.seed)]
        run = self._command("run", str(self.config_path), "--out", str(out), "--plain", *seed)
        bucket = open_bucket(str(self.bucket_folder), create=True)
        deadline = time.monotonic() + START_WITHIN_S
        self.report_line("warm start")
        while newest_version(bucket) is None:
            run.require_alive()
            if time.monotonic() > deadline:
                raise RetryError("the trainer publishes no version", hint=f"see {run.log}")
            time.sleep(POLL_S)
        replicas = self._replicas(bucket)
        place, self._run = SecretPlace(out / "live.secret"), read_run(bucket)
        self._secret = create_secret(bucket, self._run, place)
        gateway = self._command(
            "gateway", bucket.url, "--port", "0", "--capture-header", "--secret", str(place),
            "--state", str(out / "gateway"), *replicas,
            "--feedback-per-minute", "600", "--feedback-per-day", "100000",
        )  # fmt: skip
        self.gateway_url = gateway.url()
        self._command("learner", bucket.url)
        deadline = time.monotonic() + START_WITHIN_S
        while not _ready(self.gateway_url):
            self.require_alive()
            if time.monotonic() > deadline:
                raise RetryError("the replica does not become ready", hint=f"see {gateway.log}")
            time.sleep(POLL_S)
        self.report_line(f"serving users at {self.gateway_url}")

    def _replicas(self, bucket: Bucket) -> list[str]:
        """Start the replicas, and what decides about releases; returns the gateway's arguments."""
        if not releases(self.config):
            one = self._command("replica", bucket.url, "--port", "0")
            return ["--replica", one.url()]
        start = ReleaseOptions(trust=ReaderTrust(), version=0, reason="the demo begins", by="demo")
        take_decision(bucket.url, "promote", start)
        # For the version that serves, the candidate, and the hold-back version if there is one.
        count = 3 if self.config.live.release.hold_back else 2
        started = [
            self._command("replica", bucket.url, "--port", "0", "--hold", log=f"replica-{number}")
            for number in range(count)
        ]
        self._command("live", "decide", bucket.url, "--by", "demo", log="decider")
        return [word for one in started for word in ("--replica", one.url())]

    def claims(self, receipt: str) -> Receipt | None:
        """Returns what a receipt of the gateway says; None if it is none."""
        return read_receipt(receipt, keys=self._secret.receipt_keys, run=self._run.id)

    def require_alive(self) -> None:
        """Raises `InputError` if one of the processes ended."""
        for child in self._children:
            child.require_alive()

    def close(self) -> None:
        """Stops all processes: first what serves and learns, then the run, which ends its step."""
        for names in ({"run"}, set[str]()):  # Those not named, then all.
            stopping = [one for one in self._children if one.name not in names]
            for child in stopping:
                child.send(signal.SIGINT if child.name == "run" else signal.SIGTERM)
            deadline = time.monotonic() + STOP_WITHIN_S
            for child in stopping:
                try:
                    child.process.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    child.send(signal.SIGKILL)
                    child.process.wait()
        for child in self._children:
            assert child.process.stdin is not None
            child.process.stdin.close()

    def _command(self, name: str, *arguments: str, log: str = "") -> _Child:
        path = self.options.out / "logs" / f"{log or name}.log"
        variables = {
            TOKEN_VARIABLE: self.token,
            ADMIN_TOKEN_VARIABLE: f"admin-{self.token}",
            REPLICA_KEY_VARIABLE: f"replica-{self.token}",
        }
        stream: IO[bytes]
        with path.open("wb") as stream:
            process = subprocess.Popen(  # noqa: S603 - our own command
                guarded([*COMMAND, name, *arguments]),
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # Never written to: its end ends the command.
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C reaches this process only, which ends them all.
            )
        child = _Child(name, process, path)
        self._children.append(child)
        return child


def simulate(
    config: RunConfig, config_path: Path, options: SimulationOptions, *, report_line: ReportLine
) -> SimulationReport:
    """Serves simulated users, learns from them, and writes the report into ``options.out``.

    Raises `InputError` if ``out`` holds a bucket already, or a process ends early.
    """
    population = check_simulation(config, options)
    if (options.out / "bucket").exists():
        raise InputError(
            f"{options.out} holds a run already", hint="choose another --out, or delete it"
        )
    if any(place.exists() and not place.is_dir() for place in (options.out, *options.out.parents)):
        raise InputError(f"--out {options.out} is not a folder", hint="choose another --out")
    with _ended_by_signals(), LiveStack(config, config_path, options, report_line) as stack:
        began = time.time()
        watch = _Progress(report_line, population)
        driver = UserDriver(
            stack.gateway_url, stack.token, population, watch=watch, claims=stack.claims
        )

        def stopping() -> bool:
            stack.require_alive()
            return False

        result = asyncio.run(
            driver.drive(
                rate=options.rate,
                seconds=options.seconds if options.requests is None else math.inf,
                requests=options.requests,
                stopping=stopping,
            )
        )
    if not result.notes:
        raise InputError("no request was answered", hint=f"see {options.out / 'logs'}")
    bucket = open_bucket(str(options.out / "bucket"))
    planted = {str(kind): version for kind, version in config.live.planted.items()}
    seconds = options.seconds if options.requests is None else result.seconds
    done = Simulated(config.name, population, result, bucket, began, seconds, planted)
    report = report_of(done)
    write_simulation(report, result.notes, options.out)
    return report


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make signals that end a program end its processes too: they are in sessions of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """Says a line about the users every `REPORT_EVERY_S`."""

    def __init__(self, report_line: ReportLine, population: Population) -> None:
        self._report_line, self._population = report_line, population
        self._since, self._sum, self._count = 0.0, 0.0, 0

    def __call__(self, note: ServedNote) -> None:
        self._sum += note.satisfaction
        self._count += 1
        if note.at - self._since >= REPORT_EVERY_S:
            mean = self._sum / self._count
            optimum = self._population.optimum(note.at)
            self._report_line(
                f"{note.at:5.0f} s  version {note.version:3d}  true satisfaction {mean:.3f} "
                f"of {optimum:.3f}  ({self._count} answers)"
            )
            self._since, self._sum, self._count = note.at, 0.0, 0


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def report_to_stderr(line: str) -> None:
    """Prints a line for a person."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
