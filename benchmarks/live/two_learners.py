"""``feedback_trained_twice_two_learners``: two learners of one run, killed and stopped at random.

The learners' own code shares 1,000 answers in simulated time. Each learner is killed before or
after random writes, and stands still for a minute between reading the other's lineages and storing
its own: the other takes its answers over meanwhile, so both write them down. The trainer's own
buffer then reads the groups, and starts again after every fourth step. Answers in two groups that
it takes are counted, also without its guard, and with learners that do not know of each other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from benchmarks.training.keys import Measured, Options
from deltawire.config import RunConfig, parse_config
from deltawire.errors import FencedError, RetryError
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.owners import AnswerOwners
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import Strict
from deltawire.rl.control.trained_answers import TrainedAnswers
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket, DelegatingBucket, open_bucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment
from deltawire.wire.ledger import Ledger

SEEDS = 5
ANSWERS = 1000
SILENCE_S = 20
PAUSE_S = 60
NAMES = ("one", "two")
BEGAN = 1_000_000.0


def _config() -> RunConfig:
    values = {
        "name": "shared",
        "rollout": {"group_size": 8, "max_tokens": 4},
        "train": {"loss": {"advantage": "given"}},
        "trust": {"rescore_share": 0.0},
        "live": {"settle_s": 1.0, "user_cap": 0.5},
    }
    return parse_config(values, source="two learners")


@dataclass
class _Life:
    """One life of a learner: a process that is killed loses it."""

    records: LiveRecords
    owners: AnswerOwners
    groups: LiveGroups


class _Interrupted(DelegatingBucket):
    """A store whose client is killed at random writes, or stands still before it claims answers."""

    def __init__(self, inner: Bucket, world: TwoLearners, name: str) -> None:
        super().__init__(inner)
        self._world, self._name = world, name

    def create(self, key: str, data: bytes) -> bool:
        fault = self._world.chance.random()
        if fault < 0.05:
            raise RetryError("killed", run=self.url, key=key)
        if key.startswith(keys.LIVE_LINEAGE) and 0.1 < fault < 0.15:
            self._world.pass_time(PAUSE_S, stopped=self._name)
        made = super().create(key, data)
        if fault > 0.95:
            raise RetryError("killed after the write", run=self.url, key=key)
        return made


@dataclass
class TwoLearners:
    """The world: answers in a bucket, and learners that live, stop and die.

    With ``shared`` they see each other's heartbeats.
    """

    seed: int
    shared: bool = True
    answers: int = ANSWERS
    bucket: Bucket = field(default_factory=lambda: open_bucket("memory://"))
    kills: int = 0
    now: float = BEGAN

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.run = start_run(self.bucket)
        self._config = _config()
        self._lives: dict[str, _Life | None] = dict.fromkeys(NAMES)
        self._seen = dict.fromkeys(NAMES, BEGAN)
        self._stopped: Counter[str] = Counter()
        self._number = 0
        rng = np.random.default_rng(self.seed)
        for segment in range(10):
            rows = [_answer(rng) for _ in range(self.answers // 10)]
            for place, found in (
                (keys.live_captures, rows),
                (keys.live_feedback, [_report(row, rng) for row in rows]),
            ):
                data = encode_segment("g0", segment, [encode_row(row) for row in found])
                self.bucket.put(place("g0", segment), data)

    def pass_time(self, seconds: int, *, stopped: str = "") -> None:
        """Lets all learners but the one that stands still live on for so long."""
        self._stopped[stopped] += 1
        for _ in range(seconds):
            self.now += 1
            for name in NAMES:
                if not self._stopped[name]:
                    self._turn(name)
        self._stopped[stopped] -= 1

    def _turn(self, name: str) -> None:
        life = self._lives[name]
        if life is None and self.chance.random() < 0.8:
            return
        try:
            life = self._lives[name] = life or self._start(name)
            self._seen[name] = self.now
            alive = [one for one in NAMES if self.now - self._seen[one] < SILENCE_S]
            life.owners.observe(alive if self.shared else [], self.now)
            self._number += 1
            life.groups.store(f"nonce-{self._number}", self.now)
        except (RetryError, FencedError):
            self._lives[name] = None
            self.kills += 1

    def _start(self, name: str) -> _Life:
        records = LiveRecords(self.bucket)
        records.poll()
        owners = AnswerOwners(name, Fleet(self.bucket, silence_s=SILENCE_S))
        maker = GroupMaker(self._config, records, owns=owners.owns)
        numbers = [
            found[1] + 1
            for key in self.bucket.list(keys.rollouts_of(name))
            if (found := keys.group_of(key)) is not None
        ]
        bucket = _Interrupted(self.bucket, self, name)
        return _Life(
            records, owners, LiveGroups(bucket, name, maker, first=max(numbers, default=0))
        )

    def lineages(self) -> Counter[str]:
        """Returns in how many lineages each answer is."""
        return Counter(one.answer for line in read_lineages(self.bucket) for one in line.answers)

    def trained(self, *, guarded: bool = True) -> Counter[str]:
        """Returns how often a trainer takes each answer, which starts again after four steps."""
        named = {(one.worker, one.sequence): one.answers for one in read_lineages(self.bucket)}
        ledger, version = Ledger(), 0
        taken: Counter[str] = Counter()
        left = True
        while left:
            policy = Strict(1, 1 << 20)
            book = TrainedAnswers(self.bucket, self.run, ledger) if guarded else None
            buffer = RolloutBuffer(self.bucket, ledger, limit=policy.limit, answers=book)
            for _ in range(4):
                buffer.poll(NAMES)
                batch = buffer.next_batch(policy, version=version)
                left = batch is not None
                if batch is None:
                    break
                version += 1
                places = [(one.worker, one.sequence) for one in batch.taken]
                for place in places:
                    taken.update(one.answer for one in named[place])
                for place in [*places, *batch.dropped]:
                    ledger.settle(*place)
            buffer.close()
        return taken


def _answer(rng: np.random.Generator) -> Capture:
    return Capture(
        answer=rng.bytes(16).hex(), conversation="c" * 32, turn=0, user=rng.bytes(16).hex(),
        arm="serving", propensity=1.0, at=BEGAN - 60, receipt="r", finish="stop",
        prompt=np.array([1], "<i4").tobytes(), tokens=np.array([2], "<i4").tobytes(),
        logprobs=np.array([-1.0], "<f4").tobytes(), spans=[(0, 1)],
    )  # fmt: skip


def _report(row: Capture, rng: np.random.Generator) -> Feedback:
    return Feedback(
        id="accept", answer=row.answer, conversation=row.conversation, user=row.user, arm=row.arm,
        kind="accept", value=float(rng.integers(2)), at=row.at + 1, received=row.at + 1,
        served_at=row.at,
    )  # fmt: skip


def twice(counts: Collection[int]) -> int:
    """Returns how many counts are beyond the first."""
    return sum(count - 1 for count in counts)


def measure(options: Options) -> Measured:
    """Measures the key."""
    found: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + SEEDS):
        world = TwoLearners(seed)
        world.pass_time(900)
        apart = TwoLearners(seed, shared=False)
        apart.pass_time(900)
        known = world.trained()
        found.update(
            twice=twice(known.values()),
            trained=len(known),
            in_two_lineages=twice(world.lineages().values()),
            twice_without_guard=twice(world.trained(guarded=False).values()),
            lineages_apart=twice(apart.lineages().values()),
            twice_apart=twice(apart.trained().values()),
            kills=world.kills,
        )
    values: dict[str, bool | float] = {"feedback_trained_twice_two_learners": found.pop("twice")}
    return Measured(values, {"answers": SEEDS * ANSWERS, **found})
