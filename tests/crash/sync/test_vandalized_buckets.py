"""Readers of vandalized buckets end with the right bits or one clear error: no hang, no growth of
memory, no dead thread, no traceback.

1,000 seeds: ``python tests/support/vandal.py --seeds 1000``, which can be stopped and started.
"""

import pytest
from vandal import Check, Worlds, check_seed, copy_of

from deltawire.store import open_bucket, retrying
from deltawire.sync import Subscriber, load_mirror, open_publisher, read_manifest, read_run
from deltawire.sync.chain.payloads import read_blobs
from deltawire.testing.tiny import TENSORS, same_bits, weights
from deltawire.wire import keys

SEEDS = 20


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def worlds():
    return Worlds()


@pytest.mark.parametrize("number", range(SEEDS))
def test_a_vandalized_bucket(worlds, number, drill_seed):
    check = check_seed(worlds, drill_seed * SEEDS + number)
    assert check.outcomes.keys() >= {"fsck", "load", "thread", "pull", "relay", "prune", "publish"}


def test_the_drill_would_notice(worlds, tmp_path):
    """Wrong bits at the right number, a hang, and an error without words."""
    check = Check(worlds, 0, tmp_path)
    with pytest.raises(AssertionError, match="other bits"):
        check.right(weights(4), 3)
    with pytest.raises(ZeroDivisionError):
        check.one("traceback", lambda: 1 // 0)


def test_a_compacted_delta_that_leads_backwards_is_no_loop(worlds, tmp_path):
    """A key whose base is not below its target once sent readers round in circles."""
    check = Check(worlds, 0, tmp_path)
    for key in check.bucket.list(""):
        check.bucket.delete(key)
    for key in check.whole.list(""):
        check.bucket.put(key, check.whole.get(key, limit=1 << 26))
    for base, target in ((9, 4), (4, 4), (9_999_999_999, 0), (11, 9_999_999_999)):
        check.bucket.put(keys.compacted(base, target), b"junk")
    check.bucket.put(keys.manifest(9_999_999_999), b"junk")
    check.all()
    for name in ("load", "follow from 0", "thread", "manifests", "relay", "pull"):
        assert check.outcomes[name].startswith("version 11"), check.outcomes
    assert check.outcomes["publish"] == "version 12"


def test_a_publisher_continues_from_the_newest_reachable_version(worlds):
    """Its next version is stored whole: readers that hold what it could not reach go on too."""
    bucket = copy_of(worlds.runs[False], open_bucket("memory://"))
    run = read_run(bucket)
    held = load_mirror(bucket, run)
    for base, target in ((8, 10), (8, 12)):
        bucket.delete(keys.compacted(base, target))
    for ref in read_blobs(bucket, run, read_manifest(bucket, run, 10).delta):
        bucket.delete(keys.blob(ref.hash))
    assert load_mirror(bucket, run).version == 9
    publisher = open_publisher(bucket, weights(0), specs=TENSORS, compaction_strides=())
    assert publisher.publish(weights(12)) == 12
    publisher.close()
    made = read_manifest(bucket, run, 12)
    assert (made.base, made.anchor is not None) == (9, True)
    Subscriber(bucket, run, held).wait_for(12, timeout_s=120)
    assert same_bits(held.tensors, weights(12))
    assert same_bits(load_mirror(bucket, run).tensors, weights(12))
