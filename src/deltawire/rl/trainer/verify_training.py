"""Verifies a run's training: computes it again from the bucket and compares every version.

Nothing is sampled and nothing is written to the bucket: the groups are those that the manifests
name. If each digest equals the published one, the trainer that made the run computed the same as
this one, through every crash and restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from deltawire.config import RunConfig
from deltawire.errors import CorruptError, DeltawireError, InputError
from deltawire.export.lines import open_policy
from deltawire.export.models import fetch_model_files
from deltawire.export.shards import local_part
from deltawire.export.source import bits_of
from deltawire.placement.device import resolve_device
from deltawire.rl.trainer.resume import (
    RecomputedStep,
    Resumed,
    metadata_at,
    next_committed,
    recompute_step,
    resume,
)
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, newest_readable, read_history
from deltawire.train.arithmetic import arithmetic_of
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import MAX_GROUP_BYTES
from deltawire.wire.run import Run

NAMED = 5
READERS = 16
"""Manifests that are read at a time."""


@dataclass
class TrainingVerification:
    """The result of a comparison.

    Versions ``first`` to ``last`` were computed again, from the state at ``origin``. ``differs`` is
    the first version with a different digest, ``reason`` the cause as far as it is known, and
    ``tensors`` the number of differing weights by tensor. ``doubts`` say, before the first step,
    why exactness cannot be expected; without any it can.
    """

    origin: int
    first: int
    last: int
    groups: int = 0
    differs: int | None = None
    reason: str = ""
    tensors: dict[str, int] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Returns whether every compared version equals the published one."""
        return self.differs is None


@dataclass(frozen=True)
class Dump:
    """Writes everything about one step to a folder that does not exist yet."""

    version: int
    folder: Path


def verify_training(
    bucket: Bucket,
    *,
    first: int = 1,
    last: int | None = None,
    dump: Dump | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    expect: Callable[[list[str]], None] = lambda _: None,
) -> TrainingVerification:
    """Compute versions up to ``last`` (the newest) again and compare each from ``first`` on.

    Starts from the newest checkpoint before ``first``, or from version 0; stops at the first
    version that differs. ``progress`` is called with the number of steps done, and of all steps,
    ``expect`` before the first step with the reasons why exactness cannot be expected.

    Raises `InputError` if there is no such run or version, `CorruptError` if a needed object is
    damaged or missing.
    """
    run, config = open_run(bucket, role="trainer")
    refuse_midtraining(bucket, config)
    head = newest_readable(bucket, run)
    if head is None:
        raise InputError("the run has no version 0", run=bucket.url)
    newest = head.version
    last = newest if last is None else last
    _check_range(bucket, first, last, newest, dump)
    torch.set_num_threads(config.threads)
    device = resolve_device(config.device_of("trainer"))
    with fetch_model_files(bucket, run) as folder:
        model = open_policy(
            bucket,
            config,
            Path(folder),
            adapter=config.train.adapter,
            seed=config.seed,
            device=device,
        )
    state = resume(bucket, run, config, model, newest=first - 1)
    found = TrainingVerification(state.version, first, last)
    found.doubts = doubts_of(reasons_to_doubt(bucket, run, state.version, last, device))
    expect(found.doubts)
    total = last - state.version
    while state.version < last:
        progress(state.version - found.origin, total)
        version = next_committed(bucket, run, state.version)
        if version is None or version > last:
            break
        wanted = dump is not None and dump.version == version
        if dump is not None and wanted:
            _dump_before(bucket, run, state, dump)
        step = recompute_step(bucket, run, state)
        if dump is not None and wanted:
            _dump_step(dump, step, state)
        found.groups += len(step.groups)
        if not step.equal:
            found.differs = step.version
            _explain(bucket, run, found, state)
            break
        if odd := state_fault(state, metadata_at(bucket, run, step.version)[0]):
            found.differs, found.reason = step.version, odd
            break
    progress(state.version - found.origin, total)
    return found


def state_fault(state: Resumed, metadata: CommitMetadata) -> str:
    """Returns what is wrong with masters and optimizer at a version, by the hash that its metadata
    states; empty for nothing, or without a hash."""
    if not metadata.state or metadata.state == state.masters.state_hash():
        return ""
    return "masters or optimizer differ from the hash that the version states"


def refuse_midtraining(bucket: Bucket, config: RunConfig) -> None:
    """Raises `InputError` for a run of mid-training."""
    if config.midtrain is not None:
        raise InputError(
            "a run of mid-training has no groups to compute its steps from",
            hint="its trainer computes them again from the documents when it continues",
            run=bucket.url,
        )


def _check_range(bucket: Bucket, first: int, last: int, newest: int, dump: Dump | None) -> None:
    if not 1 <= first <= last <= newest:
        raise InputError(
            f"cannot replay versions {first} to {last}: the run has 1 to {newest}",
            hint="version 0 is the start of the run" if newest else "it has trained no version",
            run=bucket.url,
        )
    if dump is None:
        return
    if not first <= dump.version <= last:
        raise InputError(f"version {dump.version} is not among the versions to verify")
    try:
        dump.folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(f"{dump.folder} exists already", hint="name a new folder") from error
    except OSError as error:
        raise InputError(f"cannot write to {dump.folder}: {error.strerror}") from error


