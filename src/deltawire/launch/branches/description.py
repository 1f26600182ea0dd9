"""Describes one version: the step that made it, its groups and rewards, held-out results, bits."""

from __future__ import annotations

from typing import Any

import msgspec

from deltawire.config import with_settings
from deltawire.errors import CorruptError, InputError
from deltawire.events import Evaluated, Step
from deltawire.launch.branches.differences import BitDifference, compare_bits
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run


class StepGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the step consumed. ``rewards`` are one for each trajectory; ``staleness`` is
    the version trained from, less the oldest that drew a token. Without ``rewards`` the group is
    deleted or damaged, and ``fault`` says so."""

    worker: str
    sequence: int
    task: str = ""
    rewards: list[float] = []
    tokens: int = 0
    staleness: int | None = None
    fault: str = ""


class VersionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A version as ``deltawire show`` prints it. ``learning_rate`` is that of the step, None in a
    run without a configuration; ``step`` and ``heldout`` are the events that were recorded of
    it."""

    run: str
    version: int
    base: int | None
    digest: str
    created_at: float
    delta_bytes: int | None
    anchor_bytes: int | None
    step: dict[str, Any] | None
    learning_rate: float | None
    threads: int
    ranks: int
    settings: dict[str, Any]
    groups: list[StepGroup]
    reward: float | None
    heldout: dict[str, Any] | None
    bits: BitDifference | None
    unmeasured: str = ""


def describe_version(bucket: Bucket, run: Run, version: int) -> VersionDescription:
    """Reads what a run's bucket holds of one version.

    Raises `InputError` if there is no such version. Bits are compared with the base's; where they
    cannot be, ``unmeasured`` says why.
    """
    manifest = read_manifest(bucket, run, version)
    if manifest is None:
        raise InputError(
            f"the run has no version {version}", hint="deltawire log lists them", run=bucket.url
        )
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
    groups = [_group(bucket, manifest, metadata, at) for at in range(len(metadata.consumed))]
    rewards = [reward for group in groups for reward in group.rewards]
    step: Step | None = None
    heldout: Evaluated | None = None
    for event in EventTail(bucket, processes=("trainer", "evaluator")).read(everything=True):
        if isinstance(event, Step) and event.version == version:
            step = event
        if isinstance(event, Evaluated) and event.version == version:
            heldout = event
    bits, unmeasured = None, "it has no base" if manifest.base is None else ""
    if manifest.base is not None:
        try:
            bits = compare_bits((bucket, run, manifest.base), (bucket, run, version))
        except (CorruptError, InputError) as error:
            unmeasured = error.message
    return VersionDescription(
        run=run.name,
        version=version,
        base=manifest.base,
        digest=manifest.digest,
        created_at=manifest.created_at,
        delta_bytes=manifest.delta.bytes if manifest.delta else None,
        anchor_bytes=manifest.anchor.bytes if manifest.anchor else None,
        step=None if step is None else msgspec.to_builtins(step),
        learning_rate=_learning_rate(bucket, run, manifest, metadata),
        threads=metadata.threads,
        ranks=metadata.ranks,
        settings=metadata.settings,
        groups=groups,
        reward=sum(rewards) / len(rewards) if rewards else None,
        heldout=None if heldout is None else msgspec.to_builtins(heldout),
        bits=bits,
        unmeasured=unmeasured,
    )


def _group(bucket: Bucket, manifest: Manifest, metadata: CommitMetadata, at: int) -> StepGroup:
    worker, sequence = metadata.consumed[at]
    expected = metadata.hashes[at] if metadata.hashes else ""
    try:
        read = read_group(bucket, worker, sequence, expected=expected)
    except CorruptError as error:
        return StepGroup(worker=worker, sequence=sequence, fault=error.message)
    if read is None:
        return StepGroup(worker=worker, sequence=sequence, fault="it is not in the bucket any more")
    group = read[0]
    base = manifest.version - 1 if manifest.base is None else manifest.base
    return StepGroup(
        worker=worker,
        sequence=sequence,
        task=group.task,
        rewards=[one.reward for one in group.trajectories],
        tokens=group.tokens,
        staleness=base - group.oldest_version,
    )


def _learning_rate(
    bucket: Bucket, run: Run, manifest: Manifest, metadata: CommitMetadata
) -> float | None:
    """Returns the rate of the step's first update, by its settings and the schedule."""
    if not run.config or not metadata.step:
        return None
    from deltawire.train.optimizer.schedule import rate_factor  # Brings torch.

    source = f"{bucket.url}/{keys.manifest(manifest.version)}"
    config = with_settings(config_of(run, url=bucket.url), metadata.settings, source=source)
    train = config.train
    first = (metadata.step - 1) * train.minibatches + 1
    return train.optimizer.learning_rate * rate_factor(train.schedule, first)
