"""Counts the requests of an erasure and of a learner's poll, on runs with many versions."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from benchmarks.scale.versions import make_run
from benchmarks.training.keys import Measured, Options
from deltawire.errors import BugError
from deltawire.live.erasure.forgetting import forget_user
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.testing.simulated import SimulatedBucket
from deltawire.wire import keys
from deltawire.wire.decisions import FORGETS, Decision, ServedVersion
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.objects import encode_json

FORGOTTEN = 10_000
ROLLED_BACK = 200
USER = "a" * 32
POLLS = 20


def measure(options: Options) -> Measured:
    """Counts requests of an erasure for each version, and of a poll after a rollback."""
    del options
    forget, poll = forget_one(FORGOTTEN), poll_rolled_back(ROLLED_BACK)
    return Measured(
        {
            "forget_requests_per_version": forget["requests"] / FORGOTTEN,
            "rollback_poll_requests": poll["most"],
        },
        {"forget": forget, "poll": poll},
    )


def forget_one(versions: int) -> dict[str, Any]:
    """Returns requests and seconds of an erasure of a user whose answer is in one group."""
    inner = make_run(versions)
    lineage = Lineage(
        worker="live", sequence=0, at=0.0,
        answers=[LearnedAnswer("b" * 32, USER, 1.0, 1.0, 1.0, 1.0)],
    )  # fmt: skip
    inner.put(keys.live_lineage("live", 0), encode_json(lineage))
    bucket = SimulatedBucket(inner)
    run = read_run(inner)
    started = time.perf_counter()
    record = forget_user(bucket, run, USER)
    if record.groups != [("live", 0)]:
        raise BugError(f"the erasure names the groups {record.groups}")
    return {
        "requests": bucket.total_requests,
        "seconds": time.perf_counter() - started,
        "by_verb": dict(bucket.requests),
    }


def poll_rolled_back(versions: int) -> dict[str, Any]:
    """Returns the most requests of a learner's poll while the trainer has not restored yet."""
    inner = make_run(versions)
    _decide_to_roll_back(inner, versions)
    bucket = SimulatedBucket(inner, latency_s=0.0)
    released = ReleasedGroups(bucket, read_run(inner))
    released.poll()
    counts = []
    for _ in range(POLLS):
        bucket.requests = Counter()
        released.poll()
        counts.append(bucket.total_requests)
    return {"most": max(counts), "polls": POLLS}


def _decide_to_roll_back(bucket: Bucket, versions: int) -> None:
    run = read_run(bucket)
    first, newest = (ServedVersion(version, run.digest) for version in (0, versions - 1))
    series = [
        Decision(number=0, run=run.id, verdict="serve", serving=first, at=0.0, by="bench"),
        Decision(
            number=1, run=run.id, verdict="rollback", serving=first, candidate=newest, at=0.0,
            by="bench", evidence={FORGETS: 1.0},
        ),
    ]  # fmt: skip
    for decision in series:
        bucket.put(keys.live_decision(decision.number), encode_json(decision))
