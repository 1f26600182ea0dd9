"""Gives a fork the trainer's state of the version that it begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deltawire.config.sections import RunConfig
from deltawire.dashboard.wording import duration
from deltawire.errors import CorruptError, InputError
from deltawire.events import Step
from deltawire.launch.branches.fork_copy import copy_state
from deltawire.runtime.event_tail import EventTail
from deltawire.store import Bucket
from deltawire.sync import read_history, read_manifest
from deltawire.train.checkpoint_commit import MAX_COMMIT_BYTES, Commit
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.run import Run

if TYPE_CHECKING:
    from deltawire.rl.trainer.resume import Resumed


def give_state(
    parent: Bucket,
    run: Run,
    place: Bucket,
    forked: Run,
    config: RunConfig,
    version: int,
    *,
    fork: str,
    copied: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> str:
    """Stores the state in the fork; returns ``shared``, ``copied`` or ``computed``.

    A checkpoint of the parent is shared: only its commit is written, with the fork's id. With
    ``copied`` its parts are copied before. Where there is none, the steps after an earlier one are
    computed again, which ``announce`` is told first. Raises `InputError` if that does not give the
    published bits, `CorruptError` if a part cannot be copied, and as `resume` and `recompute_step`.
    """
    there = place.get(keys.checkpoint_commit(version), limit=MAX_COMMIT_BYTES)
    if there is not None and _commit(place, there, version).run == forked.id:
        return "copied" if copied else "shared"
    # Before the commit is read: removal looks for this mark after it has deleted the commit.
    parent.put(keys.checkpoint_forked(version, fork), b"")
    if _share(parent, run, place, forked, version, copied=copied):
        return "copied" if copied else "shared"
    parent.delete(keys.checkpoint_forked(version, fork))
    from deltawire.train.checkpoint import save_checkpoint

    state = _computed(parent, run, config, version, announce)
    digest = state.masters.digest().hex()
    save_checkpoint(
        place, state.masters.state(), Ledger(), version=version, digest=digest, run=forked.id
    )
    return "computed"


def _commit(bucket: Bucket, data: bytes, version: int) -> Commit:
    key = keys.checkpoint_commit(version)
    return Commit.decode(data, run=bucket.url, key=key)


def _share(
    parent: Bucket, run: Run, place: Bucket, forked: Run, version: int, *, copied: bool
) -> bool:
    """Writes the parent's commit into the fork; returns False if there is none that counts."""
    data = parent.get(keys.checkpoint_commit(version), limit=MAX_COMMIT_BYTES)
    if data is None:
        return False
    commit = _commit(parent, data, version)
    manifest = read_manifest(parent, run, version)
    if commit.run != run.id or manifest is None or commit.digest != manifest.digest:
        return False
    # The fork's workers number their groups from 0, so none of them is settled.
    shared = msgspec.structs.replace(commit, run=forked.id, ledger=Ledger())
    if copied:
        copy_state(parent, place, shared)
    place.put(keys.checkpoint_commit(version), shared.encode(packed=True))
    return True


def steps_ahead(bucket: Bucket, run: Run, first: int, last: int) -> str:
    """Says how many steps lead from a version to a later one, and about how long they take: as long
    as the run recorded when they were made."""
    versions = {one.version for one in read_history(bucket, run, after=first, to=last)}
    seconds = [
        event.seconds
        for event in EventTail(bucket, processes=("trainer",)).read(everything=True)
        if isinstance(event, Step) and event.version in versions
    ]
    about = ""
    if seconds:
        mean = sum(seconds) / len(seconds)
        about = f", which took the trainer about {duration(mean * len(versions))}"
    steps = "1 step" if len(versions) == 1 else f"{len(versions)} steps"
    return (
        f"version {last} has no stored state: computing {steps} after version {first} again{about}"
    )


def _computed(
    parent: Bucket, run: Run, config: RunConfig, version: int, announce: Callable[[str], None]
) -> Resumed:
    """Computes the state of a version from the newest checkpoint before it, or version 0."""
    import torch  # A state that is shared needs none of these.

    from deltawire.export.lines import open_policy
    from deltawire.export.models import fetch_model_files
    from deltawire.placement.device import resolve_device
    from deltawire.rl.trainer.resume import recompute_step, resume

    torch.set_num_threads(config.threads)
    device = resolve_device(config.device_of("trainer"))
    with fetch_model_files(parent, run) as folder:
        model = open_policy(
            parent,
            config,
            Path(folder),
            adapter=config.train.adapter,
            seed=config.seed,
            device=device,
        )
    state = resume(parent, run, config, model, newest=version)
    announce(steps_ahead(parent, run, state.version, version))
    while state.version < version:
        try:
            step = recompute_step(parent, run, state)
        except CorruptError as error:
            raise InputError(
                f"the state of version {version} cannot be computed: {error.message}",
                hint="fork a version that has a checkpoint, or whose groups are kept",
                run=parent.url,
                version=error.version,
                key=error.key,
            ) from error
        if not step.equal:
            raise InputError(
                f"the state of version {version} cannot be computed on this machine: version "
                f"{step.version} comes out with other bits",
                hint="deltawire replay says why; a version that has a checkpoint can be forked",
                run=parent.url,
                version=step.version,
            )
    return state
