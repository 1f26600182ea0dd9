"""Allocator: holds prompts whose completions are under way, and decides what each gets next.

A prompt is a position of the run's order. Its pilot and each of its fills are stored groups of
their own, granted by the trainer like any other group::

             granted          arrives           decided
    pilot  ───────────▶ worker ─────▶ Allocator ─┬─▶ train ──▶ rollout buffer, one batch entry
                                       ▲         ├─▶ skip, defer ──▶ dropped
    fill   ◀──────────────────────────────────── ┴─▶ fill: a size, granted before new pilots

So a worker that dies loses no completion that it stored: the pilot is in the bucket, and its fill
is granted again. A decision has no effect before something follows from it that is durable: a fill
that ``trainer.json`` lists, or a manifest whose metadata names the consumed and the dropped groups.
A trainer that dies in between reads the pilot again and decides again.

Bound. Two limits hold at every grant: at most (S+1)·P prompts are outstanding, from the grant of
the pilot until every part is settled, and at most C = max((S+1)·P·G, (S+1)·P·a + P·(b−a))
completions, where a is the size of a pilot and b the most of one prompt. The first is the limit of
`deltawire.rl.control.admission` with prompts for groups, and its argument holds word by word:
fewer than (S+1)·P prompts are ahead of a pilot, those that are skipped make no step, and a fill
adds no prompt. So if steps take prompts in the order of granting, a prompt is trained on at an age
of at most S, counted from its pilot. The second bounds the tokens under way, and admits progress:
while fewer than P prompts are filled, the others hold pilots only, which leaves b − a for one fill
more. Prompts that are filled in stages may all be filled in part, so with stages C is (S+1)·P·b if
that is more. One fill at a time exceeds C while no worker has anything to sample: groups of a
worker that was given up and came back, or of steps that are not committed yet, may hold all of C.

A prompt that reaches age S while the next step has enough prompts is trained on with the
completions that it has, if their rewards differ: a *partial* one. One that is older is dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from deltawire.config import RunConfig
from deltawire.rl.allocation.curriculum import is_drawn, weight_of
from deltawire.rl.allocation.knapsack import divide_budget
from deltawire.rl.allocation.posterior import TaskPosterior, task_key
from deltawire.rl.allocation.rules import PromptOutcome, decide
from deltawire.wire.ledger import PromptRecord
from deltawire.wire.rollouts import Group

MAX_PASSED = 256
"""Positions that are passed over in a row before one is drawn in any case."""


class StoredPart(Protocol):
    """A stored group: a pilot (``part`` 0) or a fill of the prompt at position ``drawn``."""

    group: Group
    part: int
    drawn: int | None

    @property
    def worker(self) -> str:
        """The worker that stored it."""
        ...


S = TypeVar("S", bound=StoredPart)
Cause = Literal["skipped", "deferred", "stale"]


@dataclass(frozen=True)
class OpenParts:
    """Parts that workers which are alive still owe: their number by position, and how many of them
    are pilots."""

    by_position: Mapping[int, int] = field(default_factory=dict)
    pilots: int = 0


@dataclass
class Ready(Generic[S]):
    """A decided prompt: its parts, pilot first, and the record of the decision."""

    parts: list[S]
    record: PromptRecord


@dataclass
class _Prompt(Generic[S]):
    position: int
    defers: int
    parts: list[S] = field(default_factory=list)
    planned: int | None = None
    queued: int = 0
    """The size of a fill that waits to be granted."""

    @property
    def asked(self) -> int:
        return sum(completions_of(one.group) for one in self.parts)

    @property
    def oldest(self) -> int:
        versions = [one.group.oldest_version for one in self.parts]
        return min((v for v in versions if v >= 0), default=0)


class Allocator(Generic[S]):
    """The trainer's allocation of completions; safe to call from several threads.

    ``task_at`` gives the identity of the task at a position, for the curriculum.

    Example::

        allocator = Allocator(config, task_at=lambda position: f"task {position}")
        allocator.arrived(buffered)
        ready, dropped = allocator.decide_all(version=7, waiting=0, owed=OpenParts())
    """

    def __init__(self, config: RunConfig, *, task_at: Callable[[int], str] | None = None) -> None:
        rollout, train = config.rollout, config.train
        self.rules = rollout.allocation
        self.group_size = rollout.group_size
        self.first = self.rules.first(rollout.group_size)
        self.most = self.rules.most(rollout.group_size)
        self.step, self.staleness = train.groups_per_step, train.max_staleness
        self.prompts_limit = (self.staleness + 1) * self.step
        filled = self.prompts_limit if self.rules.stage else self.step
        self.completions_limit = max(
            self.prompts_limit * self.group_size,
            self.prompts_limit * self.first + filled * (self.most - self.first),
        )
        self.posterior = TaskPosterior(self.rules.discount)
        self.version = 0
        self._seed = config.seed
        self._task_at = task_at
        self._prompts: dict[int, _Prompt[S]] = {}
        self._alone = itertools.count(-2, -1)
        self._deferred: dict[int, tuple[int, int]] = {}
        """By position, the version at which it is due and how often it was deferred."""
        self._defers: dict[int, int] = {}
        self._records: list[PromptRecord] = []
        self._lock = threading.RLock()

    @property
    def parts_limit(self) -> int:
        """The most stored groups of one prompt that are granted on purpose."""
        return 1 + -(-(self.most - self.first) // (self.rules.stage or max(1, self.most)))

    @property
    def waiting(self) -> int:
        """The number of stored groups whose prompts are not decided yet."""
        with self._lock:
            return sum(len(prompt.parts) for prompt in self._prompts.values())

    def held_by(self, worker: str) -> int:
        """The number of a worker's stored groups whose prompts are not decided yet."""
        with self._lock:
            every = (one for prompt in self._prompts.values() for one in prompt.parts)
            return sum(one.worker == worker for one in every)

    def arrived(self, part: S) -> None:
        """Takes a stored group. One without a known position is a prompt by itself."""
        with self._lock:
            known = part.drawn is not None and part.drawn >= 0
            position = part.drawn if known and part.drawn is not None else next(self._alone)
            prompt = self._prompts.setdefault(
                position, _Prompt(position, self._defers.get(position, 0))
            )
            prompt.parts.append(part)
            prompt.parts.sort(key=lambda one: one.part)

    def remove(self, workers: Collection[str]) -> list[S]:
        """Removes and returns what these workers stored."""
        gone: list[S] = []
        with self._lock:
            for position, prompt in list(self._prompts.items()):
                gone += [one for one in prompt.parts if one.worker in workers]
                prompt.parts = [one for one in prompt.parts if one.worker not in workers]
                if not prompt.parts:
                    del self._prompts[position]
        return gone

    def decide_all(
        self, *, version: int, waiting: int, owed: OpenParts
    ) -> tuple[list[Ready[S]], list[tuple[S, Cause]]]:
        """Decides about every prompt of which nothing is under way.

        Returns those to train on, and the groups to drop, each with its cause. ``waiting`` counts
        prompts that were decided and not yet trained on.
        """
        ready: list[Ready[S]] = []
        dropped: list[tuple[S, Cause]] = []
        with self._lock:
            pending: list[_Prompt[S]] = []
            for prompt in sorted(self._prompts.values(), key=lambda one: one.oldest):
                if prompt.queued or owed.by_position.get(prompt.position):
                    continue
                if not self._decide_one(prompt, ready, dropped):
                    pending.append(prompt)
            if pending and (len(pending) >= self.step or not owed.pilots):
                self._plan(pending, version)
                for prompt in pending:
                    self._decide_one(prompt, ready, dropped)
            full = waiting + len(ready) >= self.step
            for prompt in sorted(self._prompts.values(), key=lambda one: one.oldest):
                age = version - prompt.oldest
                if age > self.staleness or (full and age >= self.staleness):
                    self._expire(prompt, ready, dropped, late=age > self.staleness)
        return ready, dropped

    def _outcome(self, prompt: _Prompt[S]) -> PromptOutcome:
        rewards = [reward for one in prompt.parts for reward in rewards_of(one.group)]
        return PromptOutcome.of(rewards, success_at=self.rules.success_at, asked=prompt.asked)

    def _decide_one(
        self, prompt: _Prompt[S], ready: list[Ready[S]], dropped: list[tuple[S, Cause]]
    ) -> bool:
        """Decides about a prompt; False if it waits for a round of the knapsack."""
        outcome = self._outcome(prompt)
        if prompt.position < 0 or prompt.parts[0].part > 0:
            # Its pilot is settled already, or its position was given to another: no more comes.
            self._end(prompt, "train" if outcome.spread else "skip", ready, dropped)
            return True
        decision = decide(self.rules, outcome, defers=prompt.defers, planned=prompt.planned)
        if decision.verdict == "wait":
            return False
        if decision.verdict == "fill":
            prompt.queued = decision.more
        else:
            self._end(prompt, decision.verdict, ready, dropped)
        return True

    def _plan(self, pending: list[_Prompt[S]], version: int) -> None:
        """A round of the knapsack: on average a prompt gets ``rollout.group_size``."""
        rates, spent = [], [prompt.asked for prompt in pending]
        for prompt in pending:
            outcome, task = self._outcome(prompt), task_key(prompt.parts[0].group.task)
            a, b = self.posterior.beta(task, version=version)
            successes, failures = outcome.successes, outcome.finished - outcome.successes
            rates.append((a + successes) / (a + b + successes + failures))
        budget = self.group_size * len(pending) - sum(spent)
        more = divide_budget(rates, spent, budget, largest=self.most)
        for prompt, extra in zip(pending, more, strict=True):
            prompt.planned = prompt.asked + extra

    def _expire(
        self,
        prompt: _Prompt[S],
        ready: list[Ready[S]],
        dropped: list[tuple[S, Cause]],
        *,
        late: bool,
    ) -> None:
        """Ends a prompt at the last step that can train on it, or after it."""
        if self._outcome(prompt).spread:
            self._end(prompt, "partial", ready, dropped)
        elif late:
            self._prompts.pop(prompt.position)
            dropped += [(one, "stale") for one in prompt.parts]

    def _end(
        self,
        prompt: _Prompt[S],
        verdict: str,
        ready: list[Ready[S]],
        dropped: list[tuple[S, Cause]],
    ) -> None:
        self._prompts.pop(prompt.position)
        outcome, first = self._outcome(prompt), prompt.parts[0].group
        record = PromptRecord(
            position=max(-1, prompt.position),
            task=task_key(first.task),
            verdict=verdict,  # type: ignore[arg-type]
            pilot=completions_of(first),
            completions=outcome.asked,
            finished=outcome.finished,
            successes=outcome.successes,
            defers=prompt.defers,
        )
        if verdict in ("train", "partial"):
            ready.append(Ready(prompt.parts, record))
            return
        self._records.append(record)
        cause: Cause = "deferred" if verdict == "defer" else "skipped"
        dropped += [(one, cause) for one in prompt.parts]

    def take_records(self) -> list[PromptRecord]:
        """Removes and returns the records of prompts that were dropped or passed over."""
        with self._lock:
            found, self._records = self._records, []
            return found

    def commit(self, records: Collection[PromptRecord], *, version: int) -> None:
        """Learns from the records of a committed version, in the order of versions."""
        with self._lock:
            self.version = max(self.version, version)
            for one in records:
                if one.finished:
                    failures = one.finished - one.successes
                    self.posterior.observe(
                        one.task, successes=one.successes, failures=failures, version=version
                    )
                self._deferred.pop(one.position, None)
                self._defers.pop(one.position, None)
                if one.verdict == "defer" and one.position >= 0:
                    due = version + self.rules.defer_for
                    self._deferred[one.position] = due, one.defers + 1

    def resume(self, held: Collection[int]) -> None:
        """Takes deferred prompts that were granted again before a restart as such."""
        with self._lock:
            for position in set(held) & self._deferred.keys():
                self._defers[position] = self._deferred.pop(position)[1]

    def room(self, *, prompts: int, completions: int, idle: bool = False) -> int:
        """The number of groups that may be granted now, fills first, given what is outstanding.

        While workers are ``idle``, one fill is granted in any case: groups of a worker that was
        given up and came back may hold all of the limit.
        """
        count = 0
        with self._lock:
            fills = [prompt.queued for prompt in self._queue()]
        for size in fills:
            if completions + size > self.completions_limit and (count or not idle):
                return count
            completions, count = completions + size, count + 1
        by_completions = (self.completions_limit - completions) // self.first
        return count + max(0, min(self.prompts_limit - prompts, by_completions))

    def _queue(self) -> list[_Prompt[S]]:
        """Prompts whose fills wait to be granted, in the order of their oldest tokens."""
        queued = [prompt for prompt in self._prompts.values() if prompt.queued]
        return sorted(queued, key=lambda one: (one.oldest, one.position))

    def take_fill(self) -> tuple[int, int, int] | None:
        """Grants the next fill: its position, size and number of the part; None without one."""
        with self._lock:
            for prompt in self._queue():
                size, prompt.queued = prompt.queued, 0
                return prompt.position, size, prompt.parts[-1].part + 1
        return None

    def take_due(self) -> int | None:
        """Grants a pilot of the deferred prompt that is due for longest; None without one."""
        with self._lock:
            due = [(at, p) for p, (at, _) in self._deferred.items() if at <= self.version]
            if not due:
                return None
            position = min(due)[1]
            self._defers[position] = self._deferred.pop(position)[1]
            return position

    def next_position(self, position: int) -> int:
        """Returns the first position from ``position`` on that the curriculum draws."""
        if not self.rules.bands or self._task_at is None:
            return position
        with self._lock:
            for _ in range(MAX_PASSED):
                task = task_key(self._task_at(position))
                if not self.posterior.knows(task, version=self.version):
                    break
                rate = self.posterior.mean(task, version=self.version)
                if is_drawn(position, weight_of(self.rules.bands, rate), seed=self._seed):
                    break
                self._records.append(PromptRecord(position=position, task=task, verdict="pass"))
                position += 1
        return position


def completions_of(group: Group) -> int:
    """Returns how many completions a group holds, failed ones included."""
    return len(set(group.episodes))


def rewards_of(group: Group) -> list[float]:
    """Returns the reward of each completion that did not fail."""
    return list({episode: t.reward for _, episode, t in group.trained()}.values())
