"""Forks a run: a new run that begins with a version of another, and copies no weights.

A fork lies below its parent, at ``RUN/forks/NAME``, and reads what it began with from there (see
`deltawire.store.forked`). The order makes a stop at any point harmless, and the same call goes on:

1. Tag the version in the parent, so that retention keeps it, and mark its checkpoint.
2. Write the version's manifest into the fork, and those that it builds on up to an anchor, with the
   fork's id, and with the names of their piece tables in place of the tables; then the floor that
   closes the versions before them.
3. Write the commit of the trainer's state. Where the parent has no checkpoint of the version, its
   steps are computed again from an earlier one, and the state is stored in the fork.
4. Do 1 and 2 for each further precision that the run publishes, and create its ``run.json``.
5. Create ``run.json``. Before that no reader takes the place for a run.

A fork in another bucket (``to``) is noted in the parent first, and before 2 the payloads are
copied. It reads nothing of its parent later, so the tag and the mark are removed at the end; their
names have the fork's id, because a fork below the parent may have the same name and keeps its own.

The id follows from the parent, the version, the name, the configuration and the place of a copy, so
a repeated call writes the same objects, and one with other arguments finds them and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from deltawire.builds import build_name
from deltawire.config import with_settings
from deltawire.config.features import stored_settings
from deltawire.config.lines import publication_config
from deltawire.config.sections import RunConfig
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.fork_copy import (
    check_place,
    copy_payloads,
    register_child,
    withdraw_child,
)
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.needs import config_of, needs_of
from deltawire.runtime.signed_bucket import signing
from deltawire.runtime.trusted import ReaderTrust, open_as_trainer, trusted
from deltawire.store import Bucket, open_bucket
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync import find_run, read_manifest, read_run
from deltawire.sync.chain.objects import check_signer, create_run, read_compacted_delta
from deltawire.sync.chain.tags import add_tag
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.ledger import (
    FORK_RECORD,
    STEP_RECORD,
    CommitMetadata,
    ForkRecord,
    fork_id,
)
from deltawire.wire.manifest import Manifest, encode_manifest
from deltawire.wire.payload import ZERO_SUM
from deltawire.wire.piece_table import table_above
from deltawire.wire.roles import Pin, run_of_line
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

WRITERS = 8
"""Manifests that are written at once: a folder waits for the disk for each."""


@dataclass(frozen=True)
class Fork:
    """A fork that is ready to be trained. ``state`` says where the trainer's state came from:
    ``shared`` with the parent, ``copied``, ``computed`` again, or ``none`` for a run without a
    trainer."""

    url: str
    run: Run
    version: int
    state: str


def fork_run(
    parent: Bucket,
    run: Run,
    version: int,
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    signer: Signer | None = None,
    to: str = "",
    announce: Callable[[str], None] = lambda _: None,
) -> Fork:
    """Makes the fork ``name`` of a version, with some settings changed; in the bucket ``to``, if it
    is given, with a copy of everything that it needs. ``announce`` gets a line before steps are
    computed again, with the time that they take.

    Raises `InputError` if the version is not there, for a setting that cannot change, for a name
    that another fork has, and if the trainer's state cannot be computed; `CorruptError` if a needed
    object cannot be read.

    Example::

        fork_run(bucket, run, 120, "try", settings={"train.optimizer.learning_rate": 2e-6})
    """
    keys.fork_tag(name)  # Refuses a name that is too long for it.
    if to:
        check_place(parent, to)
    check_signer(parent, run, signer)
    if run.public_key and signing(parent) is None:
        parent = trusted(parent, ReaderTrust(pin=Pin(run.public_key, run.id)))
    config = _config_of(parent, run, settings or {})
    raw = stored_settings(config) if config is not None else run.config
    location = to or f"{parent.url.rstrip('/')}/{keys.fork(name)}"
    place = open_bucket(location, create=True)
    origin = ForkRecord(parent=run.id, version=version)
    described = msgspec.structs.replace(
        run,
        id=fork_id(origin, name, raw, place.url if to else ""),
        name=name,
        created_at=time.time(),
        config=raw,
        needs=needs_of(config) if config is not None else run.needs,
        build=build_name(),
    )
    there = _refuse_another(place, described)
    if not to:
        return _make(
            parent, run, place, described, config, version, signer, held=name, announce=announce
        )
    held = described.id
    further = config.train.also_publish if config is not None else ()
    if there:
        _release(parent, version, held, further)
        return Fork(place.url, described, version, "copied" if config else "none")
    register_child(parent, run, described, version, place.url)
    try:
        made = _make(
            parent, run, place, described, config, version, signer,
            held=held, copied=True, announce=announce,
        )  # fmt: skip
    except InputError:
        _release(parent, version, held, further)
        withdraw_child(parent, place, described)
        raise
    _release(parent, version, held, further)
    return made


def _make(
    parent: Bucket,
    run: Run,
    place: Bucket,
    described: Run,
    config: RunConfig | None,
    version: int,
    signer: Signer | None,
    *,
    held: str,
    copied: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> Fork:
    """Writes the fork; ``held`` names the tag and the mark that keep what it reads."""
    _write_versions(parent, run, place, described, version, signer, held=held, copied=copied)
    state = "none"
    if config is not None:
        from deltawire.launch.branches.fork_state import give_state

        if signer is not None:  # The commit of the trainer's state is signed in the trainer's role.
            pin = Pin(signer.public_key, described.id)
            place = open_as_trainer(place, signer, ReaderTrust(pin=pin))
        state = give_state(
            parent, run, place, described, config, version,
            fork=held, copied=copied, announce=announce,
        )  # fmt: skip
        for exporter in config.train.also_publish:
            _fork_line(
                parent, place, described, config, exporter, version, signer, held, copied=copied
            )
    create_run(place, described, signer=signer)
    return Fork(place.url, described, version, state)


def _write_versions(
    parent: Bucket,
    run: Run,
    place: Bucket,
    described: Run,
    version: int,
    signer: Signer | None,
    *,
    held: str,
    copied: bool,
) -> None:
    """Tags the version, and writes the manifests that it is read from."""
    add_tag(parent, run, version, keys.fork_tag(held), signer=signer)
    chain = chain_of(parent, run, version)
    if copied:
        copy_payloads(parent, run, place, chain)
    forked = [_forked(one, run, described, newest=one.version == version) for one in chain]
    if not copied:
        forked = [_tables_above(one) for one in forked]
    with WorkerThreads(min(len(forked), WRITERS), thread_name_prefix="fork") as pool:
        list(pool.map(lambda one: _write(place, one, signer), forked))
    _write_floor(place, described, chain[0].version, signer)


def _fork_line(
    parent: Bucket,
    place: Bucket,
    fork: Run,
    config: RunConfig,
    exporter: str,
    version: int,
    signer: Signer | None,
    held: str,
    *,
    copied: bool,
) -> None:
    """Forks a further precision of the run: its next version needs the scales of this one."""
    upper = line_bucket(parent, exporter)
    line = read_run(upper)
    below = line_bucket(place, exporter, create=True)
    own = publication_config(config, exporter)
    described = msgspec.structs.replace(
        line,
        id=_line_id(fork, exporter),
        name=own.name,
        created_at=fork.created_at,
        config=stored_settings(own),
        needs=needs_of(own),
        build=fork.build,
    )
    _write_versions(upper, line, below, described, version, signer, held=held, copied=copied)
    create_run(below, described, signer=signer)


def _line_id(fork: Run, exporter: str) -> str:
    """Returns the id of a fork's line; readers of a signed run compute it from the run's."""
    if fork.public_key:
        return run_of_line(fork.id, exporter)
    return blake3(f"{fork.id} {exporter}".encode()).hexdigest()[:32]


def _release(parent: Bucket, version: int, held: str, further: Sequence[str] = ()) -> None:
    """Lets the parent's retention go on: a fork in another bucket reads nothing of the parent."""
    parent.delete(keys.checkpoint_forked(version, held))
    for place in (parent, *(line_bucket(parent, one) for one in further)):
        place.delete(keys.tag(keys.fork_tag(held)))


