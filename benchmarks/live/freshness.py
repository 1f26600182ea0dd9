"""``answer_lag``: how many versions old an answer is when it is trained on.

In simulated time `USERS` users give three times as many reports as the trainer takes: `GROUPS`
groups of `SIZE` answers every `STEP_S` seconds. The learner's own code stores groups, with its
pace; the trainer's own admission, buffer and staleness policy take them. The lag of an answer is
the version trained from minus the one that drew it. The same is measured without the pace and with
the oldest answers first, as learners worked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.training.keys import Measured, Options
from deltawire.config import RunConfig, parse_config
from deltawire.live.learning.grouping import GroupMaker, MaturedAnswer
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.pace import Pace
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.admission import WorkerLoad
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import Strict
from deltawire.store import Bucket, open_bucket
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.rollouts import decode_group

SEEDS = 3
STALENESS = (4, 16)
SECONDS = 400
USERS, GROUPS, SIZE, STEP_S = 2000, 2, 16, 10
SUPPLY = 3
BEGAN = 1_000_000.0


@dataclass
class LaggingRun:
    """A run of `STEP_S` seconds a step, whose answers mature three times as fast as it trains.

    ``lags`` are those of all answers trained on, ``dropped`` counts groups that were claimed and
    not trained on. Without ``paced`` the learner uses all credits, oldest answers first.
    """

    seed: int
    staleness: int
    paced: bool = True
    lags: list[int] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.bucket: Bucket = open_bucket("memory://")
        self._run = start_run(self.bucket)
        self._chance = np.random.default_rng((self.seed, 31))
        self._config = _config(self.staleness)
        self._reports: list[Feedback] = []
        self._number = self._segment = self.version = 0

    def pass_time(self, seconds: int) -> None:
        """Lets users ask, the learner learn and the trainer train."""
        records = LiveRecords(self.bucket)
        maker = (GroupMaker if self.paced else _OldestFirst)(self._config, records)
        groups = LiveGroups(self.bucket, "live", maker, first=0)
        pace = Pace(self.bucket, self._run, "live", self._config.train, first=0)
        policy, ledger = Strict(GROUPS, self.staleness), Ledger()
        buffer = RolloutBuffer(self.bucket, ledger, limit=policy.limit)
        publisher = start_publisher(self.bucket)
        publisher.publish(weights(0))
        publisher.flush()
        ends, consumed, granted = -1.0, CommitMetadata(step=0), 0
        for now in range(seconds):
            self._serve(BEGAN + now)
            records.poll()
            if ends == now:
                self.version += 1
                publisher.publish(weights(0), metadata=consumed.to_dict())
                publisher.flush()
                for place in consumed.settled_groups():
                    ledger.settle(*place)
            load = WorkerLoad(granted, groups.sequence, ledger.count("live"), True, True)
            granted = policy.admit({"live": load}, version=self.version)["live"]
            pace.poll(self.version, float(now))
            while groups.sequence < granted:
                first = groups.sequence
                if self.paced and not pace.may_store(first, now=float(now)):
                    break
                oldest = pace.oldest_version(first) if self.paced else 0
                if not groups.store(f"n{first}", BEGAN + now, oldest=oldest):
                    break
            buffer.poll(["live"])
            if ends <= now and (batch := buffer.next_batch(policy, version=self.version)):
                ends = now + STEP_S
                taken = [(one.worker, one.sequence) for one in batch.taken]
                consumed = CommitMetadata(
                    step=self.version + 1, consumed=taken, dropped=ranges_of(batch.dropped)
                )
                self.dropped += len(batch.dropped)
                self._measure(taken)
        buffer.close()
        publisher.close()

    def _measure(self, taken: list[tuple[str, int]]) -> None:
        for worker, sequence in taken:
            key = keys.rollout(worker, sequence)
            group = decode_group(self.bucket.get(key, limit=1 << 28) or b"", run="", key=key)
            self.lags += [self.version - int(t.versions_T.min()) for t in group.trajectories]

    def _serve(self, now: float) -> None:
        rows = []
        for _ in range(self._chance.poisson(SUPPLY * GROUPS * SIZE / STEP_S)):
            self._number += 1
            names: dict[str, Any] = {
                "answer": f"{self._number:032x}", "conversation": "c" * 32, "arm": "serving",
                "user": f"{self._chance.integers(USERS):032x}",
            }  # fmt: skip
            rows.append(Capture(
                **names, turn=0, propensity=1.0, at=now, receipt="r", finish="stop",
                prompt=np.array([1], "<i4").tobytes(), tokens=np.array([2], "<i4").tobytes(),
                logprobs=np.array([-1.0], "<f4").tobytes(), spans=[(self.version, 1)],
            ))  # fmt: skip
            at = now + self._chance.exponential(2.0)
            self._reports.append(Feedback(
                **names, id=f"r{self._number}", kind="accept", value=float(self._number % 2),
                at=at, received=at, served_at=now,
            ))  # fmt: skip
        due = [one for one in self._reports if one.received <= now]
        self._reports = [one for one in self._reports if one.received > now]
        for place, found in ((keys.live_captures, rows), (keys.live_feedback, due)):
            data = encode_segment("g0", self._segment, [encode_row(row) for row in found])
            self.bucket.put(place("g0", self._segment), data)
        self._segment += 1


def _config(staleness: int) -> RunConfig:
    values = {
        "name": "fresh",
        "rollout": {"group_size": SIZE, "max_tokens": 4},
        "train": {
            "groups_per_step": GROUPS, "max_staleness": staleness,
            "loss": {"advantage": "given"},
        },
        "trust": {"rescore_share": 0.0},
        "live": {"settle_s": 2.0, "window_s": 60.0},
    }  # fmt: skip
    return parse_config(values, source="freshness")


class _OldestFirst(GroupMaker):
    """Chooses as learners did before: the answers that were served first."""

    def choose(self, found: Sequence[MaturedAnswer], count: int) -> list[MaturedAnswer]:
        return sorted(found, key=lambda one: one.served_at)[:count]


def lag_of(seed: int, staleness: int, *, seconds: int = SECONDS, paced: bool = True) -> LaggingRun:
    """Returns a run after these seconds; not ``paced`` as learners worked before."""
    run = LaggingRun(seed, staleness, paced)
    run.pass_time(seconds)
    return run


def measure(options: Options) -> Measured:
    """Measures the key, the mean lag in the worst of the bounds."""
    means, details = [], {}
    for staleness in STALENESS:
        for name, paced in (("paced", True), ("before", False)):
            seeds = range(options.seed, options.seed + SEEDS) if paced else [options.seed]
            runs = [lag_of(seed, staleness, paced=paced) for seed in seeds]
            lags = np.concatenate([run.lags for run in runs])
            details[f"{name}_{staleness}"] = {
                "lag": float(lags.mean()), "largest": int(lags.max()), "answers": len(lags),
                "dropped": sum(run.dropped for run in runs),
                "versions": sum(run.version for run in runs),
            }  # fmt: skip
            if paced:
                means.append(float(lags.mean()))
    return Measured({"answer_lag": max(means)}, details)
