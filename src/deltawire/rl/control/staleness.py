"""Staleness policies: choose the groups of each step and bound their age.

P groups make a step, S is the configured staleness, v the committed version. A group's age is the
version trained from minus the oldest version that sampled one of its tokens. Each policy states and
derives ``largest_age``, which no group that it lets through exceeds. All policies admit alike, at
most (S+1)·P groups at a time (`deltawire.rl.control.admission`); they differ in the order in which
they take finished groups, and in the treatment of slow ones.

========================  ====================  ================================================
policy                    largest age           groups that are too old
========================  ====================  ================================================
`Strict`                  S                     dropped: slow tasks are trained on less
`WindowedFifo`            S + ⌈(W−1)/P⌉         waited for: slow tasks delay the others
`Requeue`                 R, as configured      trained on later, a few a step, relative to
                                                the policy before the step
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
        """The oldest version that sampled one of its tokens."""
        ...

    @property
    def place(self) -> int:
        """As `StalenessPolicy.arrive` gave it."""
        ...


F = TypeVar("F", bound=Finished)


@dataclass(frozen=True)
class Choice(Generic[F]):
    """The decision about finished groups.

    ``taken`` make the next step, or are empty if there are too few. ``evicted`` are never trained
    on. ``requeued`` wait after the others and hold no credit. All others continue to wait.
    """

    taken: list[F] = field(default_factory=list)
    evicted: list[F] = field(default_factory=list)
    requeued: list[F] = field(default_factory=list)


class StalenessPolicy(ABC):
    """Admits, chooses and evicts groups; `admit` may be called from another thread."""

    largest_age: int
    """No group older than this is ever trained on."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.largest_age = max_staleness
        self._admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness)

    @property
    def limit(self) -> int:
        """The largest number of outstanding groups."""
        return self._admission.limit

    def share_credits(self, share: float) -> None:
        """Lets one of several workers hold at most this share of the outstanding groups."""
        self._admission.share = share

    def hold_parts(self, parts: int) -> None:
        """Lets a prompt be up to ``parts`` groups (`deltawire.rl.allocation.allocator`)."""
        self._admission.limit *= parts

    def admit(
        self, workers: Mapping[str, WorkerLoad], *, version: int, free: int | None = None
    ) -> dict[str, int]:
        """Computes new cumulative credits for every worker, granted at a committed version.

        ``free`` is the number of groups to grant, where allocation decides it.
        """
        del version
        return self._admission.grant(workers, free=free)

    def arrive(self, worker: str, oldest: int | None) -> int:
        """Returns the place of a stored group; ``oldest`` is None if it is not known.

        Called once for each stored group, whether or not it is trained on.
        """
        del worker, oldest
        return 0

    def forget(self, worker: str) -> None:
        """Drops the credits of a worker that has left; `admit` sees it again only if it returns."""
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
        """Chooses the groups of a step from ``version``.

        ``requeued`` are those of earlier choices, in order; ``alive`` names the workers from which
        more groups may come.
        """


class Strict(StalenessPolicy):
    """Takes the oldest groups first and drops those older than S.

    Bound: by enforcement. Drops are rare because admission bounds the aggregate: if groups finished
    in the order of granting, fewer than (S+1)·P would be ahead of any one, which are at most S
    steps (`deltawire.rl.control.admission`). A group that takes longer than S steps is dropped, so
    a task that always does is never trained on. With S = 0 sampling and training alternate.
    """

    def choose(
        self,
        waiting: Sequence[F],
        requeued: Sequence[F],
        *,
        version: int,
        alive: Collection[str],
    ) -> Choice[F]:
        """Takes the P oldest; evict every group older than S."""
        del requeued, alive
        old = [group for group in waiting if version - group.oldest > self.max_staleness]
        fresh = [group for group in waiting if version - group.oldest <= self.max_staleness]
        if len(fresh) < self.groups_per_step:
            return Choice(evicted=old)
        fresh.sort(key=lambda group: group.oldest)
        return Choice(taken=fresh[: self.groups_per_step], evicted=old)


@dataclass
class _Grant:
    """One credit: its place in the order of granting, and the version that was committed then."""

    place: int
    version: int


