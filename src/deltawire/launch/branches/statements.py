"""Makes the statement of each version of a run: what it is, and what it was made of.

A version is named by the SHA-256 of its weights (`weights_hash`). Its materials are the version
before, its groups, the code, the configuration and the base model. A group is named by a commitment
only: the SHA-256 of 32 random bytes and of its place and hash. The random bytes lie in the bucket,
and `deltawire forget` deletes them with the group. Then no statement can be linked to it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from deltawire.errors import CorruptError
from deltawire.rl.control.lineages import erased_groups
from deltawire.rl.trainer.resume import settings_of_step
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket
from deltawire.sync import Mirror
from deltawire.wire import keys
from deltawire.wire.decisions import RestoreRecord
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

STEP_TYPE = "urn:deltawire:training-step:1"
BASE_TYPE = "urn:deltawire:base-model:1"
FIRST_TYPE = "urn:deltawire:first-readable-version:1"
"""The type of a first version that is not version 0: nothing says how it was made."""
DERIVED_TYPE = "urn:deltawire:derived-model:1"
SALT_BYTES = 32

Digests = dict[str, str]
"""Digests of one artifact in hexadecimal digits, by algorithm."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the supply chain: ``products`` were made of ``materials``, each by name.

    ``gone`` says why the step cannot be computed again, empty if it can. ``parameters`` are those
    of the step, and ``before`` are steps whose products are among the materials, by name.
    """

    name: str
    kind: str
    products: dict[str, Digests]
    materials: dict[str, Digests]
    before: list[str]
    parameters: dict[str, Any]
    build: str
    finished_at: float
    gone: str = ""


def step_name(version: int) -> str:
    """Returns the name of the step that made a version."""
    return f"version-{version:010d}"


def version_name(version: int) -> str:
    """Returns the name of a version as an artifact."""
    return f"version/{version}"


def weights_hash(mirror: Mirror, run: Run) -> str:
    """Returns the SHA-256 of all weights: for each tensor, in the order of names, its name, dtype
    and shape as a line of JSON, and its bits, little-endian."""
    total = hashlib.sha256()
    for spec in sorted(run.tensors, key=lambda one: one.name):
        bits = mirror.tensors[spec.name]
        total.update(msgspec.json.encode([spec.name, spec.dtype, list(spec.shape)]) + b"\n")
        total.update(np.ascontiguousarray(bits).data)
    return total.hexdigest()


def digests_of(mirror: Mirror, run: Run) -> Digests:
    """Returns the digests by which statements name a version."""
    return {"sha256": weights_hash(mirror, run), "deltawireDigest": mirror.digest.hex()}


def text_hash(*parts: object) -> Digests:
    """Returns the SHA-256 of values, as JSON with sorted members."""
    data = msgspec.json.encode(parts, order="sorted")
    return {"sha256": hashlib.sha256(data).hexdigest()}


class Commitments:
    """Names groups by commitments, whose random bytes it reads from the bucket or makes there.

    Example::

        commitments = Commitments(bucket)
        commitments.of("w0", 12, "5e…")
    """

    def __init__(self, bucket: Bucket, *, make: bool = True) -> None:
        """Without ``make``, groups need their random bytes."""
        self._bucket, self._make = bucket, make
        self._erased = erased_groups(bucket)
        self._kept_from = read_retained(bucket).rollouts

    def of(self, worker: str, sequence: int, stated: str) -> str | None:
        """Returns the commitment to a group, whose hash its version states; None if it is gone.
        Raises `CorruptError` for a group without its random bytes, which no erasure leaves.

        The random bytes are stored before the group is looked for, and `forget` deletes the group
        before them: none stay that belong to a group that is erased.
        """
        key = keys.proof_salt(worker, sequence)
        salt = self._bucket.get(key, limit=SALT_BYTES)
        if salt is None and self._make:
            self._bucket.create(key, secrets.token_bytes(SALT_BYTES))
            salt = self._bucket.get(key, limit=SALT_BYTES)
        if not self._bucket.exists(keys.rollout(worker, sequence)):
            return None
        if salt is None:
            raise CorruptError(
                "the random bytes of a commitment are missing, but its group is not",
                run=self._bucket.url,
                key=key,
            )
        if len(salt) != SALT_BYTES:
            raise CorruptError("the random bytes of a commitment", run=self._bucket.url, key=key)
        return commitment(salt, worker, sequence, stated)

    def why_gone(self, version: int, places: Sequence[tuple[str, int]]) -> str:
        """Returns why groups of a version are gone. Random bytes that `of` made for groups which
        were erased meanwhile are deleted."""
        if not set(places) <= self._erased:
            self._erased = erased_groups(self._bucket)
        if self._make:
            for place in self._erased.intersection(places):
                self._bucket.delete(keys.proof_salt(*place))
        if set(places) <= self._erased:
            return "groups were erased"
        return "retention deleted groups" if version < self._kept_from else "groups are missing"


def commitment(salt: bytes, worker: str, sequence: int, stated: str) -> str:
    """Returns the commitment to a group with these random bytes, in hexadecimal digits."""
    text = salt + msgspec.json.encode([worker, sequence, stated])
    return hashlib.sha256(text).hexdigest()


def base_statement(run: Run, manifest: Manifest, digests: Digests) -> Made:
    """Returns the step of the first version: 0 is the base model."""
    return Made(
        name=step_name(manifest.version),
        kind=FIRST_TYPE if manifest.version else BASE_TYPE,
        products={version_name(manifest.version): digests},
        materials={},
        before=[],
        parameters={"run": run.id, "version": manifest.version},
        build=manifest.build or run.build,
        finished_at=manifest.created_at,
    )


def version_statement(
    bucket: Bucket,
    run: Run,
    manifest: Manifest,
    known: Mapping[int, Digests],
    commitments: Commitments,
) -> Made:
    """Returns the step that made a version. ``known`` are the digests of the versions up to this
    one; the first of them is the base, the last but one the version before."""
    version = manifest.version
    order = sorted(known)
    base, before = order[0], order[-2]
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
    restored = RestoreRecord.of(manifest.metadata, run=bucket.url, version=version)
    used = {base, before} | ({restored.restored.version} if restored is not None else set())
    materials = {version_name(one): known[one] for one in sorted(used) if one in known}
    hashes = metadata.hashes or [""] * len(metadata.consumed)
    missing: list[tuple[str, int]] = []
    named: list[str] = []
    for (worker, sequence), stated in zip(metadata.consumed, hashes, strict=True):
        found = commitments.of(worker, sequence, stated)
        if found is None:
            missing.append((worker, sequence))
        else:
            named.append(found)
    # Sorted, because the order of training would tell which group each of them names.
    materials |= {f"group/{n}": {"sha256": one} for n, one in enumerate(sorted(named))}
    config = settings_of_step(bucket, run, metadata, version) if run.config else None
    materials["configuration"] = text_hash(msgspec.to_builtins(config))
    materials["code"] = text_hash(manifest.build, metadata.arithmetic)
    gone = commitments.why_gone(version, missing) if missing else ""
    if not metadata.consumed and restored is None:
        gone = "it was published without groups"
    return Made(
        name=step_name(version),
        kind=STEP_TYPE,
        products={version_name(version): known[version]},
        materials=materials,
        before=[step_name(one) for one in sorted(used) if one in known],
        parameters={
            "run": run.id,
            "version": version,
            "step": metadata.step,
            "groups": len(metadata.consumed),
            "groupsGone": len(missing),
            "threads": metadata.threads,
            "ranks": metadata.ranks,
            "arithmetic": metadata.arithmetic,
            "notCheckable": gone,
        },
        build=manifest.build,
        finished_at=manifest.created_at,
        gone=gone,
    )


def predicate_of(made: Made) -> dict[str, Any]:
    """Returns the statement's predicate: provenance as SLSA defines it, version 1."""
    return {
        "buildDefinition": {
            "buildType": made.kind,
            "externalParameters": made.parameters,
            "resolvedDependencies": [
                {"name": name, "digest": digests} for name, digests in made.materials.items()
            ],
        },
        "runDetails": {
            "builder": {"id": "urn:deltawire:trainer", "version": {"deltawire": made.build}},
            "metadata": {
                "invocationId": f"{made.parameters['run']}/{made.name}",
                "finishedOn": datetime.fromtimestamp(made.finished_at, UTC).isoformat(
                    timespec="seconds"
                ),
            },
        },
    }
