"""How old a group may be when it is trained on: one object that admits, evicts and is fair.

P groups make a step, S is the configured staleness, v the committed version. A group's age is the
version trained from minus the oldest version that drew one of its tokens. Each policy states the
age `largest_age` that nothing it lets through exceeds, and why. All of them admit alike, at most
(S+1)·P groups at a time (`deltawire.rl.control.admission`); they differ in what they take from what
is finished, and in what becomes of the slow.

========================  ====================  ================================================
policy                    largest age           what is too old
========================  ====================  ================================================
`Strict`                  S                     dropped: slow tasks are trained on less
`WindowedFifo`            S + ⌈(W−1)/P⌉         waited for: slow tasks stop the rest
`Requeue`                 R, as configured      trained on later, a few a step, by what the
                                                policy before the step thinks of it
========================  ====================  ================================================
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from deltawire.config import TrainConfig
from deltawire.rl.control.admission import Admission, WorkerLoad


class Finished(Protocol):
    """A finished group: the oldest version in it, and its place in the order of granting."""

    @property
    def oldest(self) -> int:
        """The oldest version that drew one of its tokens."""
        ...

    @property
    def place(self) -> int:
        """As `StalenessPolicy.arrive` gave it."""
        ...


F = TypeVar("F", bound=Finished)


@dataclass(frozen=True)
class Choice(Generic[F]):
    """What becomes of the finished groups: ``taken`` make the next step, or are empty if there are
    too few; ``evicted`` are never trained on; ``requeued`` wait behind the others, without a claim
    on a credit; the rest waits on."""

    taken: list[F] = field(default_factory=list)
    evicted: list[F] = field(default_factory=list)
    requeued: list[F] = field(default_factory=list)


class StalenessPolicy(ABC):
    """Admission, choice and eviction. `admit` and the rest may be called from two threads."""

    largest_age: int
    """No group older than this is ever trained on."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.largest_age = max_staleness
        self._admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness)

    @property
    def limit(self) -> int:
        """How many groups may be outstanding."""
        return self._admission.limit

    def admit(self, workers: Mapping[str, WorkerLoad], *, version: int) -> dict[str, int]:
        """New cumulative credits for every worker, granted at a committed version."""
        del version
        return self._admission.grant(workers)

    def arrive(self, worker: str, oldest: int | None) -> int:
        """The place of a group that was stored; ``oldest`` None if it is not known. Called once for
        each stored group, whatever becomes of it."""
        del worker, oldest
        return 0

    def forget(self, worker: str) -> None:
        """A worker that is gone for good, as far as anybody knows, is not shown to `admit` again
        before it is back; its credits are void."""
        del worker

    @abstractmethod
    def choose(
        self,
        waiting: Sequence[F],
        requeued: Sequence[F],
        *,
        version: int,
        alive: Collection[str],
    ) -> Choice[F]:
        """What a step from ``version`` takes. ``requeued`` are those of earlier choices, in order;
        ``alive`` names the workers from whom more may come."""


class Strict(StalenessPolicy):
    """The oldest first; what is older than S is dropped. (The aggregate gate.)

    Bound: by enforcement. Drops are rare because admission bounds the aggregate: if groups finished
    in the order of granting, less than (S+1)·P would be ahead of any one, which are at most S steps
    (`deltawire.rl.control.admission`). One that takes longer than S steps is dropped, so a task
    that always does is never trained on. With S = 0 sampling and training alternate.
    """

    def choose(
        self,
        waiting: Sequence[F],
        requeued: Sequence[F],
        *,
        version: int,
        alive: Collection[str],
    ) -> Choice[F]:
        """The P oldest; every one older than S is evicted."""
        del requeued, alive
        old = [group for group in waiting if version - group.oldest > self.max_staleness]
        fresh = [group for group in waiting if version - group.oldest <= self.max_staleness]
        if len(fresh) < self.groups_per_step:
            return Choice(evicted=old)
        fresh.sort(key=lambda group: group.oldest)
        return Choice(taken=fresh[: self.groups_per_step], evicted=old)


@dataclass
class _Grant:
    """One credit: its place in the order of granting, and the version committed then."""

    place: int
    version: int


