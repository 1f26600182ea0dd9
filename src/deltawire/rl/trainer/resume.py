"""Resumes a trainer: recomputes steps from a checkpoint or version 0 on their recorded groups.

A step depends on the state before it, on its groups in their order, on the run's configuration and
on the number of threads, and on nothing else: its random numbers are seeded by its version, so no
random state needs to be stored. Recomputing it gives the same bits, on the same kind of machine
with the same libraries.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from deltawire.codec import Digest
from deltawire.config import ParityLimits, RunConfig, TrainConfig, with_settings
from deltawire.errors import CorruptError, InputError
from deltawire.export.lines import holds_base
from deltawire.export.source import WeightSource, is_lossy, open_source, wanted_of
from deltawire.rl.control.credits import settle
from deltawire.rl.control.rollout_buffer import BufferedGroup, read_consumed
from deltawire.rl.reference.models import load_reference_model
from deltawire.rl.reference.reader import ReferenceReader
from deltawire.rl.trainer.planted import plant
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import Mirror, load_mirror, read_history, read_manifest
from deltawire.train.checkpoint import load_checkpoint
from deltawire.train.frozen_base import check_frozen_base
from deltawire.train.line_masters import line_masters
from deltawire.train.masters import COMPUTE_DTYPES, MasterWeights
from deltawire.train.parallel import TrainerMesh, device_of, open_mesh, shard_model
from deltawire.train.reference import AdapterOff, FrozenCopy, Reference, SleepingCopy
from deltawire.train.step import StepResult, train_step
from deltawire.wire import keys
from deltawire.wire.decisions import RestoredState, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

MAX_REPEATED = 256
"""Steps that a rollback computes again, at most, to get the optimizer's state of a version."""


