"""Measures a trainer's poll, its resumption, and a status, of runs of many workers and groups,
through a store that answers in 20 ms.

The trainer's own objects read the run: heartbeats, challenges, grants and groups, without a model.
Each worker has one group under way, and a twentieth of the workers finish one between two polls, as
when a group takes 20 s. The groups are stored by the measurement, past the simulated store.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.scale.versions import make_run
from benchmarks.training.keys import Measured, Options
from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import RunConfig, TrainConfig
from deltawire.dashboard.status import RunStatus, Watch
from deltawire.errors import BugError
from deltawire.events import Generated, Life, encode_lines
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.intake import Intake
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.runtime.fleet import MOST_READ, Fleet
from deltawire.runtime.reaper import Reaper
from deltawire.store import Bucket, RetryingBucket, open_bare_bucket
from deltawire.testing.simulated import SimulatedBucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import Heartbeat, WorkerStatus

WORKERS = 10_000
RESUMED, GROUPS = 1_000, 1_000_000
"""Workers and groups of a run that a trainer resumes."""
POLLS = 20
BUSY = 20
"""One worker in so many finishes a group between two polls."""


def measure(options: Options) -> Measured:
    """Times polls of a trainer with 100, 1,000 and 10,000 workers."""
    del options
    sizes = (100, 1000, WORKERS)
    found = {workers: poll(workers) for workers in sizes}
    shown = {workers: show_status(workers) for workers in sizes}
    resumed = {groups: resume(groups) for groups in (GROUPS // 100, GROUPS)}
    return Measured(
        {
            "trainer_start_s_10k_workers": found[WORKERS]["start"]["seconds"],
            "trainer_poll_s_10k_workers": found[WORKERS]["seconds"],
            "trainer_poll_requests_10k_workers": found[WORKERS]["most_requests"],
            "status_s_10k_workers": shown[WORKERS]["later"]["seconds"],
            "resume_s_1m_groups": resumed[GROUPS]["seconds"],
            "resume_requests_growth": resumed[GROUPS]["requests"]
            / resumed[GROUPS // 100]["requests"],
        },
        {
            **{str(n): {"poll": found[n], "status": shown[n]} for n in sizes},
            "resumed": {str(n): one for n, one in resumed.items()},
        },
    )


class Control:
    """The part of a trainer that reads its workers, over ``bucket``."""

    def __init__(self, bucket: Bucket, workers: int, *, ledger: Ledger | None = None) -> None:
        train = TrainConfig(groups_per_step=max(1, workers // 2), max_staleness=1)
        config = RunConfig(name="bench", train=train)
        self.ledger = ledger or Ledger()
        self.fleet = Fleet(bucket, silence_s=config.faults.silence_s, most_read=MOST_READ)
        self.credits = CreditIssuer(bucket, config, self.ledger.copy(), epoch=1, granted={})
        self.guard = WorkerGuard(bucket, config)
        self.buffer = RolloutBuffer(
            bucket, self.ledger, limit=self.credits.staleness.limit, guard=self.guard,
            drawn=self.credits.drawn,
        )  # fmt: skip
        self.intake = Intake(
            self.fleet, Reaper(bucket), self.credits, self.guard, self.buffer, self.ledger
        )
        self.version = 0

    def close(self) -> None:
        """Ends the threads that read groups."""
        self.buffer.close()

    def turn(self) -> int:
        """Polls, grants, and takes a step's groups if there are enough; returns how many."""
        alive = self.intake.poll(every_s=0.0)
        batch = self.buffer.next_batch(self.credits.staleness, version=self.version, alive=alive)
        self.credits.observe(self.buffer, alive, self.fleet.begun)
        self.credits.write("training")
        if batch is None:
            return 0
        self.version += 1
        taken = [(one.worker, one.sequence) for one in batch.taken]
        metadata = CommitMetadata(step=self.version, consumed=taken)
        for one in taken:
            self.ledger.settle(*one)
        self.credits.expect(self.version, metadata)
        self.credits.committed(self.version, "")
        return len(taken)