def _config_of(parent: Bucket, run: Run, settings: Mapping[str, Any]) -> RunConfig | None:
    """Returns the fork's configuration: the parent's with its present settings and these changes;
    None for a run that has none."""
    if not run.config:
        if settings:
            raise InputError("a run without a configuration has no settings", run=parent.url)
        return None
    config = config_of(run, url=parent.url, role="trainer")
    status = known_trainer(parent)
    config = with_settings(config, status.settings if status else {}, source=parent.url)
    if config.train.adapters or config.line is not None:
        raise InputError(
            "a run of several adapters cannot be forked: each adapter has versions of its own, so "
            "no number names one of the whole run",
            hint="fork a run of one adapter",
            run=parent.url,
        )
    return with_settings(config, settings, source="--set")


def chain_of(bucket: Bucket, run: Run, version: int) -> list[Manifest]:
    """Returns the manifests that a version is read from: an anchor, and the versions after it, each
    built on the one before. The first one has no delta.

    Raises `InputError` if the version is not there, and `CorruptError`.
    """
    found: list[Manifest] = []
    at = version
    while True:
        manifest = read_manifest(bucket, run, at)
        if manifest is None or manifest.pruned:
            raise InputError(
                f"version {at} " + ("is not there" if manifest is None else "has been pruned"),
                hint="deltawire log RUN lists the versions",
                run=bucket.url,
                version=at,
            )
        anchor = manifest.anchor
        if anchor is None:
            later = read_compacted_delta(bucket, run, None, at)
            if later is not None and later.digest == manifest.digest:
                anchor = later.payload
        if anchor is not None:
            found.append(
                msgspec.structs.replace(
                    manifest, anchor=anchor, delta=None, base=None, base_digest=ZERO_SUM
                )
            )
            return found[::-1]
        found.append(manifest)
        if manifest.base is None:
            raise CorruptError("a version with no way to it", run=bucket.url, version=at)
        at = manifest.base


