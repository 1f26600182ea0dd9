"""Starts ranks that publish shards of one model, for several tests."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from deltawire import codec
from deltawire.errors import DeltawireError
from deltawire.store import RetryingBucket
from deltawire.sync import Mirror, ShardPublisher
from deltawire.testing.tiny import TENSORS, start_run, weights

RANKS = 3


def cut(spec, rank):
    """Returns a rank's range of a tensor: uneven, and not at the borders of chunks."""
    step = -(-spec.count // RANKS)
    return min(rank * step, spec.count), min((rank + 1) * step, spec.count)


def shards(version, rank, seed=0):
    tensors = weights(version, seed=seed)
    found = {}
    for spec in TENSORS:
        start, stop = cut(spec, rank)
        if stop > start:
            found[spec.name] = tensors[spec.name].reshape(-1)[start:stop].copy()
    return found


def mirror_of(version, rank, digest=codec.ZERO):
    starts = {spec.name: cut(spec, rank)[0] for spec in TENSORS if cut(spec, rank)[0]}
    return Mirror(shards(max(version, 0), rank), version, digest, starts)


def rank_publisher(
    bucket, rank, *, version=-1, digest=codec.ZERO, session="s0", mirror=None, **options
):
    options = {"epoch": 0, "anchor_every": 3, "timeout_s": 30, "ranks": RANKS, **options}
    return ShardPublisher(
        RetryingBucket.over(bucket),
        start_run(bucket),
        mirror_of(version, rank, digest) if mirror is None else mirror,
        rank=rank,
        session=session,
        **options,
    )


def publish_all(publishers, version, seed=0):
    """Publishes from all ranks at once; returns what each raised, or None."""

    def one(publisher):
        try:
            publisher.publish(shards(version, publisher.rank, seed), metadata={"v": version})
            publisher.flush()
        except DeltawireError as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(one, publishers))


def close(publishers):
    for publisher in publishers:
        with suppress(DeltawireError):
            publisher.close()
