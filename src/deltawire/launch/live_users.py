"""Forgets, readmits and exports a user of a deployment, by the name that requests gave."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deltawire.errors import InputError
from deltawire.launch.branches.fork_copy import KnownFork
from deltawire.launch.fork_erasure import ForkErasure, forget_in_forks, forks_trained_on
from deltawire.launch.live_secret import SecretPlace
from deltawire.launch.role_keys import read_signer
from deltawire.live.capture.names import normalize_name
from deltawire.live.deployment_secret import DeploymentSecret
from deltawire.live.erasure.coverage import require_coverage
from deltawire.live.erasure.exporting import export_user
from deltawire.live.erasure.forgetting import GroupsNeededError, forget_pseudonyms
from deltawire.live.erasure.rebuilding import Rebuild, check_rebuildable, rebuild_without
from deltawire.live.forgotten import forgotten_users, readmitted_users
from deltawire.runtime.process import beats
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.keys import valid_name
from deltawire.wire.lineage import Forgotten
from deltawire.wire.live_secret import Readmitted
from deltawire.wire.objects import encode_json
from deltawire.wire.roles import GATEWAY_ROLE, worker_role
from deltawire.wire.run import Run

OldVersions = Literal["none", "kept", "unknown"]


@dataclass(frozen=True, kw_only=True)
class UserOptions:
    """The place of the secret, the key of the gateway role in a signed run, and gateways to leave
    out because their key is lost."""

    trust: ReaderTrust = ANY
    key: str = ""
    secret: str = ""
    without: Sequence[str] = ()


@dataclass(frozen=True)
class _Deployment:
    bucket: Bucket
    run: Run
    place: SecretPlace
    secret: DeploymentSecret
    name: str

    @classmethod
    def open(cls, location: str, name: str, options: UserOptions, *, writes: bool) -> _Deployment:
        """Opens a deployment's bucket; ``-`` reads the name from standard input. Raises
        `InputError` without a name or the secret, and if a gateway is not covered."""
        name = sys.stdin.readline() if name == "-" else name
        if not normalize_name(name):
            raise InputError("the user has no name")
        signer = read_signer(options.key)
        bucket = open_trusted(location, options.trust, signer=signer, role=GATEWAY_ROLE)
        if writes:
            bucket.check_writer()
        run = read_run(bucket)
        place = SecretPlace.of(options.secret, run)
        secret = place.read(bucket, run)
        require_coverage(bucket, secret, without=options.without)
        return cls(bucket, run, place, secret, name)

    def again(self) -> _Deployment:
        """Returns the deployment with its secret as it is now."""
        return replace(self, secret=self.place.read(self.bucket, self.run))

    def lives(self) -> list[list[str]]:
        return self.secret.lives(self.name, readmitted_users(self.bucket))

    def pseudonyms(self) -> list[str]:
        """All pseudonyms of the user, that of the generation in use first."""
        current = self.secret.current.pseudonyms.lives(
            normalize_name(self.name), readmitted_users(self.bucket)
        )
        every = [user for lives in self.lives() for user in lives]
        return list(dict.fromkeys([current[-1], *every]))


@dataclass(frozen=True)
class Erasure:
    """The outcome of an erasure. ``known`` says whether the bucket, forks in it included, ever held
    anything of the user; ``old_versions`` whether the store keeps what was deleted, as far as it
    can be told. ``forks`` are the forks, and theirs, that began with weights which were trained on
    the user, and ``in_forks`` what was deleted in forks in the same bucket."""

    record: Forgotten
    pseudonyms: Sequence[str]
    known: bool
    old_versions: OldVersions
    rebuild: Rebuild | None = None
    forks: Sequence[KnownFork] = ()
    in_forks: Sequence[ForkErasure] = ()

    @property
    def unfinished(self) -> bool:
        """Returns whether a fork still holds the user, or weights that were trained on the user
        which it began with."""
        return bool(self.forks) or any(one.failure for one in self.in_forks)


def forget_by_name(
    location: str,
    name: str,
    options: UserOptions,
    *,
    learner_keys: Sequence[str] = (),
    no_learners: Sequence[str] = (),
    no_trainer: bool = False,
    rebuild: bool = False,
) -> Erasure:
    """Deletes what a run's bucket, and forks in it, hold of a user under the pseudonyms of all
    generations.

    ``learner_keys`` are ``NAME=FILE``, those of learners of a signed run, and ``no_learners`` the
    workers whose lineages are forged. With ``no_trainer`` no trainer will go on with the run or its
    forks, so groups that one would need are deleted too, but not in forks whose trainer is alive.
    With ``rebuild`` the versions that were trained on the user are withdrawn too. Raises
    `InputError`, before anything is changed, without the secret, if a gateway's pseudonyms do not
    follow from it, without keys that replaced objects need, and for ``no_trainer`` while the run's
    trainer is alive.
    """
    if wrong := [worker for worker in no_learners if not valid_name(worker)]:
        raise InputError(f"{wrong[0][:80]!r} is not the name of a worker")
    at = _Deployment.open(location, name, options, writes=True)
    bucket, run = at.bucket, at.run
    if no_trainer and beats(bucket, "trainer"):
        raise InputError(
            "--no-trainer deletes groups that a trainer needs, and this run's trainer is alive",
            hint="leave the option out and repeat the command after its next checkpoint, or stop "
            "the trainer for good first",
            run=bucket.url,
        )
    if rebuild:
        check_rebuildable(bucket, run)
    learners = _learner_buckets(location, options.trust, learner_keys) if run.public_key else None

    def decide(record: Forgotten) -> Rebuild | None:
        if not rebuild:
            return None
        versions = record.versions
        return rebuild_without(bucket, run, versions, by=getpass.getuser(), now=time.time())

    users: list[str] = []
    while True:
        users += [user for user in at.pseudonyms() if user not in users]
        try:
            record = forget_pseudonyms(
                bucket,
                run,
                users,
                learners=learners,
                no_learners=no_learners,
                no_trainer=no_trainer,
            )
        except GroupsNeededError as error:
            decide(error.record)  # The versions are withdrawn now, although groups stay a while.
            forget_in_forks(bucket, users)
            raise
        at = at.again()  # A rotation or a readmission meanwhile made further pseudonyms.
        if set(at.pseudonyms()) <= set(users):
            break
    kept = old_versions(bucket, keys.live_forgotten(users[0]))
    rebuilt = decide(record)
    in_forks = forget_in_forks(bucket, users, no_trainer=no_trainer)
    known = bool(record.answers or record.feedback or record.groups)
    known = known or any(one.known for one in in_forks)
    every = [*forks_trained_on(bucket, record), *(fork for one in in_forks for fork in one.forks)]
    forks = list({fork.url: fork for fork in reversed(every)}.values())[::-1]
    return Erasure(record, users, known, kept, rebuilt, forks, in_forks)


def old_versions(bucket: Bucket, key: str) -> OldVersions:
    """Returns whether the store keeps what is replaced or deleted, by an object that was just
    stored: S3 and Azure state an id of its version if they do.

    Google's store states one in any case, and a folder may lie on a file system with snapshots that
    do not show here. Soft deletion and backups show nowhere.
    """
    found = bucket.head(key)
    if found is None or bucket.url.startswith("gs://"):
        return "unknown"
    return "kept" if found.version else "none"


def readmit_by_name(location: str, name: str, options: UserOptions) -> list[str]:
    """Lets a user who was forgotten be stored again, under new pseudonyms; returns the old ones.

    Rows that wait under an old one in a spool stay forgotten. Raises `InputError` if the user is
    not forgotten. If it is interrupted, the user is not stored yet, and the same call continues.
    """
    at = _Deployment.open(location, name, options, writes=True)
    gone = forgotten_users(at.bucket)
    old = sorted({lives[-1] for lives in at.lives() if lives[-1] in gone})
    if not old:
        raise InputError(
            "no user of this name is forgotten",
            hint="check the spelling: it must be the name that requests give",
            run=at.bucket.url,
        )
    record = encode_json(Readmitted(run=at.run.id, at=time.time()))
    for user in old:
        at.bucket.create(keys.live_readmitted(user), record)
    return old


def export_by_name(location: str, name: str, options: UserOptions) -> Iterator[dict[str, Any]]:
    """Yields all that is stored of a user, as `export_user` does; it changes nothing."""
    at = _Deployment.open(location, name, options, writes=False)
    return export_user(at.bucket, at.pseudonyms())


def _learner_buckets(
    location: str, trust: ReaderTrust, learner_keys: Sequence[str]
) -> dict[str, Bucket]:
    """Opens a signed run's bucket once for each learner's key, ``NAME=FILE``."""
    found: dict[str, Bucket] = {}
    for text in learner_keys:
        name, _, file = text.partition("=")
        if not (valid_name(name) and file):
            raise InputError(
                f"--learner-key {text[:80]!r} is not NAME=FILE",
                hint="NAME is the --id of the learner, FILE its private key",
            )
        bucket = open_trusted(location, trust, signer=read_signer(file), role=worker_role(name))
        bucket.check_writer()
        found[name] = bucket
    return found
