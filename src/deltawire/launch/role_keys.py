"""The keys of a signed run on this machine: the owner's, and one for each process it starts.

::

    owner's key (--key FILE) ── signs run.json, weights and grants; the trainer's process uses it
        │ grants
        ▼
    OUT/keys/worker-w0.key, evaluator.key, supervisor.key, …   one for each other process, mode 0600

A child gets the path of its key on its command line, never the key.
"""

from __future__ import annotations

from pathlib import Path

from deltawire.errors import InputError
from deltawire.private_files import private_folder
from deltawire.runtime.signed_bucket import grant_role
from deltawire.runtime.trusted import owned_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import find_run, read_run
from deltawire.wire.keys import valid_name
from deltawire.wire.roles import GATEWAY_ROLE, PROCESS_ROLES, TRAINER_ROLE, Pin
from deltawire.wire.seal import Signer


def read_signer(path: str) -> Signer | None:
    """Reads the private key in a file; None for an empty path."""
    if not path:
        return None
    from deltawire.wire.signing import Ed25519Signer

    return Ed25519Signer.read(Path(path))


def grant_by_owner(
    location: str, role: str, public_key: str, *, owner: Path, revoke: bool = False
) -> Pin:
    """Lets ``public_key`` sign in ``role`` of the run at ``location``; returns the run's pin.

    With ``revoke`` what earlier keys of the role signed is void.

    Raises `InputError` for an invalid role or key, or if there is no run.
    """
    from deltawire.wire.signing import Ed25519Signer

    if role not in (*PROCESS_ROLES, GATEWAY_ROLE) and not (
        role.startswith("worker-") and valid_name(role.removeprefix("worker-"))
    ):
        raise InputError(
            f"{role[:80]!r} is not a role",
            hint=f"use worker-NAME, {GATEWAY_ROLE}, {', '.join(PROCESS_ROLES)}",
        )
    granted = Pin.parse(public_key)
    signer, bucket = Ed25519Signer.read(owner), open_bucket(location)
    run = read_run(bucket, public_key=signer.public_key)
    grant_role(
        bucket, signer, run_id=run.id, role=role, public_key=granted.public_key, revoke=revoke
    )
    return Pin(signer.public_key, run.id)


def refuse_signed(bucket: Bucket, keys: RunKeys | None) -> None:
    """Raises `InputError` if the run in the bucket is signed and ``keys`` are missing."""
    run = find_run(bucket) if keys is None else None
    if run is not None and run.public_key:
        raise InputError(
            "the run is signed, and no key was given",
            hint="give the private key of its owner with --key",
            run=bucket.url,
        )


class RunKeys:
    """Makes the keys of a run's processes in a folder, and grants them.

    Example::

        keys = RunKeys(bucket, Path("owner.key"), out / "keys")
        arguments = ["worker", bucket.url, "--id", "w0", *keys.arguments("worker-w0")]
    """

    def __init__(self, bucket: Bucket, owner: Path, folder: Path) -> None:
        from deltawire.wire.signing import Ed25519Signer

        self._bucket = bucket
        self._owner_file = owner
        self._folder = private_folder(folder)
        self._owner = Ed25519Signer.read(owner)
        self.pin = owned_run(bucket, self._owner)

    def arguments(self, role: str) -> list[str]:
        """Returns the options of a process in ``role``; makes and grants its key if it has none
        yet.

        The trainer gets the owner's key, because it publishes.
        """
        return ["--public-key", str(self.pin), "--key", str(self._granted(role))]

    def signer(self, role: str) -> Signer:
        """Returns the key of ``role`` for use in this process; makes and grants it as `arguments`
        does.
        """
        from deltawire.wire.signing import Ed25519Signer

        return Ed25519Signer.read(self._granted(role))

    def _granted(self, role: str) -> Path:
        """Returns the file of the role's key, which is granted."""
        from deltawire.wire.signing import Ed25519Signer

        path = self._owner_file
        if role != TRAINER_ROLE:
            path = self._folder / f"{role}.key"
            if not path.exists():
                Ed25519Signer.generate().write(path)
        grant_role(
            self._bucket,
            self._owner,
            run_id=self.pin.run_id,
            role=role,
            public_key=Ed25519Signer.read(path).public_key,
        )
        return path
