"""Runs written by earlier deltawires are read, bit for bit, for as long as their format is."""

import hashlib
import json
from pathlib import Path

import pytest

from deltawire.codec import ITEMSIZE
from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import (
    Subscriber,
    committed_versions,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.objects import newest_retention_floor, read_compacted_delta
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.follow.fetch import decode_delta
from deltawire.sync.huggingface.checkout import Checkout
from deltawire.testing.payload_reader import FormatError
from deltawire.testing.reader import Reader
from deltawire.wire import keys
from deltawire.wire.coordination import decode_intent, decode_part
from deltawire.wire.objects import FORMAT
from deltawire.wire.signing import Ed25519Signer, verify

GOLDEN = Path(__file__).parent / "golden"
SIGNER = Ed25519Signer(b"a key for golden runs, no secret")
FLOOR = 3


def golden(name):
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    return open_bucket(str(folder / "bucket")), {int(v): hashes for v, hashes in expected.items()}


def every(kind):
    """The golden runs of a kind, of each format."""
    return pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.glob(f"*-{kind}")))


def assert_bits(mirror, hashes):
    assert {n: hashlib.sha256(b.tobytes()).hexdigest() for n, b in mirror.tensors.items()} == hashes


def plain_reader(name, below="", above=None):
    folder = GOLDEN / name / "bucket" / below

    def get(key):
        path = folder / key
        return path.read_bytes() if path.is_file() else None

    return Reader(get, verify=verify, above=above)


def assert_plain(reader, version, hashes):
    tensors = reader.read(version)
    for name, spec in zip(reader.names, reader.run["tensors"], strict=True):
        size = ITEMSIZE[spec["dtype"]]
        data = b"".join(bits.to_bytes(size, "little") for bits in tensors[name])
        assert hashlib.sha256(data).hexdigest() == hashes[name], name


@pytest.mark.parametrize(
    "kind", ["signed", "unsigned", "unknown-codec", "directory", "codes", "fork"]
)
def test_there_is_one_of_today(kind):
    assert (GOLDEN / f"format-{FORMAT}-{kind}").is_dir()


@every("signed")
def test_every_version(name):
    bucket, expected = golden(name)
    run = read_run(bucket, public_key=SIGNER.public_key)
    assert newest_version(bucket) == max(expected)
    assert newest_retention_floor(bucket, run) == FLOOR
    for version, hashes in expected.items():
        manifest = read_manifest(bucket, run, version)
        assert (manifest.metadata, manifest.epoch) == ({"step": version}, 3)
        assert manifest.pruned == (version < FLOOR)
        if version < FLOOR:
            with pytest.raises(CorruptError, match="retention has pruned"):
                load_mirror(bucket, run, at=version)
            continue
        mirror = load_mirror(bucket, run, at=version)
        assert_bits(mirror, hashes)
        assert mirror.compute_held().hex() == manifest.digest
    assert run.config == {"kept": [1, None, "é"]}
    assert run.aliases == {"lm_head.weight": "embed.weight"}


@every("signed")
def test_the_plain_reader_reads_every_version(name):
    _, expected = golden(name)
    reader = plain_reader(name)
    for version in range(FLOOR, max(expected) + 1):
        assert_plain(reader, version, expected[version])
    with pytest.raises(FormatError, match="retention"):
        reader.read(0)


@every("codes")
def test_codes_of_four_bits_and_tables_of_several_pages(name):
    bucket, expected = golden(name)
    run = read_run(bucket)
    reader = plain_reader(name)
    for version, hashes in expected.items():
        assert_bits(load_mirror(bucket, run, at=version), hashes)
        assert_plain(reader, version, hashes)
    manifest = read_manifest(bucket, run, 1)
    assert manifest.delta.table.blob
    assert manifest.delta.table.pieces > 512
    magics = set()
    for version in range(1, len(expected)):
        later = read_manifest(bucket, run, version)
        payload = read_payload(bucket, run, later, later.delta)
        blobs = [bucket.get(keys.blob(blob.hash), limit=1 << 20) for blob in payload.blobs]
        magics |= {blobs[piece.blob][piece.offset :][:4] for piece in payload.pieces}
    assert b"DWD2" in magics


