"""Creates, rotates and reads the secret of a deployment of gateways.

The secret is written before its fingerprint is created in the bucket, and nothing uses a generation
without a fingerprint. So each command may be interrupted anywhere and repeated, and of two that run
at once one succeeds and the other changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.launch.role_keys import read_signer
from deltawire.live.deployment_secret import (
    MAX_SECRET_CHARACTERS,
    DeploymentSecret,
    Generation,
    current_generation,
    parse_secret,
    read_generations,
    secret_text,
)
from deltawire.private_files import open_private, private_folder, replace_private
from deltawire.runtime.highest_version import state_folder
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, GatewayState
from deltawire.wire.live_secret import MAX_GENERATIONS, GenerationRecord
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.roles import GATEWAY_ROLE
from deltawire.wire.run import Run

SECRET_VARIABLE = "DELTAWIRE_LIVE_SECRET"  # noqa: S105 - the name of a variable
SEEN_WITHIN_S = 60.0
"""A gateway whose state is older than this does not run, and reads the secret when it starts."""
ASK_EVERY_S = 1.0


@dataclass(frozen=True)
class SecretPlace:
    """Where the secret is: the file ``path``, or `SECRET_VARIABLE` if it is None.

    Example::

        secret = SecretPlace.of("", run).read(bucket, run)
    """

    path: Path | None

    @classmethod
    def of(cls, path: str, run: Run) -> SecretPlace:
        """Returns the place that an operator named; without one the variable, and if that is not
        set, the run's file below the state folder of this machine's user."""
        if path:
            return cls(Path(path))
        if os.environ.get(SECRET_VARIABLE):
            return cls(None)
        return cls(state_folder().parent / "live" / f"{run.id}.secret")

    def __str__(self) -> str:
        return f"the variable {SECRET_VARIABLE}" if self.path is None else str(self.path)

    def generations(self) -> list[Generation]:
        """Returns what the place holds; empty if the file does not exist. Raises `InputError`."""
        if self.path is None:
            return parse_secret(os.environ.get(SECRET_VARIABLE, ""), place=str(self))
        try:
            with self.path.open("rb") as file:
                text = file.read(MAX_SECRET_CHARACTERS + 1).decode("ascii", "replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(
                f"cannot read the secret in {self.path}: {error.strerror or error}"
            ) from error
        return parse_secret(text, place=str(self))

    def write(self, generations: Sequence[Generation], *, new: bool) -> None:
        """Replaces the file, or makes it if ``new``; raises `InputError` if it cannot, or if it is
        to be new and exists."""
        if self.path is None:
            raise InputError(
                f"the secret is in {SECRET_VARIABLE}, which this command cannot change",
                hint="name a file with --secret, and put its text into the variable afterwards",
            )
        data = secret_text(generations).encode()
        if not new:
            replace_private(self.path, data)
            return
        staged = self.path.with_name(f".{self.path.name}.{os.urandom(8).hex()}")
        replace_private(staged, data)
        try:
            os.link(staged, self.path)  # Whole or not at all, and never over another secret.
        except OSError as error:
            raise InputError(f"cannot make {self.path}: {error.strerror or error}") from error
        finally:
            staged.unlink(missing_ok=True)

    def read(self, bucket: Bucket, run: Run) -> DeploymentSecret:
        """Returns the deployment's secret; raises `InputError` if it is missing or another one."""
        generations = self.generations()
        if not generations:
            raise InputError(
                f"the secret of this deployment is not in {self}",
                hint="make it once with deltawire live secret create RUN; on other machines give "
                f"a copy of the file with --secret, or put its text into {SECRET_VARIABLE}",
                run=bucket.url,
            )
        return DeploymentSecret(generations, bucket, run.id)


@contextmanager
def _changing(place: SecretPlace) -> Iterator[None]:
    """Holds the right to change a secret's file; raises `InputError` if another process does."""
    if place.path is None:
        place.write([], new=True)
        return
    if not place.path.parent.exists():
        private_folder(place.path.parent)
    try:
        descriptor = open_private(
            place.path.with_name(f"{place.path.name}.lock"), os.O_RDWR | os.O_CREAT
        )
    except OSError as error:
        raise InputError(f"cannot change {place}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another process changes {place}", hint="wait for it") from error
        yield
    finally:
        os.close(descriptor)


def adopted_generations(key_files: Iterable[str]) -> list[Generation]:
    """Returns what gateways without a secret derived from the private keys in these files."""
    signers = (read_signer(path) for path in key_files)
    return [Generation.adopt(one) for one in signers if one is not None]


