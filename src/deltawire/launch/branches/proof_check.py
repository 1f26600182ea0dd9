"""Compares the statements of a proof with what a run's bucket holds.

Nothing is written, and no step is computed again (`deltawire.rl.trainer.verify_intervals` does).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.envelopes import read_attestation
from deltawire.launch.branches.line_statements import LISTED, LineStatements, line_name, line_step
from deltawire.launch.branches.statements import (
    STEP_TYPE,
    Commitments,
    Digests,
    Made,
    base_statement,
    digests_of,
    predicate_of,
    version_name,
    version_statement,
)
from deltawire.store import Bucket
from deltawire.sync import committed_versions, load_mirror, read_manifest
from deltawire.sync.chain.objects import newest_retention_floor
from deltawire.wire import keys
from deltawire.wire.run import Run

GROUP = "group/"


class ProofCheck(msgspec.Struct, kw_only=True):
    """The result: ``versions`` statements agree with the bucket, ``faults`` are versions whose
    statement does not, with the reason. ``not_compared`` are versions that retention deleted,
    ``lines_not_compared`` further precisions that nothing is stated about, and ``unlinked`` counts
    groups that are gone: erased, or deleted by retention."""

    versions: int = 0
    faults: dict[int, str] = {}
    not_compared: int = 0
    lines_not_compared: list[str] = []
    unlinked: int = 0


def check_proof(
    bucket: Bucket,
    run: Run,
    folder: Path,
    public_key: str,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ProofCheck:
    """Compares each version from the first to the last that the folder has a statement of.

    A version that cannot be read, or was deleted by retention, is taken as its signed statement
    names it, so that later versions can be compared all the same.

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
    committed = {one for one in committed_versions(bucket) if one <= max(stated)}
    floor = newest_retention_floor(bucket, run)
    later = _kind(stated[min(stated)]) != STEP_TYPE  # Statements begin with a first version.
    every = sorted(one for one in committed | set(stated) if not later or one >= min(stated))
    known: dict[int, Digests] = {}
    agreed: set[int] = set()
    commitments, mirror = Commitments(bucket, make=False), None
    for done, version in enumerate(every):
        progress(done, len(every))
        statement = stated.get(version)
        if statement is not None:
            known[version] = _stated_digests(statement, version_name(version))
        try:
            manifest = read_manifest(bucket, run, version)
            if manifest is None or manifest.pruned:
                if manifest is None and version >= floor:
                    found.faults[version] = "the run has no such version"
                elif statement is not None:
                    found.not_compared += 1
                continue
            mirror = load_mirror(bucket, run, at=version, into=mirror)
            known[version] = digests_of(mirror, run)
            if statement is None:
                found.faults[version] = "no statement says how it was made"
                continue
            made = (
                base_statement(run, manifest, known[version])
                if len(known) == 1
                else version_statement(bucket, run, manifest, known, commitments)
            )
        except CorruptError as error:
            found.faults[version] = error.message
            mirror = None
            continue
        if reason := _difference(made, statement, found):
            found.faults[version] = reason
        else:
            agreed.add(version)
    further = {
        path.stem: read_attestation(path, public_key)
        for path in sorted((folder / "statements").glob("line-*.json"))
    }
    _check_lines(bucket, run, stated, further, known, found)
    found.versions = len(agreed - found.faults.keys())
    return found


def _check_lines(
    bucket: Bucket,
    run: Run,
    versions: dict[int, dict[str, Any]],
    stated: dict[str, dict[str, Any]],
    known: dict[int, Digests],
    found: ProofCheck,
) -> None:
    """Compares the statements of further precisions, which are made again for that. ``versions``
    are the statements of the run's versions, ``known`` their digests."""
    lines = LineStatements(bucket, run)
    required = {name: _required(name, versions, stated) for name in lines.names}
    found.lines_not_compared += [name for name, steps in required.items() if not steps]
    missed = {step for steps in required.values() for step in steps}
    mirror = None
    for version in sorted(known) if missed else ():
        try:
            manifest = read_manifest(bucket, run, version)
            if version not in found.faults and manifest is not None and not manifest.pruned:
                mirror = load_mirror(bucket, run, at=version, into=mirror)
                for made in lines.statements(mirror, known[version]):
                    statement = stated.get(made.name)
                    reason = ""
                    if statement is not None:
                        reason = _difference(made, statement, found)
                    elif made.name in missed:
                        reason = "no statement says how it was made"
                    if reason:
                        found.faults[version] = f"{made.name}: {reason}"
                continue
        except CorruptError as error:
            found.faults[version] = error.message
        mirror = None
        for name in lines.names:
            statement = stated.get(line_step(name, version))
            if statement is not None:
                digests = _stated_digests(statement, line_name(name, version))
                lines.remember(name, version, digests)


def _required(
    name: str, versions: dict[int, dict[str, Any]], stated: dict[str, dict[str, Any]]
) -> list[str]:
    """Returns the steps of a line that the versions' statements list. Statements that list no
    lines, of an earlier deltawire, ask for all up to the last one that is there."""
    last = max((one for one in versions if line_step(name, one) in stated), default=-1)
    found = []
    for version, statement in versions.items():
        listed = _listed(statement)
        if version <= last if listed is None else name in listed:
            found.append(line_step(name, version))
    return found


def _listed(statement: dict[str, Any]) -> list[str] | None:
    try:
        found = statement["predicate"]["buildDefinition"]["externalParameters"].get(LISTED)
    except (KeyError, TypeError, AttributeError):
        return None
    return [str(one) for one in found] if isinstance(found, list) else None


def _kind(statement: dict[str, Any]) -> object:
    try:
        return statement["predicate"]["buildDefinition"]["buildType"]
    except (KeyError, TypeError):
        return None


def _stated_digests(statement: dict[str, Any], name: str) -> Digests:
    """Returns the digests by which a statement names its version; empty if it does not."""
    try:
        (subject,) = statement["subject"]
        named = subject["name"] == name
        return {str(key): str(one) for key, one in subject["digest"].items()} if named else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


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
