"""Pulls from vandalized buckets end in one clear error or the right bits, and soon."""

import random
import time

import pytest
from checkpoint_dirs import files_in, write_directory

from deltawire.errors import DeltawireError
from deltawire.store import open_bucket
from deltawire.sync import Checkout, CheckpointPublisher, newest_version, read_run
from deltawire.testing.faulty import flip_bit
from deltawire.wire import keys

LAST = 4
JUNK = [
    keys.manifest(9_999_999_999),
    keys.manifest(LAST + 1),
    f"{keys.MANIFESTS}x.json",
    f"{keys.COMPACTED}0000000009-0000000002.json",
    f"{keys.RETENTION_FLOORS}0000000040.json",
    f"{keys.DELETION_INTENTS}{'a' * 32}.json",
    f"{keys.BLOBS}{'0' * 64}",
]


def vandalize(bucket, other, random_):
    """Flip, cut, delete, overwrite and add a few objects."""
    for _ in range(random_.randint(1, 6)):
        key = random_.choice(bucket.list(""))
        data = bucket.get(key, limit=1 << 30)
        match random_.randrange(5):
            case 0:
                bucket.put(key, flip_bit(data, random_.randrange(1 << 30)))
            case 1:
                bucket.put(key, data[: random_.randint(0, len(data))])
            case 2:
                bucket.delete(key)
            case 3:
                foreign = random_.choice(other.list(""))
                bucket.put(key, other.get(foreign, limit=1 << 30))
            case 4:
                junk = random_.choice([b"", b"{}", b"junk", data])
                bucket.put(random_.choice(JUNK), junk)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Five directories, a bucket of them, and a bucket of another run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = [write_directory(folder / f"c-{n}", n) for n in range(LAST + 1)]
    bucket, other = open_bucket("memory://"), open_bucket("memory://")
    for where, directories in ((bucket, paths), (other, paths[::-1])):
        with CheckpointPublisher(where, anchor_every=2, compaction_strides=(2,)) as publisher:
            for path in directories:
                publisher.publish(path)
    return [files_in(path) for path in paths], bucket, other


@pytest.mark.parametrize("seed", range(20))
def test_a_pull_ends_in_one_error_or_the_right_bits(published, tmp_path, seed, drill_seed):
    whole, bucket, other = published
    random_ = random.Random(f"{seed} {drill_seed}")
    copy = open_bucket("memory://")
    for key in bucket.list(""):
        copy.put(key, bucket.get(key, limit=1 << 30))
    out = tmp_path / "out"
    run = read_run(copy)
    if random_.random() < 0.5:
        with Checkout(copy, run, out) as checkout:
            checkout.bring_to(random_.randint(0, LAST))
    before = files_in(out) if out.exists() else None
    vandalize(copy, other, random_)
    started, failure = time.monotonic(), None
    try:
        run = read_run(copy)
        newest = None if run is None else newest_version(copy)
        if newest is not None:
            with Checkout(copy, run, out) as checkout:
                checkout.bring_to(newest)
            assert files_in(out) == whole[newest]
    except DeltawireError as error:
        failure = str(error)
    if failure is not None:
        assert "\n" not in failure
        assert not out.exists() or files_in(out) == before
    assert time.monotonic() - started < 60