def poll(workers: int) -> dict[str, Any]:
    """Returns seconds, requests and bytes of polls of a trainer with so many workers."""
    inner = open_bare_bucket("memory://")
    names = [f"w{number:05d}" for number in range(workers)]
    for name in names:
        _beat(inner, name, 0, 0)
    bucket = SimulatedBucket(inner)
    control = Control(RetryingBucket(bucket), workers)
    started = time.perf_counter()
    polls = 0
    while len(control.credits.granted()) < workers:
        control.turn()
        polls += 1
    start = {
        "seconds": time.perf_counter() - started, "polls": polls,
        "requests": dict(bucket.requests), "refused": bucket.refused,
    }  # fmt: skip
    stored = dict.fromkeys(names, 0)
    seconds, requests, consumed = [], [], 0
    totals: Counter[str] = Counter()
    for number in range(POLLS):
        for name in names[number % BUSY :: BUSY]:
            _store(inner, control, name, stored)
        for name in names:
            _beat(inner, name, number + 1, stored[name])
        bucket.requests = Counter()
        began = time.perf_counter()
        consumed += control.turn()
        seconds.append(time.perf_counter() - began)
        requests.append(bucket.total_requests)
        totals.update(bucket.requests)
    control.close()
    if not consumed:
        raise BugError("no step was taken")
    status = inner.head(keys.TRAINER)
    return {
        "seconds": sorted(seconds)[POLLS // 2],
        "slowest": max(seconds),
        "most_requests": max(requests),
        "requests": {verb: count / POLLS for verb, count in totals.items()},
        "refused": bucket.refused,
        "consumed": consumed,
        "waiting": control.buffer.waiting,
        "trainer_json_bytes": 0 if status is None else status.bytes,
        "start": start,
    }


def resume(groups: int) -> dict[str, Any]:
    """Returns requests, bytes read and seconds of the first polls of a trainer that resumes a run
    of 1,000 workers whose ``groups`` groups are all stored and consumed, until each worker has a
    credit for the next one."""
    inner, ledger = open_bare_bucket("memory://"), Ledger()
    names = [f"w{number:05d}" for number in range(RESUMED)]
    each = groups // RESUMED
    for name in names:
        for sequence in range(each):
            inner.put(keys.rollout(name, sequence), b"a group that was consumed")
            ledger.settle(name, sequence)
        _beat(inner, name, 0, each)
    bucket = SimulatedBucket(inner)
    control = Control(RetryingBucket(bucket), RESUMED, ledger=ledger)
    started = time.perf_counter()
    while any(control.credits.granted_to(name) <= each for name in names):
        control.turn()
    seconds = time.perf_counter() - started
    control.close()
    return {"requests": bucket.total_requests, "seconds": seconds, "groups": each * RESUMED}


def show_status(workers: int) -> dict[str, Any]:
    """Returns seconds and requests of a status of a run with so many workers.

    ``first`` and ``later`` read every worker's heartbeat and events, as the supervisor of a large
    run does for all views; ``stored`` is a view's, which reads what the supervisor stored.
    """
    inner = make_run(2)
    names = [f"w{number:05d}" for number in range(workers)]
    for name in names:
        life = Life(process=name, at=time.time(), role="worker", what="started")
        inner.put(keys.events(f"{name}-n", 0), encode_lines([life]))
    rows: dict[str, Any] = {}
    encoded = b""
    bucket = SimulatedBucket(inner)
    watch = Watch(RetryingBucket(bucket), stored=False)
    for number, row in enumerate(("first", "later")):
        for name in names:
            done = Generated(
                process=name, at=time.time(), sequence=number, versions=[0], reward_mean=0.0,
                tokens=2, failed=0, cause="",
            )  # fmt: skip
            inner.put(keys.events(f"{name}-n", number + 1), encode_lines([done]))
            _beat(inner, name, number, number + 1)
        rows[row], made = _timed(bucket, watch)
        encoded = encode_json(made)
    inner.put(keys.STATUS, encoded)
    rows["stored"], found = _timed(bucket, Watch(RetryingBucket(bucket)))
    if len(found.processes) != workers:
        raise BugError(f"the status shows {len(found.processes)} processes")
    return {**rows, "status_json_bytes": len(encoded)}


def _timed(bucket: SimulatedBucket, watch: Watch) -> tuple[dict[str, Any], RunStatus]:
    bucket.requests, bucket.refused = Counter(), 0
    started = time.perf_counter()
    found = watch.poll()
    seconds = time.perf_counter() - started
    row = {"seconds": seconds, "requests": dict(bucket.requests), "refused": bucket.refused}
    return row, found


def _store(inner: Bucket, control: Control, name: str, stored: dict[str, int]) -> None:
    """Stores a worker's next group, if it has a credit for one."""
    sequence = stored[name]
    if sequence >= control.credits.granted_to(name):
        return
    secret = control.guard.challenges.secret_of(name)
    group = replace(
        seeded_group(sequence, tokens=2, episodes=2), worker=name,
        nonce=nonce_of(secret, 0, sequence),
    )  # fmt: skip
    inner.put(keys.rollout(name, sequence), encode_group(group))
    stored[name] = sequence + 1


def _beat(inner: Bucket, name: str, number: int, stored: int) -> None:
    worker = WorkerStatus(phase="sampling", version=0, digest="", stored=stored, first=0)
    heartbeat = Heartbeat(
        process=name, role="worker", nonce="n", lease=0, supervised=True, host="h", pid=1,
        started_at=0.0, at=time.time(), number=number, doing="sample", quiet_s=0.0,
        allowed_s=60.0, worker=worker,
    )  # fmt: skip
    inner.put(keys.heartbeat(name), encode_json(heartbeat))
