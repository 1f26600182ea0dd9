"""Compares the statements of a proof with what a run's bucket holds.

Nothing is written, and no step is computed again (`deltawire.rl.trainer.verify_intervals` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.envelopes import read_attestation
from deltawire.launch.branches.statements import (
    Commitments,
    Digests,
    Made,
    base_statement,
    digests_of,
    predicate_of,
    version_statement,
)
from deltawire.store import Bucket
from deltawire.sync import committed_versions, load_mirror, read_manifest
from deltawire.wire import keys
from deltawire.wire.run import Run

GROUP = "group/"


class ProofCheck(msgspec.Struct, kw_only=True):
    """The result: ``versions`` statements agree with the bucket, ``faults`` are versions whose
    statement does not, with the reason. ``unlinked`` counts groups that nobody can tell any more,
    because they were erased."""

    versions: int = 0
    faults: dict[int, str] = {}
    unlinked: int = 0

    def with_faults(self, versions: Iterable[int], reason: str) -> ProofCheck:
        """Adds a fault of each of these versions."""
        self.faults |= dict.fromkeys(versions, reason)
        return self


def check_proof(
    bucket: Bucket,
    run: Run,
    folder: Path,
    public_key: str,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ProofCheck:
    """Compares each version from the first to the last that the folder has a statement of.

    Raises `InputError` for an envelope that ``public_key`` did not sign, and if there are none.
    """
    stated = {
        number: read_attestation(path, public_key)
        for path in sorted((folder / "statements").glob("version-*.json"))
        if (number := keys.trailing_number(path.stem.removeprefix("version-"))) is not None
    }
    if not stated:
        raise InputError(f"{folder} holds no statements", hint="deltawire prove writes them")
    found = ProofCheck()
    committed = [one for one in committed_versions(bucket) if one <= max(stated)]
    known: dict[int, Digests] = {}
    commitments, mirror = Commitments(bucket, make=False), None
    for done, version in enumerate(committed):
        progress(done, len(committed))
        statement = stated.pop(version, None)
        try:
            manifest = read_manifest(bucket, run, version)
        except CorruptError as error:
            found.faults[version] = error.message
            continue
        if manifest is None or manifest.pruned:
            continue
        if statement is None and not known:
            continue  # The statements begin later.
        if statement is None:
            found.faults[version] = "no statement says how it was made"
            continue
        try:
            mirror = load_mirror(bucket, run, at=version, into=mirror)
        except CorruptError as error:
            found.faults[version] = error.message
            continue
        known[version] = digests_of(mirror, run)
        made = (
            base_statement(run, manifest, known[version])
            if len(known) == 1
            else version_statement(bucket, run, manifest, known, commitments)
        )
        if reason := _difference(made, statement, found):
            found.faults[version] = reason
        else:
            found.versions += 1
    return found.with_faults(stated, "the run has no such version")


def _difference(made: Made, statement: dict[str, Any], found: ProofCheck) -> str:
    """Returns in what a statement differs from the step that the bucket shows; empty if it does
    not. Groups that are gone now count as unlinked."""
    subject = [{"name": name, "digest": digests} for name, digests in made.products.items()]
    if statement.get("subject") != subject:
        return "the statement is about other weights"
    ours, theirs = predicate_of(made), statement.get("predicate")
    if not isinstance(theirs, dict):
        return "the statement says nothing of how it was made"
    left, right = _materials(ours), _materials(theirs)
    stated, named = _commitments(left), _commitments(right)
    groups = made.parameters.get("groups", 0)
    if len(named) + _gone(theirs) != groups:
        return f"the statement names {len(named)} groups, the version {groups}"
    if not stated <= named:
        return "the statement names another group"
    for name in sorted(left.keys() | right.keys()):
        if not name.startswith(GROUP) and left.get(name) != right.get(name):
            return f"the statement names another {name.partition('/')[0]}"
    found.unlinked += len(named - stated)
    return ""


def _commitments(materials: dict[str, Any]) -> set[str]:
    found = (digests for name, digests in materials.items() if name.startswith(GROUP))
    return {str(one.get("sha256")) for one in found if isinstance(one, dict)}


def _materials(predicate: dict[str, Any]) -> dict[str, Any]:
    try:
        listed = predicate["buildDefinition"].get("resolvedDependencies", [])
        return {one["name"]: one["digest"] for one in listed}
    except (KeyError, TypeError, AttributeError):
        return {}


def _gone(predicate: dict[str, Any]) -> int:
    try:
        return int(predicate["buildDefinition"]["externalParameters"].get("groupsGone", 0))
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0
