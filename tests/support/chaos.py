"""A chaos drill: a whole run on S3 over a bad network, whose parts die and hang at random.

    python tests/support/chaos.py --seconds 3600 --seed 1

Processes and signals are real. The seed determines the order of strikes, not their effects. The
chaos lasts the given time, and until each kind of strike came equally often. Then the run is
stopped, continued without faults for a few versions, and audited from the bucket, past the
network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tiny_config
from rich.console import Console

from deltawire.config import RunConfig, load_config
from deltawire.dashboard.summary import Summary
from deltawire.errors import DeltawireError
from deltawire.events import Event, Life, decode_lines
from deltawire.launch.session import Job, execute
from deltawire.rl.evaluate.audit import Fates, audit_fates
from deltawire.rl.trainer.verify_training import TrainingVerification, verify_training
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_version
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.s3_server import S3Server
from deltawire.wire import keys

SCRIPT = Path(__file__).with_name("faulty_deltawire.py")
MORE_VERSIONS = 6
RECOVERY_S = 90.0
CONFIG = (
    tiny_config.endless("chaos", checkpoint_every=7, anchor_every=9, evaluate_every=50)
    + """\
[faults]
silence_s = 14
stall_s = 20
long_s = 180
"""
)
RATES = {
    "refuse": 0.01,
    "busy": 0.01,
    "cut_request": 0.003,
    "lose": 0.005,
    "busy_after": 0.005,
    "cut_answer": 0.005,
    "shorten": 0.0005,
    "delay": 0.02,
    "stall": 0.0005,
}
STRIKES = (
    ("worker", signal.SIGKILL),
    ("worker", signal.SIGSTOP),
    ("trainer", signal.SIGKILL),
    ("trainer", signal.SIGSTOP),
    ("evaluator", signal.SIGKILL),
    ("worker", signal.SIGUSR1),
    ("worker", signal.SIGUSR2),
    ("store", "refuse"),
    ("store", "stall"),
)
NAMES = {signal.SIGUSR1: "environment hangs or raises", signal.SIGUSR2: "engine hangs or raises"}


@dataclass
class Report:
    """The strikes, and the findings of the audit."""

    strikes: Counter[str] = field(default_factory=Counter)
    network: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    noticed_s: list[float] = field(default_factory=list)
    """How long each stopped process stayed before it was killed."""
    versions: int = 0
    interrupted: bool = False
    summary: Summary | None = None
    fates: Fates | None = None
    replayed: TrainingVerification | None = None


class Chaos(threading.Thread):
    """Strikes until the time is over, then asks the run to stop."""

    def __init__(
        self, bucket: Bucket, proxy: FaultyProxy, *, seed: int, seconds: float, strikes: int
    ) -> None:
        super().__init__(daemon=True)
        self._limit = strikes
        self.strikes: Counter[str] = Counter()
        self.stopped: list[tuple[str, float]] = []
        self._bucket = bucket
        self._proxy = proxy
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._over = threading.Event()

    def run(self) -> None:
        while newest_version(self._bucket) is None:
            if self._over.wait(0.2):
                return
        end = time.monotonic() + self._seconds
        round_ = []
        while (time.monotonic() < end or round_) and self.strikes.total() < self._limit:
            if not self._run_goes_on():
                return
            if not round_:  # Each kind once per round, in random order.
                round_ = self._rng.sample(STRIKES, len(STRIKES))
            self._strike(*round_.pop())
        self._run_goes_on()
        os.kill(os.getpid(), signal.SIGINT)

    def _run_goes_on(self) -> bool:
        """Wait until the run makes a version, and a little longer; False if the drill is over.

        Otherwise a part that does not recover would only be struck while it is down.
        """
        before, deadline = newest_version(self._bucket), time.monotonic() + RECOVERY_S
        while newest_version(self._bucket) == before and time.monotonic() < deadline:
            if self._over.wait(0.2):
                return False
        return not self._over.wait(self._rng.uniform(0.0, 2.0))

    def _strike(self, role: str, how: signal.Signals | str) -> None:
        if role == "store":
            self.strikes[f"store {how}"] += 1
            self._proxy.choose = lambda *_: how
            self._over.wait(self._rng.uniform(1.0, 8.0))
            self._proxy.choose = self._proxy.draw
            return
        fleet = Fleet(self._bucket, silence_s=float("inf"))
        fleet.poll()
        alive = [p for p in fleet.heartbeats.values() if p.role == role and is_ours(p.pid)]
        if not alive:
            return
        victim = self._rng.choice(alive)
        self.strikes[f"{role} {NAMES.get(how) or how.name}"] += 1
        if how == signal.SIGSTOP:
            self.stopped.append((victim.process, time.time()))
        try:
            os.kill(victim.pid, how)
        except ProcessLookupError:
            return

    def close(self) -> None:
        self._over.set()
        self.join(60)


def is_ours(pid: int) -> bool:
    """True if a process belongs to this drill; a heartbeat outlives its process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return str(SCRIPT).encode() in words and parent == os.getpid()


