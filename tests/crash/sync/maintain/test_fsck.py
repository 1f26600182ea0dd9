"""fsck: a whole run has no faults, and each thing that is missing or wrong is named."""

import json

import pytest
from anchored import anchor_payload

from deltawire.cli.main import main
from deltawire.errors import CorruptError
from deltawire.store import Bucket, open_bare_bucket
from deltawire.sync import prune, read_manifest
from deltawire.sync.chain.objects import later_anchors, read_compacted_delta
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.seal import seal

LAST = 9


@pytest.fixture
def bucket(tmp_path):
    bucket = FaultyBucket(open_bare_bucket(str(tmp_path), create=True))
    publisher = start_publisher(bucket, anchor_every=4, compaction_strides=(2, 4))
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_run(bucket, deep):
    seen, before = [], len(bucket.operations)
    found = check_run(bucket, deep=deep, progress=lambda *told: seen.append(told))
    assert (found.whole, found.faults, found.unreachable) == (True, [], [])
    assert (found.versions, found.anchors, found.newest) == (LAST + 1, 3, LAST)
    anchors = len(later_anchors(bucket, newer_than=-1))
    assert found.compacted == len(bucket.list(keys.COMPACTED)) - anchors > 0
    assert found.blobs == len(bucket.list(keys.BLOBS))
    assert found.unreferenced == 0
    wanted = {"manifests": LAST + 1, "compacted deltas": found.compacted + anchors} | (
        {"versions": LAST + 1} if deep else {}
    )
    for what, total in wanted.items():
        assert [told[1:] for told in seen if told[0] == what] == [
            (done, total) for done in range(total + 1)
        ]
    assert not [
        verb for verb, _ in bucket.operations[before:] if verb in ("put", "create", "delete")
    ]


def test_a_copy_next_to_a_manifest_hides_no_version(bucket):
    # It sorts after the manifest, and carries the same number.
    bucket.put(keys.manifest(LAST) + ".bak", b"{}")
    bucket.put(f"{keys.MANIFESTS}old/{LAST - 1:010d}.json", b"{}")
    found = check_run(bucket)
    assert (found.whole, found.newest) == (True, LAST)


@pytest.mark.parametrize("deep", [True, False])
def test_each_object_missing_in_turn(bucket, deep):
    for key in bucket.list(""):
        if key == keys.RUN:
            continue
        bucket.hide(key)
        found = check_run(bucket, deep=deep)
        is_newest = key == keys.manifest(LAST)
        is_compacted = key.startswith(keys.COMPACTED)
        if is_newest or is_compacted:
            assert (
                found.whole
            )  # The version is not committed, the compacted delta not made: that is all.
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
    for key in bucket.list(keys.COMPACTED):
        if keys.compacted_of(key)[0] is not None:
            bucket.hide(key)
    (ref,) = read_blobs(bucket, run, read_manifest(bucket, run, 5).delta)
    bucket.hide(keys.blob(ref.hash))
    for deep in (True, False):
        assert check_run(bucket, deep=deep).unreachable == [5, 6, 7]
    assert check_run(bucket).whole is False


def test_damage_with_a_route_around_it_is_no_error_of_later_versions(bucket):
    run = start_run(bucket)
    base, target = 4, 8
    assert read_compacted_delta(bucket, run, base, target) is not None
    (ref,) = anchor_payload(bucket, run, 8).blobs
    bucket.hide(keys.blob(ref.hash))
    found = check_run(bucket)
    assert found.unreachable == []
    assert [fault.key for fault in found.faults] == [keys.blob(ref.hash)]


def test_what_retention_took_is_no_fault(bucket):
    run = start_run(bucket)
    prune(bucket, run, cutoff=5, grace_s=0)
    found = check_run(bucket)
    assert (found.faults, found.floor, found.pruned) == ([], 4, 4)
    bucket.put(keys.blob("0" * 64), b"left by a publisher that died")
    found = check_run(bucket)
    assert (found.unreferenced, found.unreferenced_bytes, found.whole) == (1, 29, True)


