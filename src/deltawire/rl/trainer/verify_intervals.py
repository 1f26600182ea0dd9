"""Verifies a run's training by intervals between the trainer's stored states.

An interval begins at version 0 or at a stored state, and ends at the next stored state, or at the
newest version. Its steps are computed again, and each version is compared with the published one:
its digest, and its bits. At the end the trainer's state is compared too, masters and optimizer, so
that one interval's end is the next one's beginning. All intervals together show the whole run, and
intervals that the verifier draws show it with a probability (`escape_probability`).
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.errors import CorruptError, DeltawireError, InputError, UnreadableError
from deltawire.export.lines import open_policy
from deltawire.export.models import fetch_model_files
from deltawire.export.shards import local_part
from deltawire.export.source import bits_of
from deltawire.placement.device import resolve_device
from deltawire.rl.control.lineages import erased_groups
from deltawire.rl.trainer.derived_lines import DerivedLine
from deltawire.rl.trainer.resume import Resumed, next_committed, recompute_step, resume
from deltawire.rl.trainer.verify_training import (
    doubts_of,
    reasons_to_doubt,
    refuse_midtraining,
    state_fault,
)
from deltawire.runtime.process import open_run
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket
from deltawire.store.forked import split_fork
from deltawire.sync import (
    Mirror,
    committed_versions,
    load_mirror,
    newest_readable,
    read_manifest,
)
from deltawire.sync.chain.objects import newest_retention_floor
from deltawire.train.checkpoint import load_checkpoint
from deltawire.train.checkpoint_folders import checkpoint_versions, kept_intervals
from deltawire.train.checkpoint_storage import bytes_of
from deltawire.wire import keys
from deltawire.wire.ledger import (
    FORK_RECORD,
    STEP_RECORD,
    CommitMetadata,
    ForkRecord,
    fork_id,
)
from deltawire.wire.run import Run


@dataclass(frozen=True)
class TrainingInterval:
    """The steps after version ``origin`` up to version ``last``."""

    origin: int
    last: int


@dataclass(frozen=True)
class Fault:
    """A version that does not follow from the one before as the run states it, with the reason."""

    version: int
    reason: str


@dataclass
class TrainingCheck:
    """The result: of ``intervals``, those in ``checked`` were computed again whole; ``versions``
    versions were, with ``groups`` groups. ``not_checkable`` are versions whose inputs are gone,
    each with the reason; ``doubts`` say before the first step why exactness cannot be expected.
    ``began`` is the version that a fork began with, which its parent's steps made."""

    intervals: int
    drawn: list[TrainingInterval]
    checked: list[TrainingInterval] = field(default_factory=list)
    versions: int = 0
    groups: int = 0
    faults: list[Fault] = field(default_factory=list)
    not_checkable: dict[int, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    began: int = 0

    @property
    def exact(self) -> bool:
        """Returns whether no version was found that differs."""
        return not self.faults


def escape_probability(share: float, draws: int) -> float:
    """Returns the largest probability that ``draws`` intervals, which the verifier draws, show
    nothing of a forger who changed a ``share`` of all intervals: (1 − share) ^ draws. Drawn without
    repetition, it is less."""
    return (1.0 - share) ** draws


def intervals_of(bucket: Bucket, run: Run, *, began: int = 0) -> list[TrainingInterval]:
    """Returns the intervals between version 0, the stored states and the newest version.

    Without version 0 the first begins at the oldest state; in a fork, whose earlier versions were
    trained in its parent, at the version that it ``began`` with (`forked_from`). Raises
    `InputError` if the run has trained no version, or nothing is left to begin with.
    """
    head = newest_readable(bucket, run)
    if head is None or head.version == 0:
        raise InputError("the run has trained no version", run=bucket.url)
    start = read_manifest(bucket, run, 0)
    ends = {0} if start is not None and not start.pruned else set()
    committed = committed_versions(bucket)
    ends |= {one for one in checkpoint_versions(bucket) if one in committed}
    ends = {one for one in ends if began <= one < head.version} | {head.version}
    ordered = sorted(ends)
    if len(ordered) < 2:
        raise InputError(
            "there is neither version 0 nor a state of the trainer to compute steps from",
            hint="retain.checkpoints says how many states are kept",
            run=bucket.url,
        )
    return [TrainingInterval(*pair) for pair in itertools.pairwise(ordered)]


def forked_from(bucket: Bucket, run: Run) -> int:
    """Returns the version that a fork began with, 0 for any other run. Versions before it say
    nothing of a step.

    A record counts only if the run's id follows from it: a trainer writes the metadata of all its
    versions, and one that states a fork would keep the earlier ones from being checked.
    """
    floor = newest_retention_floor(bucket, run)
    for version in committed_versions(bucket, newer_than=floor - 1):
        with suppress(CorruptError):
            manifest = read_manifest(bucket, run, version)
            metadata = {} if manifest is None else manifest.metadata
            if _is_origin(bucket, run, version, metadata.get(FORK_RECORD)):
                return version
            if STEP_RECORD in metadata:
                break
    return 0


def _is_origin(bucket: Bucket, run: Run, version: int, raw: object) -> bool:
    """Returns whether ``raw`` is the record of a fork that made this run with ``version``."""
    try:
        record = msgspec.convert(raw, ForkRecord)
    except msgspec.ValidationError:
        return False
    place = "" if split_fork(bucket.url)[1] else bucket.url
    return record.version == version and run.id == fork_id(record, run.name, run.config, place)


def draw(intervals: Sequence[TrainingInterval], count: int | None) -> list[TrainingInterval]:
    """Draws ``count`` intervals at random, by the system's source, in their order; None: all."""
    if count is None or count >= len(intervals):
        return list(intervals)
    chosen: random.Random = secrets.SystemRandom()
    return sorted(chosen.sample(list(intervals), count), key=lambda one: one.origin)


def verify_intervals(
    bucket: Bucket,
    *,
    spot: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    expect: Callable[[list[str]], None] = lambda _: None,
) -> TrainingCheck:
    """Computes ``spot`` intervals again, drawn at random, or all of them.

    An interval ends at its first fault, and the next one begins at its stored state. ``progress``
    gets the number of steps done, and of all; ``expect`` the doubts before the first step.

    Raises `InputError` if there is nothing to verify, and `RetryError` if the store does not
    answer.
    """
    run, config = open_run(bucket, role="trainer")
    refuse_midtraining(bucket, config)
    began = forked_from(bucket, run)
    found_all = intervals_of(bucket, run, began=began)
    found = TrainingCheck(len(found_all), [], began=began)
    drawn = found.drawn = found_all
    if spot is not None:
        gone = {one: reason for one in found_all if (reason := _why_gone(bucket, run, one))}
        for one, reason in gone.items():
            found.not_checkable |= dict.fromkeys(range(one.origin + 1, one.last + 1), reason)
        drawn = found.drawn = draw([one for one in found_all if one not in gone], spot)
    torch.set_num_threads(config.threads)
    device = resolve_device(config.device_of("trainer"))
    reasons: list[tuple[str, int]] = []
    for one in drawn:
        with suppress(CorruptError, UnreadableError):  # The step finds it again, and names it.
            reasons += reasons_to_doubt(bucket, run, one.origin, one.last, device)
    found.doubts = doubts_of(reasons)
    expect(found.doubts)
    total, done = sum(one.last - one.origin for one in drawn), 0
    with fetch_model_files(bucket, run) as folder:
        check = _IntervalCheck(bucket, run, config, Path(folder), device, found)
        for one in drawn:
            check.interval(one, partial(_step_done, progress, done, total))
            done += one.last - one.origin
    progress(total, total)
    return found


def _why_gone(bucket: Bucket, run: Run, one: TrainingInterval) -> str:
    """Returns why the groups of an interval's first step are gone on purpose; empty if they need
    not be, or the step cannot be read."""
    with suppress(CorruptError, UnreadableError):
        version = next_committed(bucket, run, one.origin)
        if version is not None and version <= one.last:
            return _absence(bucket, version, _metadata(bucket, run, version))
    return ""


def _metadata(bucket: Bucket, run: Run, version: int) -> CommitMetadata:
    manifest = read_manifest(bucket, run, version)
    values = {} if manifest is None else manifest.metadata
    return CommitMetadata.of(values, run=bucket.url, version=version)


def _absence(bucket: Bucket, version: int, metadata: CommitMetadata) -> str:
    """Returns why groups that a version consumed are gone on purpose; empty if they need not be."""
    missing = [one for one in metadata.consumed if not bucket.exists(keys.rollout(*one))]
    return absence_of(bucket, version, missing) if missing else ""


def _step_done(progress: Callable[[int, int], None], before: int, total: int, steps: int) -> None:
    progress(before + steps, total)


class _IntervalCheck:
    """Computes intervals again, one after the other. ``state`` is kept from one to the next."""

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        config: RunConfig,
        folder: Path,
        device: torch.device,
        found: TrainingCheck,
    ) -> None:
        self._bucket, self._run, self._config = bucket, run, config
        self._folder, self._device = folder, device
        self._found = found
        self._state: Resumed | None = None
        self._mirror: Mirror | None = None
        self._lines: list[DerivedLine] | None = None

    def interval(self, one: TrainingInterval, progress: Callable[[int], None]) -> None:
        """Computes one interval again, and adds what was found."""
        state = self._begin(one)
        if state is None:
            return
        if one.origin == 0 and self._config.train.also_publish:
            self._compare_bits(state, 0)
        while state.version < one.last:
            progress(state.version - one.origin)
            if not self._step(state, one.last):
                self._state = None
                return
        self._found.checked.append(one)
        self._compare_state(state)

    def _fault(self, version: int, reason: str) -> None:
        self._found.faults.append(Fault(version, reason))

    def _begin(self, one: TrainingInterval) -> Resumed | None:
        """Returns the state at the interval's beginning; None if it is not the stored one."""
        if self._state is not None and self._state.version == one.origin:
            return self._state
        self._state = None
        model = open_policy(
            self._bucket,
            self._config,
            self._folder,
            adapter=self._config.train.adapter,
            seed=self._config.seed,
            device=self._device,
        )
        try:
            state = resume(self._bucket, self._run, self._config, model, newest=one.origin)
            metadata = _metadata(self._bucket, self._run, one.origin)
        except (CorruptError, InputError) as error:
            self._fault(one.origin, f"the state to begin with cannot be read: {error.message}")
            return None
        if state.version != one.origin:
            self._fault(
                one.origin, "the stored state is damaged, or is not that of the published weights"
            )
            return None
        if odd := state_fault(state, metadata):
            self._fault(one.origin, odd)
            return None
        self._state = state
        return state

    def _step(self, state: Resumed, last: int) -> bool:
        """Computes the next step; returns whether it gave the published bits."""
        try:
            version = next_committed(self._bucket, self._run, state.version)
        except (CorruptError, UnreadableError) as error:
            self._fault(error.version or last, f"it cannot be read: {error.message}")
            return False
        if version is None or version > last:
            self._fault(last, f"no version leads from {state.version} to {last}")
            return False
        try:
            metadata = _metadata(self._bucket, self._run, version)
            if reason := _absence(self._bucket, version, metadata):
                self._found.not_checkable |= dict.fromkeys(range(version, last + 1), reason)
                return False
            step = recompute_step(self._bucket, self._run, state)
        except (CorruptError, InputError, UnreadableError) as error:
            self._fault(version, error.message)
            return False
        self._found.versions += 1
        self._found.groups += len(step.groups)
        if not step.equal:
            self._fault(version, "its groups give other bits")
            return False
        if not self._compare_bits(state, version):
            return False
        if odd := state_fault(state, metadata):
            self._fault(version, odd)
        return not odd

    def _compare_bits(self, state: Resumed, version: int) -> bool:
        """Compares the published bits: an equal digest does not show that they are equal to one
        who can choose them."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None and mirror.version > version:
            mirror = None
        try:
            mirror = load_mirror(self._bucket, self._run, at=version, into=mirror)
        except CorruptError as error:
            self._fault(version, f"the published weights cannot be read: {error.message}")
            return False
        ours = bits_of(state.masters.source)
        odd = [
            name
            for name, bits in mirror.tensors.items()
            if name not in ours or not np.array_equal(bits, ours[name].reshape(bits.shape))
        ]
        if odd:
            self._fault(version, f"published weights of {odd[0][:100]} are other ones")
            return False
        self._mirror = mirror
        return self._compare_lines(state, mirror)

    def _compare_lines(self, state: Resumed, mirror: Mirror) -> bool:
        """Makes the version of each further precision again. The newest may be missing, if the
        trainer stopped before it was committed; `deltawire fsck` tells what else is missing."""
        if self._lines is None:
            names = self._config.train.also_publish
            model = state.masters.model
            self._lines = [DerivedLine(self._bucket, one, model) for one in names]
        for line in self._lines:
            if mirror.version not in line.versions:
                continue
            try:
                line.require(mirror)
            except CorruptError as error:
                self._fault(mirror.version, f"line {line.exporter}: {error.message}")
                return False
        return True

    def _compare_state(self, state: Resumed) -> None:
        """Compares the stored state of a version, if there is one, with the computed one."""
        version = state.version
        if version not in checkpoint_versions(self._bucket):
            return
        ours = state.masters.state()
        stored = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
        try:
            commit = load_checkpoint(self._bucket, stored, newest=version, run=self._run.id)
        except DeltawireError as error:
            self._fault(version, f"the stored state cannot be read: {error.message}")
            return
        if commit is None or commit.version != version:
            self._fault(version, "the stored state is damaged")
            return
        if odd := _different(ours, stored):
            self._fault(version, f"the stored state differs in {odd[0][:100]}")


def _different(ours: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name, tensor in ours.items()
        if not np.array_equal(_bytes(tensor), _bytes(stored[name]))
    ]


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return bytes_of(local_part(tensor).detach().cpu().contiguous())


def absence_of(bucket: Bucket, version: int, missing: Sequence[tuple[str, int]]) -> str:
    """Returns why groups that a version consumed are gone: a user was forgotten, or retention
    deleted them. Empty if neither explains it, as in an interval that the run keeps."""
    if set(missing) <= erased_groups(bucket):
        return "its groups were erased"
    if any(origin < version <= last for origin, last in kept_intervals(bucket)):
        return ""
    if version < read_retained(bucket).rollouts:
        return "retention deleted its groups"
    return ""
