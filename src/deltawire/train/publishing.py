"""Opens the publisher of one trainer rank, which builds on a version of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltawire.export.shards import LocalShard
from deltawire.store import Bucket
from deltawire.sync import AnchorStats, CommitStats, Publisher, ShardPublisher, load_mirror
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.offload import offloaded_mirror
from deltawire.sync.publish.sharded import load_ranges
from deltawire.train.parallel import TrainerMesh
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


def open_rank_publisher(
    bucket: Bucket,
    run: Run,
    mesh: TrainerMesh,
    shards: Callable[[], Mapping[str, LocalShard]],
    *,
    version: int,
    epoch: int,
    session: str,
    anchor_every: int,
    compaction_strides: Sequence[int] = (),
    signer: Signer | None = None,
    on_commit: Callable[[CommitStats], None] | None = None,
    on_anchor: Callable[[AnchorStats], None] | None = None,
    head: Mirror | None = None,
    frozen: Collection[str] = (),
    snapshot_dir: Path | None = None,
) -> Publisher | ShardPublisher:
    """Returns the publisher of this rank's shards, which builds on ``version``.

    ``shards`` gives what this rank publishes now, of which only the ranges are read, and only where
    there are several ranks. ``epoch`` and ``session`` are the same on all ranks. A single process
    may pass ``head``, the whole of that version, which the publisher takes over; it keeps no
    second copy of tensors in ``frozen``, which do not change. With
    ``snapshot_dir`` the publisher's copies lie in files there, and ``head`` is not used.
    """
    settings: dict[str, Any] = {
        "epoch": epoch,
        "anchor_every": anchor_every,
        "compaction_strides": compaction_strides,
        "on_commit": on_commit,
        "on_anchor": on_anchor,
        "signer": signer,
    }
    if mesh.ranks > 1:
        ranges = {name: (one.start, one.bits.numel()) for name, one in shards().items()}
        mirror = load_ranges(bucket, run, ranges, at=version, snapshot_dir=snapshot_dir)
        return ShardPublisher(
            bucket, run, mirror, rank=mesh.rank, ranks=mesh.ranks, session=session, **settings
        )
    if snapshot_dir is not None:
        head = load_mirror(bucket, run, at=version, into=offloaded_mirror(run, snapshot_dir))
    elif head is None:
        head = load_mirror(bucket, run, at=version)
    assert head is not None
    return Publisher(bucket, run, head, frozen=frozen, **settings)