def _forked(manifest: Manifest, parent: Run, fork: Run, *, newest: bool) -> Manifest:
    """Returns a manifest of the parent as one of the fork.

    The groups that the parent's versions consumed are not the fork's, so only the newest version
    has a record: the step and the position of the draws, where training continues.
    """
    metadata: dict[str, Any] = {}
    if newest:
        record = ForkRecord(parent=parent.id, version=manifest.version)
        metadata[FORK_RECORD] = msgspec.to_builtins(record)
        if STEP_RECORD in manifest.metadata:
            made = CommitMetadata.of(manifest.metadata, run=parent.name, version=manifest.version)
            metadata |= CommitMetadata(
                step=made.step, position=made.position, state=made.state
            ).to_dict()
    return msgspec.structs.replace(manifest, run=fork.id, metadata=metadata)


def _tables_above(manifest: Manifest) -> Manifest:
    """Returns a manifest that names the piece tables of its payloads, which the parent has in its
    manifest of the same version (see `deltawire.store.forked`)."""
    refs = (manifest.delta, manifest.anchor)
    delta, anchor = (None if ref is None else table_above(ref) for ref in refs)
    return msgspec.structs.replace(manifest, delta=delta, anchor=anchor)


def _write(place: Bucket, manifest: Manifest, signer: Signer | None) -> None:
    key = keys.manifest(manifest.version)
    place.create(key, encode_manifest(manifest, signer=signer))


def _write_floor(place: Bucket, run: Run, version: int, signer: Signer | None) -> None:
    """Says that the versions before the first one are not there on purpose."""
    if version:
        key = keys.retention_floor(version)
        place.create(key, seal(RetentionFloor(run=run.id, version=version), key=key, signer=signer))


def _refuse_another(place: Bucket, run: Run) -> bool:
    """Returns whether this fork is there already; raises `InputError` if another one has the name,
    or has begun to."""
    there = find_run(place)
    other = None if there is None else there.id
    if there is None:
        for key in place.list(keys.MANIFESTS)[:1]:
            data = place.get(key, limit=1 << 21)
            if data is not None:
                other = msgspec.json.decode(data, type=_ManifestOwner).run
    if other not in (None, run.id):
        raise InputError(
            "another fork has this name",
            hint="choose another name, or delete that fork",
            run=place.url,
        )
    return there is not None


class _ManifestOwner(msgspec.Struct):
    """The member of a manifest that says whose it is."""

    run: str = ""
