"""Erases a user in the forks of a run that lie in its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltawire.errors import DeltawireError
from deltawire.launch.branches.fork_places import fork_names, open_fork
from deltawire.live.erasure.forgetting import forget_pseudonyms
from deltawire.store import Bucket, RetryingBucket
from deltawire.sync import find_run


class ForkErasure(NamedTuple):
    """The erasure in one fork: ``versions`` were trained on the user there. ``failure`` says why it
    is not done."""

    url: str
    answers: int = 0
    groups: int = 0
    versions: Sequence[int] = ()
    failure: str = ""


def forget_in_forks(bucket: Bucket, users: Sequence[str]) -> list[ForkErasure]:
    """Deletes what the forks of a run, and theirs, hold of a user with these pseudonyms. Each keeps
    a record, so that its gateways and learners store nothing of the user."""
    found = []
    for name in fork_names(bucket):
        fork = RetryingBucket.over(open_fork(bucket, name))
        found.append(_forget_in(fork, users))
        found += forget_in_forks(fork, users)
    return found


def _forget_in(fork: Bucket, users: Sequence[str]) -> ForkErasure:
    try:
        run = find_run(fork)
        if run is None:  # It is not finished, and holds nothing of users.
            return ForkErasure(fork.url)
        record = forget_pseudonyms(fork, run, users)
    except DeltawireError as error:
        return ForkErasure(fork.url, failure=error.message)
    return ForkErasure(fork.url, record.answers, len(record.groups), record.versions)