class WindowedFifo(StalenessPolicy):
    """Takes groups in the order of granting, except within a window of W places.

    A finished group may overtake unfinished ones only while fewer than W places lie between it and
    the first outstanding one.

    Bound. Let g be granted at version v. Less than (S+1)·P others are outstanding then, and only
    they are ahead of g. Of those granted after g, a step can take only such as lie less than W
    places after the first outstanding one, which is g or one ahead of g: fewer than W. So at most
    (S+1)·P − 1 + W − 1 groups are taken before g, and g is in step number
    ⌊((S+1)·P + W − 2) / P⌋ after v or an earlier one: its age is at most S + ⌈(W − 1) / P⌉. For
    W = 1 that is S, strictly in order. Nothing is dropped; a straggler stops the trainer instead,
    so episodes must have time limits.

    A group does not name its credit, so it is assigned the newest of its worker's credits that were
    granted at or before its oldest version. The remaining credits are then as old as the groups
    that are really unfinished, or older, and the window errs on the narrow side.

    Workers that are not alive are not waited for. A worker that returns uses old credits, and a
    resumed trainer does not know the order of outstanding credits: in both cases a group may be
    overtaken by more than W, and groups that then exceed the bound are evicted. Source: the
    windowed FIFO of MiniMax (Forge, 2026), as also in TitanRL and NeMo-RL.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, *, share: float) -> None:
        super().__init__(groups_per_step, max_staleness)
        self.window = window_of(groups_per_step, max_staleness, share)
        self.largest_age = max_staleness + -(-(self.window - 1) // groups_per_step)
        self._open: dict[str, list[_Grant]] = {}
        self._granted: dict[str, int] = {}
        self._places = 0
        self._lock = threading.Lock()

    def admit(
        self, workers: Mapping[str, WorkerLoad], *, version: int, free: int | None = None
    ) -> dict[str, int]:
        """Grants like every policy, and records the order of granting."""
        granted = super().admit(workers, version=version, free=free)
        with self._lock:
            # Credits of an earlier trainer are outstanding too, at the oldest places.
            for name in sorted(workers.keys() - self._granted.keys()):
                self._granted[name] = workers[name].stored
                self._record(name, workers[name].granted - workers[name].stored, 0)
            for name, load in sorted(workers.items()):
                self._record(name, granted[name] - max(load.granted, self._granted[name]), version)
                self._granted[name] = granted[name]
        return granted

    def forget(self, worker: str) -> None:
        """Drops the worker's credits and its outstanding places."""
        with self._lock:
            self._open.pop(worker, None)
            self._granted.pop(worker, None)

    def _record(self, worker: str, count: int, version: int) -> None:
        for _ in range(count):
            self._open.setdefault(worker, []).append(_Grant(self._places, version))
            self._places += 1

    def arrive(self, worker: str, oldest: int | None) -> int:
        """Assigns the newest credit granted at or before its oldest version, else place -1."""
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
        """Takes the first P groups that the window lets through, or none."""
        del requeued
        evicted = [group for group in waiting if version - group.oldest > self.largest_age]
        left = sorted(
            (group for group in waiting if version - group.oldest <= self.largest_age),
            key=lambda group: group.place,
        )
        with self._lock:
            first = min((g.place for name in alive for g in self._open.get(name, [])), default=None)
        # Groups are taken from the first finished one on, so the head is either that one or the
        # first unfinished one.
        passing = [g for g in left if first is None or g.place < first + self.window]
        taken = passing[: self.groups_per_step]
        return Choice(taken if len(taken) == self.groups_per_step else [], evicted)


class Requeue(StalenessPolicy):
    """Queues groups older than S and trains on them later, a few per step.

    Their log-probabilities are recomputed: the ratio is relative to the policy before the step, and
    the difference to the sampler is left to the corrections of the loss, which must have some.

    Each step takes the q = max(1, ⌊share·P⌋) requeued groups that have waited longest, and the
    others from the fresh ones, oldest first. A requeued group returns its credit.

    Bound: a group that is requeued with k ahead of it is taken k // q steps later, because every
    step takes q while any wait. It is kept only if its age will then be at most R, and evicted at
    once otherwise. So no age exceeds R, a group that was kept is never evicted later, and at most
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
        """Takes at most q requeued groups, and the oldest of the fresh ones."""
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
    """Computes W = max(1, ⌊share · (S+1)·P⌋)."""
    return max(1, int(share * (max_staleness + 1) * groups_per_step))


def policy_of(train: TrainConfig) -> StalenessPolicy:
    """Makes the policy that a configuration names."""
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
