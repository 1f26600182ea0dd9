"""fsck: a whole run has no faults, and each thing that is missing or wrong is named."""

import json

import pytest

from deltawire.cli.main import main
from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, retire
from deltawire.sync.chain import read_fold
from deltawire.sync.check import check_run
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys

LAST = 9


@pytest.fixture
def bucket(tmp_path):
    bucket = FaultyBucket(open_bucket(str(tmp_path), create=True))
    publisher = start_publisher(bucket, anchor_every=4, fold_strides=(2, 4))
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_run(bucket, deep):
    seen, before = [], len(bucket.operations)
    found = check_run(bucket, deep=deep, progress=lambda done, total: seen.append((done, total)))
    assert (found.whole, found.faults, found.unreachable) == (True, [], [])
    assert (found.versions, found.anchors, found.newest) == (LAST + 1, 3, LAST)
    assert found.folds == len(bucket.list(keys.FOLDS)) > 0
    assert found.blobs == len(bucket.list(keys.BLOBS))
    assert found.unreferenced == 0
    assert seen == ([(v, LAST + 1) for v in range(LAST + 2)] if deep else [])
    assert not [
        verb for verb, _ in bucket.operations[before:] if verb in ("put", "create", "delete")
    ]


@pytest.mark.parametrize("deep", [True, False])
def test_each_object_missing_in_turn(bucket, deep):
    for key in bucket.list(""):
        if key == keys.RUN:
            continue
        bucket.hide(key)
        found = check_run(bucket, deep=deep)
        is_newest = key == keys.manifest(LAST)
        is_fold = key.startswith(keys.FOLDS)
        if is_newest or is_fold:
            assert found.whole  # The version is not committed, the fold not made: that is all.
        else:
            assert key in {fault.key for fault in found.faults}, key
        bucket.heal()


def test_each_object_damaged_in_turn(bucket):
    for key in bucket.list(""):
        size = bucket.inner.size(key)
        for place in (3, 4 * size, 8 * size - 5):
            bucket.damage(key, lambda data, place=place: flip_bit(data, place))
            if key == keys.RUN:
                with pytest.raises(CorruptError):
                    check_run(bucket)
            else:
                assert key in {fault.key for fault in check_run(bucket).faults}, key
            bucket.heal()


def test_versions_without_a_way_are_named(bucket):
    run = start_run(bucket)
    for key in bucket.list(keys.FOLDS):
        bucket.hide(key)
    (ref,) = read_manifest(bucket, run, 5).delta.blobs
    bucket.hide(keys.blob(ref.hash))
    for deep in (True, False):
        assert check_run(bucket, deep=deep).unreachable == [5, 6, 7]
    assert check_run(bucket).whole is False


def test_a_way_around_is_no_error_of_the_versions_behind_it(bucket):
    run = start_run(bucket)
    base, target = 4, 8
    assert read_fold(bucket, run, base, target) is not None
    (ref,) = read_manifest(bucket, run, 8).anchor.blobs
    bucket.hide(keys.blob(ref.hash))
    found = check_run(bucket)
    assert found.unreachable == []
    assert [fault.key for fault in found.faults] == [keys.blob(ref.hash)]


def test_what_retention_took_is_no_fault(bucket):
    run = start_run(bucket)
    retire(bucket, run, cutoff=5, grace_s=0)
    found = check_run(bucket)
    assert (found.faults, found.boundary, found.retired) == ([], 4, 4)
    bucket.put(keys.blob("0" * 64), b"left by a publisher that died")
    found = check_run(bucket)
    assert (found.unreferenced, found.unreferenced_bytes, found.whole) == (1, 29, True)


def test_retention_meanwhile_makes_no_faults(bucket):
    run = start_run(bucket)

    def strike(done, total):
        if done == 3:
            retire(bucket, run, cutoff=LAST, grace_s=0)

    found = check_run(bucket, progress=strike)
    assert (found.boundary, found.unreachable, found.whole) == (8, [], True)


def test_the_commands(bucket, capsys, tmp_path):
    assert main(["fsck", str(tmp_path)]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["fsck", str(tmp_path), "--json", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] is True
    assert main(["log", str(tmp_path), "--json", "--last", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in shown["versions"]] == [9, 8, 7, 6]
    assert shown["versions"][1]["kind"] == "delta + anchor"
    run = start_run(bucket)
    wanted = read_manifest(bucket, run, 7).delta.bytes
    assert shown["versions"][2]["delta"] == wanted
    assert main(["log", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "anchor" in table
    assert len(table.splitlines()) > LAST
    bucket.inner.delete(keys.manifest(3))
    assert main(["fsck", str(tmp_path)]) == 3
    text = capsys.readouterr().out
    assert keys.manifest(3) in text
    assert text.endswith("damaged\n")
    (tmp_path / "empty").mkdir()
    assert main(["fsck", str(tmp_path / "empty")]) == 3
    assert main(["log", str(tmp_path / "empty")]) == 2