def test_retention_meanwhile_makes_no_faults(bucket):
    run = start_run(bucket)

    def strike(what, done, total):
        if what == "versions" and done == 3:
            prune(bucket, run, cutoff=LAST, grace_s=0)

    found = check_run(bucket, progress=strike)
    assert (found.floor, found.unreachable, found.whole) == (8, [], True)


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("harm", ["cut", "gone", "first", "nothing"])
def test_the_work_grows_with_the_versions_and_not_with_their_square(deep, harm):
    """However much is damaged: so many operations a version, of a short run and of a long one."""
    spent = {}
    for last in (20, 80):
        inner = open_bare_bucket("memory://")
        publisher = start_publisher(inner, anchor_every=0, compaction_strides=(2, 4))
        for version in range(last + 1):
            publisher.publish(weights(version))
        publisher.close()
        anchor = read_blobs(
            inner, start_run(inner), read_manifest(inner, start_run(inner), 0).anchor
        )[0].hash
        for key in inner.list(keys.BLOBS):
            if harm == "cut":
                inner.put(key, inner.get(key, limit=1 << 20)[:-1])
            elif harm == "gone":
                inner.delete(key)
            elif harm == "first" and key == keys.blob(anchor):
                inner.put(key, flip_bit(inner.get(key, limit=1 << 20), 77))
        bucket = FaultyBucket(inner)
        found = check_run(bucket, deep=deep)
        unnoticed = harm == "nothing" or (harm == "first" and not deep)
        assert len(found.unreachable) == (0 if unnoticed else last + 1)
        spent[last] = len(bucket.operations) / (last + 1)
    assert spent[80] <= spent[20] * 1.1
    assert spent[80] < 6


def test_damage_after_an_unreachable_version_is_reported_too(bucket):
    """A turned bit in a delta that no reader gets to is a fault all the same."""
    run = start_run(bucket)
    for key in bucket.list(keys.COMPACTED):
        if keys.compacted_of(key)[0] is not None:
            bucket.hide(key)
    for version in (5, 7):
        (ref,) = read_blobs(bucket, run, read_manifest(bucket, run, version).delta)
        bucket.damage(keys.blob(ref.hash), lambda data: flip_bit(data, 99))
        found = check_run(bucket)
        assert keys.blob(ref.hash) in {fault.key for fault in found.faults}
    assert found.unreachable == [5, 6, 7]


def test_a_compacted_delta_from_an_earlier_base_is_still_a_route(bucket):
    """The mirror has gone on over an anchor when the compacted delta is needed: it goes back."""
    run = start_run(bucket)
    compacted = read_compacted_delta(bucket, run, 6, 8)
    assert compacted is not None
    for ref in (
        *read_blobs(bucket, run, read_manifest(bucket, run, 7).delta),
        *read_blobs(bucket, run, read_manifest(bucket, run, 8).delta),
        *anchor_payload(bucket, run, 8).blobs,
        *read_blobs(bucket, run, read_compacted_delta(bucket, run, 4, 8).payload),
    ):
        bucket.hide(keys.blob(ref.hash))
    for deep in (True, False):
        assert check_run(bucket, deep=deep).unreachable == [7]


def test_lost_versions_at_the_beginning_are_an_error_unless_they_are_closed(bucket):
    run = start_run(bucket)
    for version in range(4):
        bucket.hide(keys.manifest(version))
    found = check_run(bucket)
    assert (found.whole, found.first, found.unreachable) == (False, 4, [])
    assert [fault.key for fault in found.faults] == [keys.manifest(3)]
    key = keys.retention_floor(4)
    bucket.put(key, seal(RetentionFloor(run=run.id, version=4), key=key))
    assert check_run(bucket).faults == []


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
    assert main(["fsck", str(tmp_path / "empty")]) == 2
    bucket.inner.delete(keys.RUN)
    assert main(["fsck", str(tmp_path)]) == 3
    assert main(["log", str(tmp_path / "empty")]) == 2


class Overwriting(Bucket):
    """A store that ignores If-None-Match."""

    def create(self, key, data):
        self.put(key, data)
        return True


def test_a_store_that_overwrites_is_reported_and_not_changed():
    inner = open_bare_bucket("memory://")
    start_publisher(inner).close()
    before = inner.get(keys.RUN, limit=1 << 20)
    for kind, faults in ((Bucket, 0), (Overwriting, 1)):
        found = check_run(kind(inner.store, "s3://remote", local=False))
        assert len([f for f in found.faults if "overwrites" in f.message]) == faults
    assert inner.get(keys.RUN, limit=1 << 20) == before
