"""Runs written by earlier deltawires are read, bit for bit, for as long as their format is."""

import hashlib
import json
from pathlib import Path

import pytest

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import (
    Compactor,
    Subscriber,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.objects import newest_retention_floor, read_compacted_delta
from deltawire.sync.follow.fetch import decode_delta
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT
from deltawire.wire.signing import Ed25519Signer

GOLDEN = Path(__file__).parent / "golden"
SIGNER = Ed25519Signer(b"a key for golden runs, no secret")


@pytest.fixture(params=sorted(path.name for path in GOLDEN.iterdir()))
def golden(request):
    folder = GOLDEN / request.param
    expected = json.loads((folder / "expected.json").read_text())
    return open_bucket(str(folder / "bucket")), {int(v): hashes for v, hashes in expected.items()}


def assert_bits(mirror, hashes):
    assert {n: hashlib.sha256(b.tobytes()).hexdigest() for n, b in mirror.tensors.items()} == hashes


def test_there_is_one_of_today():
    assert f"format-{FORMAT}" in {path.name for path in GOLDEN.iterdir()}


def test_every_version(golden):
    bucket, expected = golden
    run = read_run(bucket, public_key=SIGNER.public_key)
    assert newest_version(bucket) == max(expected)
    boundary = newest_retention_floor(bucket, run)
    assert boundary == 3
    for version, hashes in expected.items():
        manifest = read_manifest(bucket, run, version)
        assert (manifest.metadata, manifest.epoch) == ({"step": version}, 3)
        assert manifest.pruned == (version < boundary)
        if version < boundary:
            with pytest.raises(CorruptError, match="retention has pruned"):
                load_mirror(bucket, run, at=version)
            continue
        mirror = load_mirror(bucket, run, at=version)
        assert_bits(mirror, hashes)
        assert mirror.compute_held().hex() == manifest.digest
    assert run.config == {"kept": [1, None, "é"]}
    assert run.aliases == {"lm_head.weight": "embed.weight"}


def test_every_fold_and_every_step(golden):
    bucket, expected = golden
    run = read_run(bucket)
    folds = [keys.compacted_of(key) for key in bucket.list(keys.COMPACTED)]
    assert folds
    for base, target in folds:
        fold, mirror = (
            read_compacted_delta(bucket, run, base, target),
            load_mirror(bucket, run, at=base),
        )
        pieces, held = decode_delta(bucket, run, fold, fold.payload, mirror)
        mirror.move(pieces, target, mirror.digest, held)
        assert_bits(mirror, expected[target])
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=3), stepwise=True)
    for version in range(4, max(expected) + 1):
        subscriber.commit(subscriber.prepare())
        assert subscriber.mirror.version == version
        assert_bits(subscriber.mirror, expected[version])


def test_parts_of_it(golden):
    bucket, expected = golden
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, wanted=["norm", "lm_head.weight"])
    hashes = expected[max(expected)]
    assert_bits(mirror, {name: hashes[name] for name in ("norm", "embed.weight")})


def test_nothing_is_written_by_reading(golden):
    bucket, _ = golden
    before = bucket.list_objects("")
    run = read_run(bucket)
    load_mirror(bucket, run)
    assert bucket.list_objects("") == before
    Compactor(bucket, run, (), signer=SIGNER)
