"""Measures real readers that need more requests than their store answers in the time.

Every reader is a process with the code that users run, on an S3 server that throttles reads and
writes separately. *Needed* is the requests of all readers, counted for one of them on a store
without limits, divided by the limit on reads::

    publisher: run/storm, a version of many blobs     readers, all at one moment
      ├─ 16 readers that hold the version before ──▶  follow: until each has the new one
      ├─ 16 readers that hold nothing ─────────────▶  start: until each has loaded the newest
      └─ run/other: a publisher that commits during the first storm, and then without readers

``python -m benchmarks.scale.storm_run READER`` is one reader; ``READER`` is JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

import msgspec
import numpy as np

from benchmarks.runner import ROOT
from benchmarks.scale.storm_plan import fleet, planned_s
from benchmarks.training.keys import Measured, Options
from deltawire.errors import BugError
from deltawire.store import open_bucket
from deltawire.sync import Publisher, Subscriber, load_mirror, open_publisher, read_run
from deltawire.testing.s3_server import S3Server

READERS = 16
LATENCY_S = 0.1
VALUES = 512
"""Values of a tensor, each of which is one blob."""
WRITES_SHARE = 0.64
"""The limit on writes over that on reads: S3 states 3,500 and 5,500 a second for a prefix."""
COMMIT_BLOBS = 8
COMMITS = 6
REFILLED_S = 6.0
"""After so long, a store has again what it answers at once: commits of the storm are further apart
than that, so the ones without readers must not wait for each other either."""
LONGEST = 3.0
"""A reader is waited for this many times what is needed, and a minute."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One storm: the limit is such that all requests take ``needed_s``."""

    needed_s: float
    blobs: int = 200
    readers: int = READERS


LEVELS = (
    # At 12 s, 200 blobs would be more requests a second than the test server answers.
    Level(needed_s=12, blobs=120),
    Level(needed_s=51),
    Level(needed_s=91),
    Level(needed_s=300),
)


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's arguments; one that is ``held`` begins with the newest version at its start."""

    url: str
    held: bool


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one storm; times in seconds since the readers began."""

    needed_s: float
    requests: float
    cold_requests: float
    rate: float
    last_s: float
    cold_s: float
    attempts: float
    cold_attempts: float
    ended: int
    readers: int
    commits_s: list[float]
    commits_alone_s: list[float]

    @property
    def commit_delay_s(self) -> float:
        """How much longer the slowest commit took than the median one on the quiet store."""
        return max(self.commits_s) - median(self.commits_alone_s)

    @property
    def plan_error(self) -> float:
        """The largest error of the closed form and of the simulation, for either start."""
        errors = [0.0]
        for taken_s, requests in ((self.last_s, self.requests), (self.cold_s, self.cold_requests)):
            found = fleet(needed_s=self.needed_s, requests=round(requests), readers=self.readers)
            errors += [abs(one / taken_s - 1) for one in planned_s(*found)]
        return max(errors)


def measure(options: Options) -> Measured:
    """Measures all levels, the longest one while the others run."""
    del options
    with ThreadPoolExecutor(2) as pool:
        *short, longest = LEVELS
        last = pool.submit(run_storm, longest)
        storms = [*map(run_storm, short), last.result()]
    return Measured(
        {
            "storm_last_reader_vs_needed": max(one.last_s / one.needed_s for one in storms),
            "storm_attempts": max(one.attempts for one in storms),
            "storm_cold_start_vs_needed": max(one.cold_s / one.needed_s for one in storms),
            "storm_processes_ended": sum(one.ended for one in storms),
            "storm_commit_delay_s": max(one.commit_delay_s for one in storms),
            "storm_plan_error": max(one.plan_error for one in storms),
        },
        {"storms": [{**msgspec.to_builtins(one), "plan_error": one.plan_error} for one in storms]},
    )


def run_storm(level: Level) -> Storm:
    """Runs the storm of followers with a publisher, and the storm of cold starts."""
    with S3Server() as server:
        server.make_bucket("storm")
        publisher, publish = open_run(server, "s3://storm/run", level.blobs)
        other, commit = open_run(server, "s3://storm/other", COMMIT_BLOBS)
        commit()  # The first one reads more than later ones do.
        held = Reader(url="s3://storm/run", held=True)
        cold = Reader(url="s3://storm/run", held=False)
        with readers_of(server, held, level.readers + 1) as waiting:
            publish()
            publisher.wait_for_anchor()
            server.throttle()
            waiting.pop().reach(time.monotonic(), 60.0)
            requests = float(reads(server))
            rate = level.readers * requests / level.needed_s
            throttle(server, rate)
            with ThreadPoolExecutor(1) as pool:
                commits = pool.submit(commit_often, commit, level.needed_s / COMMITS)
                last_s, ended = storm(waiting, level)
                followed = reads(server) / level.readers / requests
                commits_s = commits.result()
        throttle(server, rate)
        time.sleep(REFILLED_S)
        alone_s = commit_often(commit, REFILLED_S)
        server.throttle()
        with readers_of(server, cold, level.readers + 1) as waiting:
            server.throttle()
            waiting.pop().reach(time.monotonic(), 60.0)
            requests_cold = float(reads(server))
            rate_cold = level.readers * requests_cold / level.needed_s
            throttle(server, rate_cold)
            cold_s, more = storm(waiting, level)
            started = reads(server) / level.readers / requests_cold
        server.throttle()
        publisher.close()
        other.close()
    return Storm(
        needed_s=level.needed_s, requests=requests, cold_requests=requests_cold, rate=rate,
        last_s=last_s, cold_s=cold_s, attempts=followed, cold_attempts=started,
        ended=ended + more, readers=level.readers,
        commits_s=commits_s, commits_alone_s=alone_s,
    )  # fmt: skip


def throttle(server: S3Server, rate: float) -> None:
    """Limits reads to ``rate`` a second, and writes in proportion."""
    server.throttle(reads_per_s=rate, writes_per_s=WRITES_SHARE * rate, latency_s=LATENCY_S)


def open_run(server: S3Server, url: str, blobs: int) -> tuple[Publisher, Callable[[], None]]:
    """Makes a run whose anchors and deltas have so many blobs; returns its publisher, and a
    function that commits a version."""
    rng = np.random.default_rng(blobs)
    names = [f"layers.{number:04d}.weight" for number in range(blobs)]
    tensors = {name: rng.standard_normal(VALUES).astype(np.float32) for name in names}
    publisher = open_publisher(
        server.open(url), tensors, anchor_every=1, compaction_strides=(), blob_bytes=16, threads=1,
    )  # fmt: skip

    def publish() -> None:
        for held in tensors.values():
            changed = rng.integers(0, VALUES, VALUES // 8)
            held[changed] = rng.standard_normal(changed.size).astype(np.float32)
        publisher.publish(tensors, wait=True)

    return publisher, publish


def commit_often(commit: Callable[[], None], every_s: float) -> list[float]:
    """Commits `COMMITS` versions, one in ``every_s``; returns how long each took."""
    taken = []
    for _ in range(COMMITS):
        started = time.monotonic()
        commit()
        taken.append(time.monotonic() - started)
        time.sleep(max(every_s - taken[-1], 0.5))
    return taken


def reads(server: S3Server) -> int:
    """Returns the reads of the readers' run since the throttle began."""
    made = [one for one in server.attempts() if one.run == "storm/run"]
    return sum(one.made for one in made if one.verb in ("GET", "HEAD", "LIST"))