def drill(folder: Path, *, seed: int, seconds: float, strikes: int = 1_000_000) -> Report:
    """Run the drill, with at most ``strikes`` strikes; call it from the main thread."""
    with (folder / "run.log").open("w") as log:
        return _drill(folder, Console(file=log), seed=seed, seconds=seconds, strikes=strikes)


def _drill(folder: Path, console: Console, *, seed: int, seconds: float, strikes: int) -> Report:
    report = Report()
    path = folder / "chaos.toml"
    path.write_text(CONFIG)
    config = load_config(path)
    with S3Server("ministack") as server:
        server.make_bucket("drills")
        with FaultyProxy(server.endpoint, seed=seed, rates=RATES, mercy=4) as proxy:
            os.environ.update(server.environment)
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            job = Job(
                config,
                path,
                None,
                folder / "out",
                open_bucket("s3://drills/run"),
                command=(sys.executable, str(SCRIPT)),
            )
            direct = server.open("s3://drills/run")
            chaos = Chaos(direct, proxy, seed=seed, seconds=seconds, strikes=strikes)
            proxy.choose = lambda *_: None
            chaos.start()
            threading.Thread(target=_begin_faults, args=(direct, proxy), daemon=True).start()
            try:
                report.interrupted = execute(job, console, plain=True) is None
            finally:
                chaos.close()
            proxy.choose = lambda *_: None
            report.network = Counter(fault for fault, _, _ in proxy.struck)
            reached = newest_version(direct) or 0
            job.config = _until(config, reached + MORE_VERSIONS, path)
            report.summary = execute(job, console, plain=True)
        _audit(report, direct, config, chaos)
    return report


def _begin_faults(bucket: Bucket, proxy: FaultyProxy) -> None:
    """Start faults only once the run has a version."""
    while newest_version(bucket) is None:
        time.sleep(0.2)
    proxy.choose = proxy.draw


def _until(config: RunConfig, versions: int, path: Path) -> RunConfig:
    path.write_text(path.read_text().replace("versions = 1000000", f"versions = {versions}"))
    train = msgspec.structs.replace(config.train, versions=versions)
    return msgspec.structs.replace(config, train=train)


def _audit(report: Report, bucket: Bucket, config: RunConfig, chaos: Chaos) -> None:
    report.strikes = chaos.strikes
    report.versions = newest_version(bucket) or 0
    deaths = [e for e in events_of(bucket) if isinstance(e, Life) and e.what == "died"]
    for life in deaths:
        report.causes[cause_of(life)] += 1
    for name, at in chaos.stopped:
        after = sorted(
            (life.at - at, life.detail) for life in deaths if life.process == name and life.at > at
        )
        if after and "no sign of life" in after[0][1]:  # Not if a strike killed it meanwhile.
            report.noticed_s.append(after[0][0])
    report.fates = audit_fates(bucket, max_staleness=config.train.max_staleness)
    report.replayed = verify_training(bucket)


def cause_of(life: Life) -> str:
    for words in ("no sign of life", "no progress"):
        if words in life.detail:
            return words
    return life.detail


def events_of(bucket: Bucket) -> list[Event]:
    found: list[Event] = []
    for key in bucket.list(keys.EVENTS):
        found += decode_lines(bucket.get(key, limit=1 << 26) or b"")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = drill(folder, seed=arguments.seed, seconds=arguments.seconds)
    except DeltawireError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    plain = msgspec.to_builtins(
        {name: value for name, value in vars(report).items() if name != "summary"}
    )
    if report.summary is not None:
        plain["proof"] = msgspec.to_builtins(report.summary.proof)
        plain["workers"] = msgspec.to_builtins(report.summary.workers)
        plain["restarts"] = report.summary.restarts
        plain["wall_s"] = report.summary.wall_s
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
