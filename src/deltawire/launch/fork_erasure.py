"""Erases a user in the forks of a run that lie in its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltawire.errors import DeltawireError
from deltawire.launch.branches.fork_copy import KnownFork
from deltawire.launch.branches.fork_places import fork_names, forks_from, open_fork
from deltawire.live.erasure.forgetting import GroupsNeededError, forget_pseudonyms
from deltawire.runtime.process import beats
from deltawire.store import Bucket
from deltawire.sync import find_run
from deltawire.wire.lineage import Forgotten


class ForkErasure(NamedTuple):
    """The erasure in one fork: ``versions`` were trained on the user there, and ``forks`` began
    with them. ``failure`` says why it is not done."""

    url: str
    answers: int = 0
    feedback: int = 0
    groups: int = 0
    versions: Sequence[int] = ()
    forks: Sequence[KnownFork] = ()
    failure: str = ""

    @property
    def known(self) -> bool:
        """True if the fork ever held anything of the user."""
        return bool(self.answers or self.feedback or self.groups)


def forget_in_forks(
    bucket: Bucket, users: Sequence[str], *, no_trainer: bool = False
) -> list[ForkErasure]:
    """Deletes what the forks of a run, and theirs, hold of a user with these pseudonyms. Each keeps
    a record, so that its gateways and learners store nothing of the user. With ``no_trainer`` no
    trainer will go on with those whose trainer is not alive."""
    found = []
    for name in fork_names(bucket):
        fork = open_fork(bucket, name)
        ended = no_trainer and not beats(fork, "trainer")
        found.append(_forget_in(fork, users, no_trainer=ended))
        found += forget_in_forks(fork, users, no_trainer=no_trainer)
    return found


def _forget_in(fork: Bucket, users: Sequence[str], *, no_trainer: bool) -> ForkErasure:
    failure = ""
    try:
        run = find_run(fork)
        if run is None:  # It is not finished, and holds nothing of users.
            return ForkErasure(fork.url)
        record = forget_pseudonyms(fork, run, users, no_trainer=no_trainer)
    except GroupsNeededError as error:
        record, failure = error.record, error.message
    except DeltawireError as error:
        return ForkErasure(fork.url, failure=error.message)
    return ForkErasure(
        fork.url,
        record.answers,
        record.feedback,
        len(record.groups),
        record.versions,
        forks_trained_on(fork, record),
        failure,
    )


def forks_trained_on(bucket: Bucket, record: Forgotten) -> list[KnownFork]:
    """Returns the forks that began with versions of a run that were trained on the user."""
    return forks_from(bucket, min(record.versions)) if record.versions else []
