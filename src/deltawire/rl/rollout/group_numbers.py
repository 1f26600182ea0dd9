"""Says which groups a worker starts: the number of the next one, and the task of each."""

from __future__ import annotations

from typing import NamedTuple

from deltawire.rl.control.challenges import stream_of
from deltawire.rl.control.draws import RUN_STREAM
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.process import Process
from deltawire.wire import keys
from deltawire.wire.status import TrainerStatus

MAX_UNGRANTED = 1 << 16
"""A generous bound on the groups that a predecessor stored after its last heartbeat."""


class GroupDraw(NamedTuple):
    """The task of a group: its stream and the position in it, and the number of completions (0:
    ``rollout.group_size``)."""

    stream: str
    position: int
    size: int = 0


def draw_of(
    status: TrainerStatus,
    worker: str,
    lease: int,
    number: int,
    secret: str,
    *,
    nonce: str,
    size: int = 0,
) -> GroupDraw | None:
    """Returns the task of the ``number``-th group that ``worker`` starts under a lease; None while
    the trainer has not said which task that is. ``size`` is that of a group which the trainer does
    not draw."""
    if status.draws is None or not secret:
        # A trainer that gives no secret leaves nonce and tasks to the worker.
        stream = stream_of(worker, secret, lease) if secret else f"{worker}-{nonce}"
        return GroupDraw(stream, number, size)
    for one in status.draws.get(worker, []):
        if one.lease == lease and number in one.numbers:
            at = one.numbers.index(number)
            return GroupDraw(RUN_STREAM, one.positions[at], one.sizes[at] if one.sizes else 0)
    return None


def allowed_lag(max_staleness: int) -> int:
    """Returns how many versions behind the trainer a worker may be when it starts a group.

    The group's age when it is trained on is this lag, plus the versions that pass while it is
    sampled and while it waits. The lag may use half of the bound. With a bound of 0 or 1 only the
    newest version will do; with more, a worker whose link is slower than the publisher contributes.
    """
    return max_staleness // 2


def next_sequence(process: Process) -> int:
    """The number of the next group that a worker stores.

    Groups may have been deleted, so they are not counted: it is the number after the last one that
    is stored, or the one that the predecessor's last heartbeat names, if that is more. Numbers that
    the trainer has not granted were not stored by a worker, nor named by one; where it has granted
    none, numbers far beyond the predecessor's do not count.
    """
    status = known_trainer(process.bucket)
    granted = status.credits.get(process.name) if status is not None else None
    before = process.heartbeat.predecessor
    claimed = before.worker.stored if before is not None and before.worker is not None else 0
    largest = max(claimed, 0) + MAX_UNGRANTED if granted is None else granted
    first = claimed if 0 < claimed <= largest else 0
    # Lower numbers change nothing, and there may be very many.
    after = keys.rollout(process.name, first - 1) if first else None
    found = process.bucket.list(keys.rollouts_of(process.name), after=after)
    numbers = [group[1] + 1 for key in found if (group := keys.group_of(key)) is not None]
    return max([first, *(n for n in numbers if n <= largest)])
