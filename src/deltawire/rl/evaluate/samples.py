"""Samples of what a run was trained on: episodes as text, newest versions first.

A version's manifest names the groups that it consumed, so a version's samples take one read of its
manifest and one for each group; only manifests are listed, and none if a version is named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deltawire.errors import CorruptError, InputError
from deltawire.rl.control.rollout_reader import read_group
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import Group, Trajectory
from deltawire.wire.run import Run

Decode = Callable[[Sequence[int]], str]


class SamplePart(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a sample's text; ``drawn`` if the model wrote it."""

    drawn: bool
    text: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a consumed group. ``version`` was trained on it; ``sampled`` are the oldest
    and the newest version that drew its tokens. ``cause`` says why an episode failed."""

    version: int
    worker: str
    sequence: int
    index: int
    task: str
    family: str
    reward: float
    finish: str
    cause: str
    tokens: int
    logprob_mean: float | None
    sampled: tuple[int, int] | None
    probes: dict[str, float]
    prompt: str
    parts: list[SamplePart]


@dataclass(frozen=True, kw_only=True)
class SampleFilter:
    """Which samples are wanted; the default wants all. ``task`` is part of an identity, ``cause``
    part of the reason for a failure in any case, ``family`` and ``worker`` are whole names."""

    version: int | None = None
    task: str = ""
    family: str = ""
    worker: str = ""
    reward_min: float = float("-inf")
    reward_max: float = float("inf")
    failed: bool = False
    cause: str = ""

    def wants_group(self, group: Group) -> bool:
        """Returns whether any sample of the group may be wanted."""
        family = not self.family or group.family == self.family
        return family and self.task in group.task

    def wants(self, trajectory: Trajectory) -> bool:
        """Returns whether a sample of a wanted group is wanted."""
        inside = self.reward_min <= trajectory.reward <= self.reward_max
        failed = bool(trajectory.cause) or not self.failed
        return inside and failed and self.cause.casefold() in trajectory.cause.casefold()


def read_samples(
    bucket: Bucket, run: Run, wanted: SampleFilter, decode: Decode
) -> Iterator[Sample]:
    """Yields the wanted samples, the newest versions' first.

    Groups that retention deleted, and damaged ones, are left out. Raises `InputError` if the named
    version does not exist, `CorruptError` if its manifest cannot be read.
    """
    if wanted.version is not None:
        yield from _of_version(bucket, run, wanted.version, wanted, decode)
        return
    version = newest_version(bucket) or 0
    while version > 0:
        # A number that an unreadable object occupies is not a version.
        with contextlib.suppress(CorruptError, InputError):
            yield from _of_version(bucket, run, version, wanted, decode)
        version -= 1


def _of_version(
    bucket: Bucket, run: Run, version: int, wanted: SampleFilter, decode: Decode
) -> Iterator[Sample]:
    manifest = read_manifest(bucket, run, version)
    if manifest is None:
        raise InputError(
            f"the run has no version {version}", hint="deltawire log lists them", run=bucket.url
        )
    metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
    for place, (worker, sequence) in enumerate(metadata.consumed):
        if wanted.worker and worker != wanted.worker:
            continue
        expected = metadata.hashes[place] if metadata.hashes else ""
        try:
            found = read_group(bucket, worker, sequence, expected=expected)
        except CorruptError:
            continue
        if found is None or not wanted.wants_group(found[0]):
            continue
        group = found[0]
        for index, trajectory in enumerate(group.trajectories):
            if wanted.wants(trajectory):
                yield _sample(version, sequence, index, group, trajectory, decode)


def _sample(
    version: int, sequence: int, index: int, group: Group, trajectory: Trajectory, decode: Decode
) -> Sample:
    drawn_T = trajectory.mask_T == 1
    written_T = group.whole(index).mask_T == 1  # By the model, here or in an episode before.
    versions = trajectory.versions_T[drawn_T]
    count = int(drawn_T.sum())
    parts: list[SamplePart] = []
    start = 0
    for end in range(1, len(drawn_T) + 1):
        if end == len(drawn_T) or written_T[end] != written_T[start]:
            tokens: list[Any] = trajectory.tokens_T[start:end].tolist()
            parts.append(SamplePart(drawn=bool(written_T[start]), text=decode(tokens)))
            start = end
    return Sample(
        version=version,
        worker=group.worker,
        sequence=sequence,
        index=index,
        task=group.task,
        family=group.family,
        reward=trajectory.reward,
        finish=trajectory.finish,
        cause=trajectory.cause,
        tokens=count,
        logprob_mean=float(trajectory.logprobs_T[drawn_T].mean()) if count else None,
        sampled=(int(versions.min()), int(versions.max())) if count else None,
        probes=dict(trajectory.probes),
        prompt=decode(group.prompt_of(trajectory).tolist()),
        parts=parts,
    )


def require_trained(bucket: Bucket) -> None:
    """Raises `InputError` if no version of the run was trained yet."""
    if not newest_version(bucket):
        raise InputError(
            "no version of the run was trained yet",
            hint="groups are shown once a version consumed them",
            run=bucket.url,
        )
