"""Compares a trainer that was interrupted with one that was not: both end with the same bits.

A small run over two ranks is trained to its end without a break. ``resume_equal``: the same run is
asked to stop in between, by a signal to one rank, and continued; on one rank and on two.
``kill_any_rank_equal``: each rank is killed at each point of a step and of a checkpoint in turn.
Every version's digest is compared, and every shard of the last checkpoint, which holds the
optimizer's states.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training.keys import Measured, Options
from benchmarks.training.rank_runs import Start, begin, digests, run_starts
from deltawire.store import Bucket, open_bucket
from deltawire.train.checkpoint_commit import MAX_COMMIT_BYTES, Commit
from deltawire.wire import keys

VERSIONS = 18


def kill(rank: int, point: str, version: int) -> Start:
    """A start in which a rank is killed."""
    return Start(rank=rank, point=point, version=version)


KILLS = [
    *(kill(rank, point, 1) for point in ("gradients", "updated", "encoding") for rank in (0, 1)),
    kill(0, "part", 1),
    kill(1, "part", 1),
    kill(0, "save", 2),
    kill(0, "manifest", 5),
    kill(1, "waiting", 5),
    kill(1, "save", 6),
    kill(0, "committed", 9),
    kill(0, "saved", 10),
    kill(0, "deleting", 13),
    kill(1, "saved", 14),
    kill(0, "commit", 18),
]
"""In an order in which each strikes: once a version is committed, no start makes it again. Rank 0
may commit what rank 1 had stored its part of, and training goes on while a checkpoint is stored,
until the next one is due two versions later."""


def stopped(ranks: int, *, rank: int) -> list[Start]:
    """A start that a signal to one rank ends in order, and one that continues."""
    stop = Start(ranks=ranks, rank=rank, point="gradients", version=5, signal=signal.SIGTERM)
    return [stop, Start(ranks=ranks)]


def last_state(bucket: Bucket, version: int) -> dict[str, list[str]]:
    """The hash of each shard of a version's checkpoint, by tensor."""
    key = keys.checkpoint_commit(version)
    raw = bucket.get(key, limit=MAX_COMMIT_BYTES)
    assert raw is not None, "there is no checkpoint of the last version"
    tensors = Commit.decode(raw, run=bucket.url, key=key).tensors
    return {name: [chunk.hash for chunk in entry.chunks] for name, entry in tensors.items()}


def outcome(begun: Bucket, folder: Path, starts: Sequence[Start]) -> tuple[list[str], object]:
    """Trains a copy of a run to its end; returns its digests and its last state."""
    shutil.copytree(begun.url.removeprefix("file://"), folder)
    bucket = open_bucket(str(folder))
    run_starts(bucket, starts)
    found = digests(bucket)
    return found, last_state(bucket, len(found) - 1)


def measure(options: Options) -> Measured:
    """Trains whole, interrupted and killed runs, and compares them."""
    del options
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as name:
        folder = Path(name)
        begun = begin(folder, versions=VERSIONS, train={"dropout": True})
        whole = {
            ranks: outcome(begun, folder / f"whole{ranks}", [Start(ranks=ranks)])
            for ranks in (1, 2)
        }
        resumed = {
            "1 rank": outcome(begun, folder / "r1", stopped(1, rank=0)) == whole[1],
            "2 ranks": outcome(begun, folder / "r2", stopped(2, rank=1)) == whole[2],
        }
        killed = outcome(begun, folder / "killed", [*KILLS, Start()])
    moved = {str(ranks): len(set(found[0])) == VERSIONS + 1 for ranks, found in whole.items()}
    kills = [f"rank {one.rank} at {one.point} of version {one.version}" for one in KILLS]
    return Measured(
        {
            "resume_equal": all(resumed.values()) and all(moved.values()),
            "kill_any_rank_equal": killed == whole[2] and moved["2"],
        },
        {"resumed": resumed, "kills": kills, "every_step_moves_weights": moved},
    )