class ReaderProcess:
    """A reader; `reach` lets it begin and says how long it took."""

    def __init__(self, server: S3Server, reader: Reader) -> None:
        module = "benchmarks.scale.storm_run"
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            [sys.executable, "-m", module, msgspec.json.encode(reader).decode()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **server.environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ready(self) -> None:
        """Waits until the reader has what it holds at first."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise BugError("a reader of the storm did not start; see its standard error")

    def reach(self, began: float, longest_s: float) -> float | None:
        """Lets the reader begin; returns the seconds since ``began`` at which it had the newest
        version, None if it ended or took longer than ``longest_s``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        timer = threading.Timer(longest_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        return float(line) - began if line else None

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def readers_of(server: S3Server, reader: Reader, count: int) -> Iterator[list[ReaderProcess]]:
    """Starts readers and waits until all are ready."""
    found = [ReaderProcess(server, reader) for _ in range(count)]
    try:
        for one in found:
            one.ready()
        yield list(found)
    finally:
        for one in found:
            one.close()


def storm(readers: Sequence[ReaderProcess], level: Level) -> tuple[float, int]:
    """Lets all readers begin at once; returns when the last one had the version (infinity if one
    never had), and how many ended before."""
    longest_s = LONGEST * level.needed_s + 60.0
    began = time.monotonic()
    with ThreadPoolExecutor(len(readers)) as pool:
        taken = list(pool.map(lambda one: one.reach(began, longest_s), readers))
    ended = sum(one is None for one in taken)
    return max(float("inf") if one is None else one for one in taken), ended


def read(reader: Reader) -> None:
    """Runs one reader: waits for a line, gets the newest version, and writes the time."""
    bucket = open_bucket(reader.url)
    mirror = load_mirror(bucket, read_run(bucket)) if reader.held else None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    run = read_run(bucket)
    if mirror is None:
        mirror = load_mirror(bucket, run)
    else:
        Subscriber(bucket, run, mirror).wait_for(mirror.version + 1)
    sys.stdout.write(f"{time.monotonic()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    read(msgspec.json.decode(sys.argv[1], type=Reader))