class WindowedFifo(StalenessPolicy):
    """In the order of granting, but for a window: a finished group may overtake unfinished ones
    only while fewer than W places lie between it and the first that is outstanding.

    Bound. Let g be granted at version v. Less than (S+1)·P others are outstanding then, and only
    they are ahead of g. Of those granted after g, a step can take only such as lie less than W
    places behind the first outstanding one, which is g or one ahead of g: fewer than W. So at most
    (S+1)·P − 1 + W − 1 groups are taken before g, and g is in step number
    ⌊((S+1)·P + W − 2) / P⌋ after v or an earlier one: its age is at most S + ⌈(W − 1) / P⌉. For
    W = 1 that is S, strictly in order. Nothing is dropped; a straggler stops the trainer instead,
    so episodes must have limits of time.

    Workers name no credit with a group, so a group is booked against the newest of its worker's
    credits that were granted at or before its oldest version. Those left over are then older than,
    or as old as, what is really unfinished, and the window errs to the narrow side.

    Who is no longer alive is not waited for. Who comes back takes up old credits, and a trainer
    that resumes no longer knows the order among those outstanding: in both cases a group may be
    overtaken by more than W; whatever then exceeds the bound is evicted. Source: the windowed FIFO
    of MiniMax (Forge, 2026), as also in TitanRL and NeMo-RL.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, *, share: float) -> None:
        super().__init__(groups_per_step, max_staleness)
        self.window = window_of(groups_per_step, max_staleness, share)
        self.largest_age = max_staleness + -(-(self.window - 1) // groups_per_step)
        self._open: dict[str, list[_Grant]] = {}
        self._granted: dict[str, int] = {}
        self._places = 0
        self._lock = threading.Lock()

    def admit(self, workers: Mapping[str, WorkerLoad], *, version: int) -> dict[str, int]:
        """As every policy; and note the order of what is granted."""
        granted = super().admit(workers, version=version)
        with self._lock:
            # What another trainer granted before this one is outstanding too, since long ago.
            for name in sorted(workers.keys() - self._granted.keys()):
                self._granted[name] = workers[name].stored
                self._note(name, workers[name].granted - workers[name].stored, 0)
            for name, load in sorted(workers.items()):
                self._note(name, granted[name] - max(load.granted, self._granted[name]), version)
                self._granted[name] = granted[name]
        return granted

    def forget(self, worker: str) -> None:
        """Nor is anything of it outstanding."""
        with self._lock:
            self._open.pop(worker, None)
            self._granted.pop(worker, None)

    def _note(self, worker: str, count: int, version: int) -> None:
        for _ in range(count):
            self._open.setdefault(worker, []).append(_Grant(self._places, version))
            self._places += 1

    def arrive(self, worker: str, oldest: int | None) -> int:
        """Book it against the newest credit that was granted at or before its oldest version; it
        comes first of all if there is none."""
        with self._lock:
            grants = self._open.get(worker, [])
            fitting = [n for n, g in enumerate(grants) if oldest is None or g.version <= oldest]
            if not grants:
                return -1
            return grants.pop(fitting[-1] if fitting else 0).place

    def choose(
        self,
        waiting: Sequence[F],
        requeued: Sequence[F],
        *,
        version: int,
        alive: Collection[str],
    ) -> Choice[F]:
        """The first P that the window lets through, or none."""
        del requeued
        evicted = [group for group in waiting if version - group.oldest > self.largest_age]
        left = sorted(
            (group for group in waiting if version - group.oldest <= self.largest_age),
            key=lambda group: group.place,
        )
        with self._lock:
            first = min((g.place for name in alive for g in self._open.get(name, [])), default=None)
        # Whatever is taken is the first of what is finished, so the head is either that itself or
        # the first that is unfinished.
        passing = [g for g in left if first is None or g.place < first + self.window]
        taken = passing[: self.groups_per_step]
        return Choice(taken if len(taken) == self.groups_per_step else [], evicted)


class Requeue(StalenessPolicy):
    """What is older than S waits behind the others and is trained on by and by, with its
    log-probabilities recomputed: the ratio is against the policy before the step, and the way from
    the sampler is left to the corrections of the loss, which must therefore have some.

    Each step takes the q = max(1, ⌊share·P⌋) requeued groups that have waited longest, and the rest
    from the fresh ones, oldest first. A requeued group gives its credit back.

    Bound: a group that is requeued with k ahead of it is taken k // q steps later, for every step
    takes q as long as any wait. It is kept only if its age will then be at most R, and evicted at
    once if not; so no age exceeds R, a group that was kept is never evicted later, and at most
    q·(R − S) wait. Fairness: whatever its length, a task whose groups arrive at age a is trained
    on as long as fewer than q·(R − a + 1) wait.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, *, share: float, largest_age: int
    ) -> None:
        super().__init__(groups_per_step, max_staleness)
        self.largest_age = largest_age
        self.share = max(1, int(share * groups_per_step))

    def choose(
        self,
        waiting: Sequence[F],
        requeued: Sequence[F],
        *,
        version: int,
        alive: Collection[str],
    ) -> Choice[F]:
        """At most q that were requeued, and the oldest of the fresh."""
        del alive
        fresh = [group for group in waiting if version - group.oldest <= self.max_staleness]
        joining = [group for group in waiting if version - group.oldest > self.max_staleness]
        queue: list[F] = []
        evicted: list[F] = []
        for group in [*requeued, *sorted(joining, key=lambda group: group.oldest)]:
            steps = len(queue) // self.share
            fits = version + steps - group.oldest <= self.largest_age
            (queue if fits else evicted).append(group)
        old = queue[: self.share]
        fresh.sort(key=lambda group: group.oldest)
        taken = [*old, *fresh[: self.groups_per_step - len(old)]]
        if len(taken) < self.groups_per_step:
            return Choice(evicted=evicted, requeued=queue)
        return Choice(taken, evicted, queue[len(old) :])


def window_of(groups_per_step: int, max_staleness: int, share: float) -> int:
    """W = max(1, ⌊share · (S+1)·P⌋)."""
    return max(1, int(share * (max_staleness + 1) * groups_per_step))


def policy_of(train: TrainConfig) -> StalenessPolicy:
    """The policy that a configuration names."""
    count, bound, settings = train.groups_per_step, train.max_staleness, train.staleness
    match settings.policy:
        case "strict":
            return Strict(count, bound)
        case "windowed_fifo":
            return WindowedFifo(count, bound, share=settings.window)
        case "requeue":
            return Requeue(
                count, bound, share=settings.requeue_share, largest_age=train.largest_age
            )