@every("signed")
def test_every_compacted_delta_and_every_step(name):
    bucket, expected = golden(name)
    run = read_run(bucket)
    compacted = [keys.compacted_of(key) for key in bucket.list(keys.COMPACTED)]
    assert compacted
    for base, target in compacted:
        delta, mirror = (
            read_compacted_delta(bucket, run, base, target),
            load_mirror(bucket, run, at=base),
        )
        pieces, held = decode_delta(bucket, run, delta, delta.payload, mirror)
        mirror.move(pieces, target, mirror.digest, held)
        assert_bits(mirror, expected[target])
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=3), stepwise=True)
    for version in range(4, max(expected) + 1):
        subscriber.commit(subscriber.prepare())
        assert subscriber.mirror.version == version
        assert_bits(subscriber.mirror, expected[version])


@every("signed")
def test_parts_of_it(name):
    bucket, expected = golden(name)
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, wanted=["norm", "lm_head.weight", "zähler/λ"])
    hashes = expected[max(expected)]
    wanted = ("norm", "embed.weight", "zähler/λ")
    assert_bits(mirror, {name: hashes[name] for name in wanted})


@every("signed")
def test_nothing_is_written_by_reading(name):
    bucket, _ = golden(name)
    before = bucket.list_objects("")
    load_mirror(bucket, read_run(bucket))
    assert bucket.list_objects("") == before


@every("unsigned")
def test_large_tensors_and_the_objects_of_writers(name):
    """Blocks of every number of lanes, two blocks, escapes; an anchor made later."""
    bucket, expected = golden(name)
    run = read_run(bucket)
    assert run.public_key == ""
    for version, hashes in expected.items():
        assert_bits(load_mirror(bucket, run, at=version), hashes)
    later = read_compacted_delta(bucket, run, None, 1)
    assert len(read_payload(bucket, run, later, later.payload).pieces) == len(run.tensors)
    (part,) = bucket.list(keys.PARTS)
    data = bucket.get(part, limit=1 << 20)
    assert decode_part(data, version=3, rank=0, table=run, run="r", key=part).ranks == 2
    (intent,) = bucket.list(keys.DELETION_INTENTS)
    data = bucket.get(intent, limit=1 << 20)
    assert decode_intent(data, table=run, run="r", key=intent).blobs == ["f" * 64]


@every("unsigned")
@pytest.mark.timeout(300)
def test_the_plain_reader_reads_large_tensors(name):
    _, expected = golden(name)
    assert_plain(plain_reader(name), 1, expected[1])


@every("unknown-codec")
def test_an_unknown_codec_is_one_error(name):
    bucket, expected = golden(name)
    run = read_run(bucket)
    with pytest.raises(CorruptError, match=r"'dw9'.*deltawire 9\.1 or newer"):
        read_manifest(bucket, run, 1)
    assert_bits(load_mirror(bucket, run, at=0), expected[0])
    with pytest.raises(FormatError, match=r"'dw9'.*release 9\.1"):
        plain_reader(name).read(1)


@every("directory")
def test_directories_come_out_byte_for_byte(name, tmp_path):
    bucket, expected = golden(name)
    with Checkout(bucket, read_run(bucket), tmp_path / "out") as checkout:
        for version, hashes in expected.items():
            checkout.bring_to(version)
            found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
            assert {n: hashlib.sha256(d).hexdigest() for n, d in found.items()} == hashes


@every("fork")
def test_a_fork_reads_the_tables_of_the_run_above(name):
    bucket, expected = golden(name)
    reader = plain_reader(name)
    for below, newest in (("forks/one", 6), ("forks/one/forks/two", 7)):
        reader = plain_reader(name, below, above=reader)
        place = open_bucket(f"{bucket.url}/{below}")
        run, versions = read_run(place), committed_versions(place)
        assert versions[-1] == 7
        for version in versions:
            assert_bits(load_mirror(place, run, at=version), expected[version])
            assert_plain(reader, version, expected[version])
            stated = read_manifest(place, run, version).payloads
            assert {ref.codec for ref in stated} == {"dw1-fork" if version <= newest else "dw1"}
            held = [place.exists(keys.blob(ref.table.blob)) for ref in stated if ref.table.blob]
            assert not any(held)