def reasons_to_doubt(
    bucket: Bucket, run: Run, origin: int, last: int, device: torch.device
) -> Iterator[tuple[str, int]]:
    """Yields why a step after ``origin`` may come out with other bits on this machine, and its
    version."""
    here = arithmetic_of(device)
    for manifest in read_history(
        bucket, run, after=origin, to=last, complete=False, readers=READERS
    ):
        version = manifest.version
        metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
        if not metadata.consumed:
            continue
        if metadata.ranks > 1:
            yield f"{metadata.ranks} ranks computed them, one does now", version
        if not metadata.arithmetic:
            yield f"their manifests do not say with which kernels; here {here}", version
        elif metadata.arithmetic != here:
            yield f"they were computed with {metadata.arithmetic}; here {here}", version


def doubts_of(reasons: Iterable[tuple[str, int]]) -> list[str]:
    """Returns each reason once, with its versions."""
    doubts: dict[str, list[int]] = {}
    for why, version in reasons:
        doubts.setdefault(why, []).append(version)
    return [f"{_named(many)}: {why}" for why, many in doubts.items()]


def _named(versions: list[int]) -> str:
    first, last = versions[0], versions[-1]
    if first == last:
        return f"version {first}"
    some = "" if len(versions) > last - first else f", {len(versions)} of them"
    return f"versions {first} to {last}{some}"


def _explain(bucket: Bucket, run: Run, found: TrainingVerification, state: Resumed) -> None:
    """Find the tensors that differ and the likely cause."""
    assert found.differs is not None
    metadata, _ = metadata_at(bucket, run, found.differs)
    found.reason = (
        "the groups are those that were trained on: the arithmetic differs"
        if metadata.hashes
        else "the manifest does not say which bytes its groups had"
    )
    if metadata.ranks > 1:
        found.reason = (
            f"{metadata.ranks} ranks computed it, whose sums have another order than this "
            "process's: replay is exact for runs of one rank"
        )
    elif metadata.arithmetic:
        here = arithmetic_of(state.masters.mesh.device)
        if metadata.arithmetic != here:
            found.reason = f"it was computed with {metadata.arithmetic}; here {here}"
    if metadata.step != found.differs:
        found.reason = f"the version says that it is step {metadata.step} of the loop"
    try:
        published = load_mirror(bucket, run, at=found.differs)
    except DeltawireError as error:
        found.reason += f"; {error}"
        return
    ours = bits_of(state.masters.source)
    found.tensors = {
        name: int(np.count_nonzero(bits != ours[name].reshape(bits.shape)))
        for name, bits in published.tensors.items()
        if not np.array_equal(bits, ours[name].reshape(bits.shape))
    }


def _dump_before(bucket: Bucket, run: Run, state: Resumed, dump: Dump) -> None:
    """Write the state that the step starts from, and its groups as stored in the bucket."""
    metadata, _ = metadata_at(bucket, run, dump.version)
    tensors = {
        name: local_part(tensor).cpu().contiguous()
        for name, tensor in state.masters.state().items()
    }
    safetensors.torch.save_file(tensors, dump.folder / "state.safetensors")
    for place, (worker, sequence) in enumerate(metadata.consumed):
        key = keys.rollout(worker, sequence)
        data = bucket.get(key, limit=MAX_GROUP_BYTES)
        if data is None:
            raise CorruptError("a consumed group is missing", run=bucket.url, key=key)
        (dump.folder / f"group-{place:04d}-{worker}-{sequence}.msgpack").write_bytes(data)


def _dump_step(dump: Dump, step: RecomputedStep, state: Resumed) -> None:
    """Write the step's measurements, and figures of each of its groups."""
    result: dict[str, Any] = {
        name: value
        for name, value in (asdict(step.result) if step.result else {}).items()
        if isinstance(value, int | float)
    }
    groups = [
        {
            "worker": numbered.group.worker,
            "sequence": numbered.sequence,
            "task": numbered.group.task,
            "hash": numbered.hash,
            "staleness": step.base - numbered.group.oldest_version,
            "queued": step.base - numbered.group.newest_version,
            "tokens": numbered.group.tokens,
            "rewards": [trajectory.reward for trajectory in numbered.group.trajectories],
            "finishes": [trajectory.finish for trajectory in numbered.group.trajectories],
        }
        for numbered in step.groups
    ]
    record = {
        "version": step.version,
        "digest": step.digest.hex(),
        "published": step.published.hex(),
        "equal": step.equal,
        "optimizer_steps": state.masters.steps,
        "result": result,
        "groups": groups,
    }
    (dump.folder / "step.json").write_text(json.dumps(record, indent=2))