def create_secret(
    bucket: Bucket, run: Run, place: SecretPlace, *, adopt: Sequence[Generation] = ()
) -> DeploymentSecret:
    """Makes the deployment's secret unless there is one at ``place``, adds the generations to
    ``adopt``, and names all in the bucket.

    Raises `InputError`, without a change, if the deployment has another secret.
    """
    with _changing(place):
        held = place.generations()
        used = current_generation(read_generations(bucket, run.id))
        if used is not None:
            if not held:
                place.read(bucket, run)
            DeploymentSecret([*held, *adopt], bucket, run.id)
        known = {one.fingerprint for one in held}
        missing = [one for one in adopt if one.fingerprint not in known]
        made = not held
        # Adopted ones come first: the shares of users that were stored follow from the oldest.
        wanted = [*missing, Generation.generate()] if made else [*held, *missing]
        if made or missing:
            place.write(wanted, new=made)
        try:
            for one in wanted:
                if one.adopted or used is None:
                    _publish(bucket, run, one, wanted)
        except OtherSecretError:
            if made and place.path is not None:
                place.path.unlink()  # Nothing was made with it.
            raise
        return place.read(bucket, run)


class OtherSecretError(InputError):
    """Another process created or rotated the secret first."""


def rotate_secret(
    bucket: Bucket,
    run: Run,
    place: SecretPlace,
    *,
    wait_s: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> DeploymentSecret:
    """Adds a generation to the secret, and puts it into use once all gateways that run hold it.

    One that an earlier call added and did not put into use is taken. Raises `InputError` if a
    gateway does not hold it within ``wait_s``: then nothing changes for users, and the same call
    continues after the secret was given to that gateway.
    """
    with _changing(place):
        secret = place.read(bucket, run)
        used = {one.fingerprint for one in secret.numbered.values()}
        waiting = [one for one in secret.held.values() if one.fingerprint not in used]
        following = next((one for one in waiting if not one.adopted), None)
        held = list(secret.held.values())
        if following is None:
            following = Generation.generate()
            held.append(following)
            place.write(held, new=False)
        deadline = time.monotonic() + wait_s
        while lacking := _gateways_without(bucket, following.fingerprint, time.time()):
            if time.monotonic() >= deadline:
                raise InputError(
                    f"{place} holds a new generation, which is not in use yet, because gateways "
                    f"that run do not hold it: {', '.join(lacking)}",
                    hint="give them the same secret, then run the command again",
                    run=bucket.url,
                )
            sleep(ASK_EVERY_S)
        _publish(bucket, run, following, held)
        return place.read(bucket, run)


def _publish(bucket: Bucket, run: Run, one: Generation, held: Sequence[Generation]) -> None:
    """Names a generation in the bucket, under the next number. Raises `OtherSecretError` if another
    process has put one into use that is not among those ``held``."""
    mine = {known.fingerprint for known in held}
    for _ in range(MAX_GENERATIONS):
        records = read_generations(bucket, run.id)
        if any(record.fingerprint == one.fingerprint for record in records):
            return
        other = [r for r in records if not r.adopted and r.fingerprint not in mine]
        if other and not one.adopted:
            raise OtherSecretError(
                f"another process created generation {other[0].number} of the secret first, with "
                f"the fingerprint {other[0].fingerprint}",
                hint="take that secret; to keep both, put the lines of both files into each",
                run=bucket.url,
            )
        record = GenerationRecord(
            number=len(records),
            run=run.id,
            fingerprint=one.fingerprint,
            at=time.time(),
            adopted=one.adopted,
            public_key=one.public_key,
        )
        # The next turn reads what was stored: an answer may be lost, or another process be first.
        bucket.create(keys.live_secret(record.number), encode_json(record))
    raise RetryError("a stored generation of the secret is not found", run=bucket.url)


def _gateways_without(bucket: Bucket, fingerprint: str, now: float) -> list[str]:
    """Returns the gateways that run and do not hold a generation."""
    found = []
    for key in bucket.list(keys.LIVE_GATEWAYS):
        data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
        try:
            state = None if data is None else decode_json(data, GatewayState, run="", key=key)
        except CorruptError:
            continue
        runs = state is not None and state.at > now - SEEN_WITHIN_S
        if state is not None and runs and fingerprint not in state.generations:
            found.append(state.gateway)
    return found


@dataclass(frozen=True, kw_only=True)
class SecretOptions:
    """The place of the secret, the key of the gateway role in a signed run, private keys of earlier
    gateways, and how long a rotation waits for gateways."""

    trust: ReaderTrust = ANY
    key: str = ""
    secret: str = ""
    gateway_keys: Sequence[str] = ()
    wait_s: float = 30.0


def do_with_secret(
    location: str, verb: str, options: SecretOptions
) -> tuple[SecretPlace, DeploymentSecret]:
    """Does what ``deltawire live secret VERB`` does; returns the secret's place and the secret."""
    signer = read_signer(options.key)
    bucket = open_trusted(location, options.trust, signer=signer, role=GATEWAY_ROLE)
    run = read_run(bucket)
    place = SecretPlace.of(options.secret, run)
    if verb == "show":
        return place, place.read(bucket, run)
    bucket.check_writer()
    if verb == "rotate":
        return place, rotate_secret(bucket, run, place, wait_s=options.wait_s)
    if verb == "adopt" and not place.generations():
        place.read(bucket, run)
    adopt = adopted_generations(options.gateway_keys)
    return place, create_secret(bucket, run, place, adopt=adopt)