def seed_step(config: RunConfig, version: int, *, rank: int = 0) -> None:
    """Seed the random numbers of the step that makes ``version``, on a rank that computes separate
    micro-batches."""
    text = f"{config.seed} {version}" + (f" {rank}" if rank else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


@contextmanager
def threads_of(metadata: CommitMetadata) -> Iterator[None]:
    """Compute the body with the number of threads that a committed step was computed with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(metadata.threads or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Resumed:
    """The trainer's state at ``version``; ``reference`` as `load_reference` gives it. ``train`` are
    the settings that ``masters`` were made with."""

    masters: MasterWeights
    ledger: Ledger
    version: int
    train: TrainConfig
    reference: Reference | ReferenceReader | None = None
    ranks: int | None = None
    """The number of ranks that wrote the checkpoint, or computed the last step; None if unknown."""

    def follow_settings(self, train: TrainConfig) -> None:
        """Continue with other settings of the optimizer, on the same weights and moments."""
        if (train.optimizer, train.schedule) == (self.train.optimizer, self.train.schedule):
            return
        before = self.masters
        masters = MasterWeights(
            before.model, train, source=before.source, mesh=before.mesh, seed=before.seed
        )
        masters.restore(before.state())
        masters.served = before.served
        self.masters, self.train = masters, train


def resume(
    bucket: Bucket,
    run: Run,
    config: RunConfig,
    model: Any,
    *,
    newest: int,
    mesh: TrainerMesh | None = None,
) -> Resumed:
    """Load the newest checkpoint at or before ``newest`` that is complete and holds the weights
    that were published at its version; without one, version 0.

    All ranks call this together. Raises `CorruptError` if there is neither, and `InputError` for a
    checkpoint of another run.
    """
    mesh = mesh or open_mesh(config.train, device_of(model))
    reference = load_reference(bucket, run, config, model, mesh)
    model.train(config.train.dropout)
    if config.line is None or holds_base(model):
        masters = MasterWeights(model, config.train, mesh=mesh, seed=config.seed)
    else:
        masters = line_masters(bucket, config, model, mesh)
    before = newest
    while True:
        state = masters.state()
        commit = load_checkpoint(bucket, state, newest=before, mesh=masters.mesh, run=run.id)
        if commit is None:
            break
        before = commit.version - 1
        manifest = read_manifest(bucket, run, commit.version)
        if manifest is None:
            continue
        if masters.has_frozen:
            try:
                at = getattr(masters.source, "base_version", commit.version)
                masters.load_frozen(_load_version(bucket, run, masters.source, at=at))
            except CorruptError:
                continue
        masters.restore(state)
        if is_lossy(masters.source):
            _continue_from(bucket, run, masters.source, at=commit.version)
        if masters.digest().hex() == manifest.digest:
            check_frozen_base(bucket, run, masters)
            _remember_start(bucket, run, masters, at=commit.version)
            return Resumed(
                masters, commit.ledger, commit.version, config.train, reference, commit.ranks
            )
    if is_lossy(masters.source):
        raise CorruptError(
            f"no checkpoint at or before version {newest} holds the trainer's weights, and its "
            f"versions hold quantized ones ({config.train.exporter})",
            hint="such a run keeps the checkpoint of version 0; put it back",
            run=bucket.url,
        )
    del state  # It holds the optimizer's states, which are made again.
    masters.reset(_load_version(bucket, run, masters.source, at=0))
    check_frozen_base(bucket, run, masters)
    return Resumed(masters, Ledger(), 0, config.train, reference)


def _remember_start(bucket: Bucket, run: Run, masters: MasterWeights, *, at: int) -> None:
    """Measures the served share since version 0; since the present version ``at`` if that one is
    gone. All ranks call this together."""
    masters.remember(since=at)
    if masters.served is None or not at:
        return
    with contextlib.suppress(CorruptError):
        masters.remember_start(load_mirror(bucket, run, at=0, wanted=masters.trained_rows()))


def _continue_from(bucket: Bucket, run: Run, source: Any, *, at: int) -> None:
    """Reads what the version after ``at`` depends on, such as scales."""
    mirror = load_mirror(bucket, run, at=at, wanted=source.continued())
    source.continue_from(mirror)


def _load_version(bucket: Bucket, run: Run, source: WeightSource, *, at: int) -> Mirror:
    """Load the part of a version that this rank needs; raises `CorruptError` if it cannot be
    read."""
    return load_mirror(bucket, run, at=at, wanted=wanted_of(source))


def load_reference(
    bucket: Bucket, run: Run, config: RunConfig, model: Any, mesh: TrainerMesh
) -> Reference | ReferenceReader | None:
    """The reference of ``train.loss.kl`` for the policy ``model``; None without a penalty.

    Raises `CorruptError` if it is version 0, which the bucket no longer has.
    """
    mode = config.reference_mode
    if mode == "none":
        return None
    if mode == "adapter_off":
        return AdapterOff(model, config.train)
    if mode == "process":
        return ReferenceReader(bucket, run, model="" if config.reference.model else run.digest)
    if mesh.ranks == 1:
        frozen, _ = load_reference_model(bucket, run, config)
        device = next(model.parameters()).device
        return SleepingCopy(frozen, config.train, device=device)
    compute = COMPUTE_DTYPES[config.train.compute]
    if config.reference.model:  # Each rank reads all of it, and keeps its shards.
        teacher, _ = load_reference_model(bucket, run, config)
        teacher = teacher.to(mesh.device)
        published = open_source("bf16", teacher).compute_dtype
        shard_model(teacher, mesh, compute=compute, published=published)
        return FrozenCopy(teacher.eval().requires_grad_(False), config.train)
    reference = copy.deepcopy(model)
    source = open_source(config.train.exporter, reference)
    shard_model(reference, mesh, compute=compute, published=source.compute_dtype)
    source = open_source(config.train.exporter, reference)
    origin = load_mirror(bucket, run, at=0, wanted=wanted_of(source))
    source.restore(origin)
    return FrozenCopy(reference.eval().requires_grad_(False), config.train)


def reference_for(
    reference: Reference | ReferenceReader | None, groups: Sequence[BufferedGroup]
) -> Reference | None:
    """The reference for a step on these groups; raises `CorruptError` if log-probabilities that a
    reference process has stored are gone."""
    if isinstance(reference, ReferenceReader):
        return reference.require(groups)
    return reference


@dataclass
class RecomputedStep:
    """A step that was computed again."""

    version: int
    base: int
    """The version that it was trained from."""
    groups: list[BufferedGroup]
    result: StepResult | None
    """None for a version that restores another."""
    digest: Digest
    published: Digest

    @property
    def equal(self) -> bool:
        """Returns whether it gave the published bits."""
        return self.digest == self.published


def next_committed(bucket: Bucket, run: Run, version: int) -> int | None:
    """The number of the version after ``version``, None if there is none; raises `CorruptError`,
    and `UnreadableError` if that is unknown.

    Numbers that unreadable objects occupy are skipped.
    """
    manifest = next(read_history(bucket, run, after=version), None)
    return None if manifest is None else manifest.version


def metadata_at(bucket: Bucket, run: Run, version: int) -> tuple[CommitMetadata, Digest]:
    """Reads the inputs of a committed version's step, and its digest; raises `CorruptError`."""
    manifest = _manifest_at(bucket, run, version)
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
    return metadata, Digest.from_hex(manifest.digest)


def _manifest_at(bucket: Bucket, run: Run, version: int) -> Manifest:
    manifest = read_manifest(bucket, run, version)
    if manifest is None or manifest.pruned:
        raise CorruptError(
            "a manifest is missing" if manifest is None else "a version has been pruned",
            run=bucket.url,
            version=version,
        )
    return manifest


def settings_of_step(bucket: Bucket, run: Run, metadata: CommitMetadata, version: int) -> RunConfig:
    """The configuration that a committed version's step was made with."""
    return with_settings(
        config_of(run, url=bucket.url),
        metadata.settings,
        source=f"{bucket.url}/{keys.manifest(version)}",
    )


def recompute_step(bucket: Bucket, run: Run, state: Resumed) -> RecomputedStep:
    """Compute the step after ``state`` again, which advances it to the next committed version, with
    the settings of that step.

    Raises `CorruptError` if a group that it consumed is missing or has changed, and `InputError` if
    it consumed no groups, like a training client's version.
    """
    base, version = state.version, next_committed(bucket, run, state.version)
    if version is None:
        raise CorruptError("no version builds on this one", run=bucket.url, version=base)
    manifest = _manifest_at(bucket, run, version)
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
    published = Digest.from_hex(manifest.digest)
    restored = RestoreRecord.of(manifest.metadata, run=bucket.url, version=version)
    if restored is not None:
        config = settings_of_step(bucket, run, metadata, version)
        _restore_again(bucket, run, config, state, restored)
        state.version = version
        return RecomputedStep(version, base, [], None, state.masters.digest(), published)
    if not metadata.consumed:
        raise InputError(
            "this version was not made from groups, so its step cannot be computed again",
            hint="if a training client made it and its state is lost, TrainingClient.load(url, "
            'lost_state="reset") starts a new optimizer state, and closing it saves that',
            run=bucket.url,
            version=version,
        )
    groups = read_consumed(bucket, metadata)
    config = settings_of_step(bucket, run, metadata, version)
    state.follow_settings(config.train)
    result = repeat_step(state, config, groups, metadata, version)
    settle(state.ledger, metadata)
    state.version, state.ranks = version, metadata.ranks or state.ranks
    return RecomputedStep(version, base, groups, result, state.masters.digest(), published)


def repeat_step(
    state: Resumed,
    config: RunConfig,
    groups: Sequence[BufferedGroup],
    metadata: CommitMetadata,
    version: int,
) -> StepResult:
    """Trains the masters on groups as the step that made ``version``: with its random numbers and
    its number of threads. ``config`` has its settings, and ``metadata.parts`` fit the groups."""
    # A published step is not checked again, because limits may have changed since.
    judged = msgspec.structs.replace(config.parity, stop=ParityLimits())
    config = msgspec.structs.replace(config, parity=judged)
    with threads_of(metadata):
        seed_step(config, version, rank=state.masters.mesh.data_rank)
        result = train_step(
            state.masters,
            [numbered.group for numbered in groups],
            config,
            reference=reference_for(state.reference, groups),
            version=state.version,
            parts=metadata.parts,
        )
        if config.live.planted:
            plant(state.masters, config, version=version)
    return result


def groups_of(bucket: Bucket, run: Run, version: int) -> list[BufferedGroup]:
    """Read the groups that a step consumed; raises `CorruptError` if they are missing."""
    metadata, _ = metadata_at(bucket, run, version)
    return read_consumed(bucket, metadata)


@dataclass(frozen=True)
class Restoration:
    """The masters of an earlier version. ``state``, ``checkpoint`` and ``steps`` are those of
    `RestoreRecord`."""

    masters: MasterWeights
    state: RestoredState
    checkpoint: int = 0
    steps: int = 0


def restore_version(
    bucket: Bucket,
    run: Run,
    config: RunConfig,
    before: Resumed,
    target: ServedVersion,
    *,
    exact: bool = True,
    most: int | None = MAX_REPEATED,
) -> Restoration:
    """Set the masters of ``before`` to those of an earlier version, which must have the digest of
    ``target``. All ranks call this together.

    With ``exact``, the optimizer's state is restored too: from the newest checkpoint at or before
    that version, or version 0, and by computing at most ``most`` steps again (None: any number).
    If that does not give the published bits, or without ``exact``, the masters are set to the
    published weights, and the optimizer to its start.

    Raises `CorruptError` if the version cannot be read, and `InputError` if its masters cannot be
    made from what was published.
    """
    if exact:
        found = _restore_exactly(bucket, run, config, before, target, most)
        if found is not None:
            return found
    masters = before.masters
    if getattr(masters.source, "base_version", target.version) != target.version:
        raise InputError(
            f"the state of version {target.version} cannot be restored: there is no checkpoint to "
            f"compute it from, and the exporter {config.train.exporter} publishes weights that no "
            "masters can be made from",
            hint="set live.release.restore = false to train on from the newest version",
            run=bucket.url,
            version=target.version,
        )
    masters.reset(_load_version(bucket, run, masters.source, at=target.version))
    if masters.digest().hex() != target.digest:
        raise CorruptError(
            f"the weights of version {target.version} do not have the digest that the decision "
            "names after they were restored",
            hint="deltawire fsck checks what is stored",
            run=bucket.url,
            version=target.version,
        )
    return Restoration(masters, "weights")


def _restore_exactly(
    bucket: Bucket,
    run: Run,
    config: RunConfig,
    before: Resumed,
    target: ServedVersion,
    most: int | None,
) -> Restoration | None:
    """Restore masters and optimizer; None if they cannot be computed, or give other bits."""
    masters = before.masters
    state = masters.state()
    commit = load_checkpoint(bucket, state, newest=target.version, mesh=masters.mesh, run=run.id)
    start = 0 if commit is None else commit.version
    if most is not None and target.version - start > most:
        return None
    try:
        if commit is None:
            del state  # It holds the optimizer's states, which are made again.
            masters.reset(_load_version(bucket, run, masters.source, at=0))
        else:
            if masters.has_frozen:
                at = getattr(masters.source, "base_version", start)
                masters.load_frozen(_load_version(bucket, run, masters.source, at=at))
            masters.restore(state)
        now = Resumed(masters, Ledger(), start, before.train, before.reference)
        steps = 0
        while now.version < target.version:
            recompute_step(bucket, run, now)
            steps += 1
    except (CorruptError, InputError):  # A group was deleted, or a client made a version.
        return None
    now.follow_settings(config.train)
    if now.masters.digest().hex() != target.digest:
        return None
    return Restoration(now.masters, "exact", start, steps)


def _restore_again(
    bucket: Bucket, run: Run, config: RunConfig, state: Resumed, record: RestoreRecord
) -> None:
    """Restore what a committed version restored, whatever that costs."""
    state.follow_settings(config.train)
    exact = record.state == "exact"
    state.masters = restore_version(
        bucket, run, config, state, record.restored, exact=exact, most=None
    ).masters


def skip_withdrawn(bucket: Bucket, run: Run, state: Resumed, *, newest: int) -> None:
    """Advance ``state`` to the last version up to ``newest`` that restores an earlier one, without
    computing the steps before it; what they consumed stays consumed.

    Raises `CorruptError` if that version cannot be restored.
    """
    settled: list[CommitMetadata] = []
    last: tuple[int, CommitMetadata, RestoreRecord, int] | None = None
    for manifest in read_history(bucket, run, after=state.version, to=newest):
        metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=manifest.version)
        settled.append(metadata)
        record = RestoreRecord.of(manifest.metadata, run=bucket.url, version=manifest.version)
        if record is not None:
            last = manifest.version, metadata, record, len(settled)
    if last is None:
        return
    version, metadata, record, count = last
    config = settings_of_step(bucket, run, metadata, version)
    _restore_again(bucket, run, config, state, record)
    for one in settled[:count]:
        settle(state.ledger, one)
    state.version, state.ranks = version, metadata.ranks or state.ranks
