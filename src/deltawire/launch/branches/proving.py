"""Proves how a run's versions were made: writes a signed statement for each version.

Every version is read, so the digests are those of the published bits. Steps that can be computed
again are checked with `deltawire verify-training`; a step whose groups were erased is counted as
not checkable. Models that were derived from the last version are made again and compared file by
file, so that their statements are not declarations.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from deltawire.builds import build_name
from deltawire.errors import InputError
from deltawire.launch.branches.envelopes import ProofFolder
from deltawire.launch.branches.line_statements import LineStatements
from deltawire.launch.branches.statements import (
    DERIVED_TYPE,
    Commitments,
    Digests,
    Made,
    base_statement,
    digests_of,
    step_name,
    text_hash,
    version_name,
    version_statement,
)
from deltawire.runtime.lines import publication_bucket
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import Checkout, committed_versions, load_mirror, read_manifest, read_run
from deltawire.wire.run import Run
from deltawire.wire.signing import Ed25519Signer

MERGED, PULLED, EXPORTED = "merge", "pull", "export"


class Proven(msgspec.Struct, kw_only=True):
    """The statements that were written: of ``versions`` versions, of which ``not_checkable`` name
    groups that are gone, by version with the reason, and of ``derived`` models. ``lines`` counts
    the versions of each further precision, which are made again of the run's."""

    versions: int = 0
    groups: int = 0
    not_checkable: dict[int, str] = {}
    derived: list[str] = []
    lines: dict[str, int] = {}


class Derived(msgspec.Struct, frozen=True):
    """A directory that was derived from a version. ``kind`` is ``pull``, ``merge``, ``export``, or
    a format of `deltawire pack`. ``layers`` say more: the layers that were packed, or the precision
    that was pulled."""

    kind: str
    directory: Path
    layers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Derived:
        """Parses ``KIND[:LAYER,…]=DIR``; raises `InputError`."""
        kind, found, directory = text.partition("=")
        kind, _, layers = kind.partition(":")
        if not found or not kind or not directory:
            raise InputError(
                f"--derived {text[:80]!r} is not KIND=DIR",
                hint="KIND is pull, pull:PRECISION, merge, export, or a format of "
                "deltawire pack, such as int8-row:o_proj",
            )
        named = tuple(filter(None, layers.split(",")))
        if named and kind == MERGED:
            raise InputError(f"--derived {text[:80]!r}: a merge has no layers", hint="merge=DIR")
        if kind == PULLED and len(named) > 1:
            raise InputError(
                f"--derived {text[:80]!r}: one precision is pulled", hint="pull:PRECISION=DIR"
            )
        return cls(kind, Path(directory), named)


def prove_run(
    bucket: Bucket,
    run: Run,
    version: int,
    folder: Path,
    signer: Ed25519Signer,
    *,
    derived: Sequence[Derived] = (),
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Proven:
    """Writes statements of all versions up to ``version`` that can be read, and of the models
    ``derived`` from it, into a new folder.

    Raises `InputError` if the folder holds something, a library is missing, two derived
    directories would have one name, or one has other files than those that come out now;
    `CorruptError` if a version cannot be read.
    """
    wanted = [one for one in committed_versions(bucket) if one <= version]
    manifests = [one for n in wanted if (one := read_manifest(bucket, run, n)) and not one.pruned]
    if not manifests or manifests[-1].version != version:
        raise InputError(f"version {version} cannot be read", run=bucket.url, version=version)
    names = [_edge_name(version, one) for one in derived]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"two --derived would be stated as {twice[0]}",
            hint="rename one of the directories",
            run=bucket.url,
        )
    edges = [_derive(bucket, run, version, one) for one in derived]
    out = ProofFolder(folder, signer)
    found, every = Proven(), list[Made]()
    known: dict[int, Digests] = {}
    commitments, lines, mirror = Commitments(bucket), LineStatements(bucket, run), None
    for done, manifest in enumerate(manifests):
        progress(done, len(manifests))
        mirror = load_mirror(bucket, run, at=manifest.version, into=mirror)
        known[manifest.version] = digests_of(mirror, run)
        further = lines.statements(mirror, known[manifest.version])
        if done == 0:
            made = base_statement(run, manifest, known[manifest.version])
        else:
            made = version_statement(bucket, run, manifest, known, commitments)
            found.versions += 1
            found.groups += made.parameters["groups"]
            if made.gone:
                found.not_checkable[manifest.version] = made.gone
        steps = [lines.listed(made, further), *further]
        for step in steps:
            out.add(step)
        every += steps
    progress(len(manifests), len(manifests))
    found.lines = lines.counts
    for edge in edges:
        made = msgspec.structs.replace(
            edge, materials={version_name(version): known[version], **edge.materials}
        )
        out.add(made)
        every.append(made)
        found.derived.append(made.name)
    out.close(every)
    return found


def _derive(bucket: Bucket, run: Run, version: int, one: Derived) -> Made:
    """Makes a derived model again, and returns its step, without the version as a material."""
    with tempfile.TemporaryDirectory(prefix="deltawire-prove-") as scratch:
        fresh = _made_again(bucket, run, version, one, Path(scratch))
        expected = _files(fresh)
    stated = _files(one.directory)
    if odd := sorted(
        name for name in expected.keys() | stated.keys() if expected.get(name) != stated.get(name)
    ):
        raise InputError(
            f"{one.directory} is not what {one.kind} makes of version {version}: {odd[0][:100]} "
            "differs",
            hint="name the version that it was made of, as RUN@V, and the same options",
            run=bucket.url,
            version=version,
        )
    safe = _edge_name(version, one)
    return Made(
        name=safe,
        kind=DERIVED_TYPE,
        products={f"{safe}/{name}": digests for name, digests in stated.items()},
        materials={"configuration": text_hash(one.kind, one.layers)},
        before=[step_name(version)],
        parameters={"run": run.id, "version": version, "kind": one.kind, "layers": [*one.layers]},
        build=build_name(),
        finished_at=time.time(),
    )


def _edge_name(version: int, one: Derived) -> str:
    name = f"{one.kind}-{step_name(version)}-{one.directory.name}"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:120]


def _made_again(bucket: Bucket, run: Run, version: int, one: Derived, scratch: Path) -> Path:
    if one.kind == MERGED:
        from deltawire.export.merged_checkpoint import write_merged

        write_merged(bucket, run, config_of(run, url=bucket.url), version, scratch / "merged")
        return scratch / "merged"
    pulled = scratch / "pulled"
    if one.kind == EXPORTED:
        return _exported_again(bucket, run, version, one, pulled)
    if one.kind == PULLED and one.layers:
        (precision,) = one.layers
        bucket = publication_bucket(bucket, precision)
        run = read_run(bucket)
    with Checkout(bucket, run, pulled) as checkout:
        checkout.bring_to(version)
    if one.kind == PULLED:
        return pulled
    from deltawire.quantization.packed_directory import pack_directory

    pack_directory(pulled, scratch / "packed", one.kind, layers=list(one.layers))
    return scratch / "packed"


def _exported_again(bucket: Bucket, run: Run, version: int, one: Derived, folder: Path) -> Path:
    from deltawire.export.snapshots import export_snapshot

    if one.layers:
        raise InputError(
            "a delta export cannot be stated: its files do not come out the same twice",
            hint="export the version whole, and state export=DIR",
        )
    export_snapshot(bucket, run, version, folder)
    return folder


def _files(folder: Path) -> dict[str, Digests]:
    """Returns the SHA-256 of each file of a directory, by its path in there."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory")
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = {"sha256": digest}
    return found
