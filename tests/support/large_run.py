"""Simulates the bucket and the index of a run that went on for very long, in seconds.

Manifests, events and rows of the index have the form that a run writes; the weights are those of
two versions, and no group is stored: their rows say what a reader would have found.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
from watched_run import FAMILIES, STEP_S, WORKERS, write_run

from deltawire.events import Evaluated, Event, Published, Step, encode_lines
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.watch.group_index import GroupIndex, GroupRow
from deltawire.watch.run_reader import index_path
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import encode_manifest

SEGMENT = 2000
"""Events of a segment."""


def write_large_run(place: Path, cache: Path, *, versions: int, groups: int) -> Bucket:
    """Write a run of so many versions, each trained on ``groups`` groups, and its index."""
    write_run(place, versions=2)
    bucket = open_bucket(str(place))
    _manifests(bucket, place, versions, groups)
    _events(bucket, place, versions, groups)
    _index(bucket, cache, versions, groups)
    return bucket


def _members(version: int, groups: int) -> list[tuple[str, int]]:
    numbers = range((version - 1) * groups, version * groups)
    return [(WORKERS[number % len(WORKERS)], number // len(WORKERS)) for number in numbers]


def _manifests(bucket: Bucket, place: Path, versions: int, groups: int) -> None:
    run = read_run(bucket)
    last = read_manifest(bucket, run, 2)
    assert last is not None
    for version in range(3, versions + 1):
        metadata = CommitMetadata(step=version, consumed=_members(version, groups)).to_dict()
        manifest = msgspec.structs.replace(
            last,
            version=version,
            base=version - 1,
            created_at=last.created_at + STEP_S * (version - versions),
            metadata=metadata,
        )
        (place / keys.manifest(version)).write_bytes(encode_manifest(manifest))


def _events(bucket: Bucket, place: Path, versions: int, groups: int) -> None:
    manifest = read_manifest(bucket, read_run(bucket), versions)
    assert manifest is not None
    ends = manifest.created_at
    number, waiting = 0, []
    for version in range(3, versions + 1):
        at = ends + STEP_S * (version - versions)
        reward = 0.2 + 0.6 * version / versions + 0.05 * math.sin(version / 40)
        waiting += _of_version(version, at, reward, groups)
        if version % max(1, versions // 200) == 0:
            score = Evaluated(
                process="trainer", at=at, version=version, accuracy=reward, greedy=reward,
                problems=64, samples=1, seconds=9.0, reward=reward,
            )  # fmt: skip
            waiting.append(score)
        if len(waiting) >= SEGMENT or version == versions:
            key = keys.events("trainer-9", number)
            bucket.put(key, encode_lines(waiting))
            # Readers of the newest events go by the time at which they were stored.
            os.utime(place / key, (at, at))
            number, waiting = number + 1, []


def _of_version(version: int, at: float, reward: float, groups: int) -> list[Event]:
    return [
        Step(
            process="trainer", at=at, version=version, groups=groups, dropped=0,
            reward_mean=reward, loss=0.01, grad_norm=0.3, k3=2e-4, ratio_max=1.2, clipped=0.01,
            staleness=[version % 4] * groups, queued=[0] * groups, tokens=1400, seconds=3.0,
            entropy=0.8, completion_length=150.0, truncated=0.02,
        ),
        Published(
            process="trainer", at=at, version=version, bytes_delta=8200 + version % 97,
            bytes_full=160_000, bytes_anchor=0, changed=2480, elements=80_000, blocked_ms=12.0,
            encode_ms=30.0, upload_ms=80.0,
        ),
    ]  # fmt: skip


def _index(bucket: Bucket, cache: Path, versions: int, groups: int) -> None:
    index = GroupIndex(index_path(cache, bucket, read_run(bucket)))
    for version in range(1, versions + 1):
        rows = [
            _row(worker, sequence, version, place)
            for place, (worker, sequence) in enumerate(_members(version, groups))
        ]
        index.add_version(version, 1e9 + STEP_S * version, rows)
    index.close()


def _row(worker: str, sequence: int, version: int, place: int) -> GroupRow:
    problem = (version * 7 + place) % 20_000
    family = FAMILIES[place % len(FAMILIES)]
    failed = int(version % 1000 == 0 and place == 0)
    return GroupRow(
        worker=worker, sequence=sequence, at=1e9 + STEP_S * version + 0.1 * place,
        reward=(problem % 9) / 8, tokens=400 + problem % 700, failed=failed,
        cause="the scorer took longer than 5 s" if failed else "", low=max(0, version - 2),
        high=version - 1, trained=version, task=f"{family}/problem-{problem:05}", family=family,
        answers=4, reward_min=0.0, reward_max=1.0, overlong=0, status="read",
    )  # fmt: skip
