"""Counts what every process of a small real run asks of its stores, next to the plan of that run.

A trainer, workers, an evaluator, a relay and a reader of its copy run as processes, all but the
last as users start them. Each has an access key with its name, by which the S3 server counts
requests and bytes::

    trainer, evaluator, workers "home" ─▶ s3://runs/run ◀─ workers "away", from another region
                                               └─▶ relay ─▶ s3://runs/copy ◀─ reader

Everything that a day would ask for is priced as the plan prices it. The plan gets what its author
must know: the length of a step, the rollouts, the size of a delta, and the store's latency. Two
runs are compared: one whose counts corrected the planner, and one that differs in everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.runner import ROOT
from benchmarks.scale.fleet_process import Settings
from benchmarks.scale.run_prices import (
    FITTED,
    OTHER,
    Counted,
    Observed,
    Setting,
    compare,
    request_of,
)
from benchmarks.training.keys import Measured, Options
from deltawire.errors import BugError
from deltawire.events import Span, Step
from deltawire.plan.fleet.planner import make_plan
from deltawire.plan.fleet.rates import shipped_rates
from deltawire.rl.control.rollout_buffer import read_consumed
from deltawire.runtime.event_tail import events_of
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.testing.s3_server import S3Server
from deltawire.testing.throttle import Attempts
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import Manifest

WINDOW_S = 90.0
LONGEST_WINDOW_S = 300.0
FILLED = 3
"""Versions after another latency, in which the groups that wait become more or fewer."""
SETTLED = 7
"""The version after which a run does all that it repeats: checkpoints and retention."""
PATIENCE_S = 600.0
CONFIG = """
name = "costs"
[model.build]
hidden_size = {hidden_size}
layers = 2
head_size = 32
feed_forward_size = 512
context = 128
[task]
heldout = 8
options = {{ min_word_len = 3, max_word_len = 4 }}
[warm_start]
max_steps = 2
check_every = 2
[rollout]
workers = {workers}
group_size = {group_size}
max_tokens = 24
slots = {slots}
context = 96
[train]
versions = 1000000
groups_per_step = {groups_per_step}
max_staleness = 2
checkpoint_every = {checkpoint_every}
anchor_every = {anchor_every}
[evaluate]
every = 10
samples = 1
[retain]
rollouts = 10
"""


def measure(options: Options) -> Measured:
    """Runs both fleets, and counts in a store of each of two latencies."""
    del options
    made = [(setting, *run_fleet(setting)) for setting in (FITTED, OTHER)]
    counted = [one for _, found, _ in made for one in found]
    return Measured(
        {
            "run_dollars_error": max(abs(one.error) for one in counted),
            "run_item_error": max(one.largest for one in counted),
        },
        {
            "runs": [
                {
                    "setting": msgspec.to_builtins(setting),
                    "worlds": [msgspec.to_builtins(one) for one in found],
                    "observed": [msgspec.to_builtins(one) for one in seen],
                }
                for setting, found, seen in made
            ],
        },
    )


def run_fleet(setting: Setting) -> tuple[list[Counted], list[Observed]]:
    """Runs a fleet; returns what a store of each latency counted next to the plan, and that."""
    with tempfile.TemporaryDirectory(prefix="deltawire-costs-") as name, S3Server() as server:
        server.make_bucket("runs")
        folder = Path(name)
        fields = {**msgspec.to_builtins(setting), "workers": setting.home + setting.away}
        (folder / "run.toml").write_text(CONFIG.format(**fields))
        with _fleet(server, folder, setting) as ended:
            bucket = _open(server, "bench")
            settled = 1 + max(SETTLED, setting.anchor_every)
            _wait(lambda: (newest_version(bucket) or 0) >= settled, ended)
            seen = [
                _observe(server, bucket, one, ended, cycle=setting.cycle)
                for one in setting.latencies_s
            ]
        model = str(folder / "model" / "config.json")
        return [_compare(one, model, setting) for one in seen], seen


def _compare(seen: Observed, model: str, setting: Setting) -> Counted:
    request = request_of(seen, model, setting)
    plan = make_plan(request, request.architecture(), shipped_rates(), changed=seen.changed)
    return compare(seen, plan, request)


def _open(server: S3Server, client: str, run: str = "run") -> Bucket:
    return server.open(f"s3://runs/{run}", access_key_id=client)


@contextmanager
def _fleet(server: S3Server, folder: Path, setting: Setting) -> Iterator[Callable[[], str]]:
    """Runs the processes; yields what names one that ended."""
    run, copy = "s3://runs/run", "s3://runs/copy"
    started: dict[str, subprocess.Popen[bytes]] = {}

    def command(
        client: str,
        *words: str,
        program: Sequence[str] = ("-m", "deltawire"),
        within: Path = folder,
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, **server.environment, "AWS_ACCESS_KEY_ID": client, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (folder / f"{client}.log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
                [sys.executable, *program, *words],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=within, env=environment,
            )  # fmt: skip

    def ended() -> str:
        for client, process in started.items():
            if process.poll() is not None:
                text = (folder / f"{client}.log").read_text(errors="replace")
                return f"{client} ended: {text[-2000:]}"
        return ""

    model = str(folder / "model")
    try:
        made = command("maker", "warm-start", "run.toml", "--out", model)
        if made.wait(PATIENCE_S):
            raise BugError(f"no model was made: {(folder / 'maker.log').read_text()[-2000:]}")
        started["trainer"] = command(
            "trainer", "trainer", run, "--config", "run.toml", "--model", model
        )
        bucket = _open(server, "bench")
        _wait(lambda: newest_version(bucket) is not None, ended)
        for region, count in (("home", setting.home), ("away", setting.away)):
            for client in (f"{region}{number}" for number in range(count)):
                started[client] = command(client, "worker", run, "--id", client)
        started["evaluator"] = command("evaluator", "evaluator", run)
        words = ["relay", run, copy, "--follow", "--json", "--compaction-strides", ""]
        started["relay"] = command("relay", *words)  # No plan has compacted deltas.
        copied = _open(server, "bench", "copy")
        _wait(lambda: newest_version(copied) is not None, ended)
        reader = Settings(role="reader", url=copy, poll_s=0.5)
        words = ["-m", "benchmarks.scale.fleet_process", msgspec.json.encode(reader).decode()]
        started["reader"] = command("reader", *words, program=(), within=ROOT)
        yield ended
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _wait(condition: Callable[[], bool], ended: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if why := ended():
            raise BugError(why)
        if time.monotonic() > deadline:
            raise BugError("the run does not get as far as it should; see its processes' output")
        time.sleep(0.5)


def _observe(
    server: S3Server,
    bucket: Bucket,
    latency_s: float,
    ended: Callable[[], str],
    *,
    cycle: int,
) -> Observed:
    """Counts for `WINDOW_S` on a store of this latency, and on until the versions are a multiple of
    ``cycle``, as anchors and states are counted whole."""
    server.throttle(latency_s=latency_s)
    filled = (newest_version(bucket) or 0) + FILLED
    _wait(lambda: (newest_version(bucket) or 0) >= filled, ended)
    first = newest_version(bucket) or 0
    with _probing(server) as probes:
        server.throttle(latency_s=latency_s)
        began, clock = time.time(), time.monotonic()
        time.sleep(WINDOW_S)
        attempts = server.attempts()
        while committed(attempts) % cycle and time.monotonic() < clock + LONGEST_WINDOW_S:
            time.sleep(0.2)
            attempts = server.attempts()
        seconds = time.monotonic() - clock
    if why := ended():
        raise BugError(why)
    last = newest_version(bucket) or 0
    busy = steps = groups = 0.0
    server.throttle()
    for event in events_of(bucket, "trainer"):
        if isinstance(event, Span) and began <= event.start < began + seconds:
            busy += (event.end - event.start) * (event.activity != "wait")
        if isinstance(event, Step) and began <= event.at < began + seconds:
            steps, groups = steps + 1, groups + event.groups
    if committed(attempts) % cycle:
        what = f"no whole cycle of {cycle} versions in {seconds:.0f} s"
        raise BugError(f"{what}: is the machine busy?")
    if not steps:
        raise BugError(f"no version was made in {seconds:.0f} s: is the machine busy?")
    run = read_run(bucket)
    manifests = [read_manifest(bucket, run, version) for version in range(first + 1, last + 1)]
    deltas = [one.delta for one in manifests if one is not None and one.delta is not None]
    return Observed(
        seconds=seconds, versions=committed(attempts), busy_s=busy, groups=groups / steps,
        group_tokens=_group_tokens(bucket, manifests[-1]), get_s=probes[0](), put_s=probes[1](),
        delta_bytes=fmean(delta.bytes for delta in deltas),
        values=sum(spec.count for spec in run.tensors), attempts=attempts,
    )  # fmt: skip


def committed(attempts: Sequence[Attempts]) -> int:
    """Returns the versions that the trainer committed. It commits a step's a little later, so that
    there may be one more or less of them than of steps."""
    return sum(
        one.made
        for one in attempts
        if (one.client, one.verb, one.kind) == ("trainer", "PUT", "weights/manifests")
    )


def _group_tokens(bucket: Bucket, manifest: Manifest | None) -> float:
    """Returns the mean tokens of the groups that a version consumed, prompts included."""
    assert manifest is not None
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=manifest.version)
    groups = [one.group for one in read_consumed(bucket, metadata)]
    return fmean(sum(len(one.tokens_T) for one in group.trajectories) for group in groups)


@contextmanager
def _probing(server: S3Server) -> Iterator[Sequence[Callable[[], float]]]:
    """Measures how long a small get and a small put take meanwhile."""
    bucket = _open(server, "bench", "probe")
    taken: tuple[list[float], list[float]] = ([], [])
    over = threading.Event()

    def timed(times: list[float], call: Callable[[], object]) -> None:
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)

    def probe() -> None:
        while not over.wait(1.0):
            timed(taken[0], partial(bucket.exists, "x"))
            timed(taken[1], partial(bucket.put, "x", b"1"))

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield [lambda: fmean(taken[0]), lambda: fmean(taken[1])]
    finally:
        over.set()
        thread.join()
