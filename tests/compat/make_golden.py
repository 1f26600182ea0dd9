"""Writes the golden runs of today's format version that are missing.

python tests/compat/make_golden.py tests/compat/golden

Each run is a folder with its bucket and the SHA-256 of every tensor at every version.
"""

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from deltawire import codec
from deltawire.launch.branches.forking import fork_run
from deltawire.store import open_bucket
from deltawire.sync import Publisher, create_run, prune, read_manifest, read_run
from deltawire.sync.chain.payloads import store_payload
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.sync.huggingface.publish_dirs import CheckpointPublisher
from deltawire.sync.publish.anchors import upload_anchor
from deltawire.sync.publish.encoding import chunks_of
from deltawire.testing.tiny import TENSORS, weights
from deltawire.wire import keys
from deltawire.wire.coordination import DeletionIntent, Part
from deltawire.wire.manifest import CompactedDelta, encode_compacted, encode_manifest
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.seal import seal
from deltawire.wire.signing import Ed25519Signer

SIGNER = Ed25519Signer(b"a key for golden runs, no secret")
VERSIONS = 9
SMALL = [
    *TENSORS,
    TensorSpec("zähler/λ", (60,), "I64"),  # Two chunks of 50, and a name that is not ASCII.
    TensorSpec("columns", (25, 2), "BF16"),
    TensorSpec("scales", (4, 4), "F8_E8M0"),
]
LARGE = [
    TensorSpec("escapes", (5000,), "U8"),
    TensorSpec("sixteen lanes", (200, 200), "BF16"),
    TensorSpec("sixty-four lanes", ((1 << 20) + 64,), "BF16"),
    TensorSpec("two blocks", ((1 << 22) + 300,), "U8"),
]


def small(version):
    """The tiny run's weights; in ``columns``, the first column rises in every row."""
    tensors = weights(version)
    tensors["zähler/λ"] = np.arange(60, dtype="u8") * (3 + version) << np.uint64(30)
    rows = np.arange(50, dtype="u2").reshape(25, 2)
    tensors["columns"] = 0x3C00 + rows + np.array([version, 0], "u2")
    tensors["scales"] = np.arange(16, dtype="u1").reshape(4, 4) + np.uint8(version % 2)
    return tensors


def large(version):
    """Few kinds of elements, so that the blobs are small in an archive."""
    place = np.arange(5000)
    escapes = np.where(place % 50 == 7, place % 251, 9).astype("u1")
    square = (0x3C00 + np.arange(40_000) % 97).astype("u2").reshape(200, 200)
    square[:, version] += 1
    long = np.full((1 << 20) + 64, 0x3C00, "u2")
    long[:: 1 << 16] += np.uint16(version)
    blocks = np.zeros((1 << 22) + 300, "u1")
    blocks[[5, 1 << 21, (1 << 22) + 299]] = version
    return dict(zip((s.name for s in LARGE), (escapes, square, long, blocks), strict=True))


def begin(folder, specs, first, **options):
    """The bucket, the run and a publisher's arguments."""
    digest = codec.digest_model({name: bits.reshape(-1) for name, bits in first.items()})
    run = Run(
        id="60" * 16, name="golden", created_at=1.0, tensors=specs, digest=digest.hex(), **options
    )
    bucket = open_bucket(str(folder / "bucket"), create=True)
    return bucket, create_run(bucket, run, signer=SIGNER if run.public_key else None)


def publish(folder, publisher, versions, weights_of):
    """Publish versions, and write down what they are."""
    expected = {}
    for version in range(versions):
        tensors = weights_of(version)
        publisher.publish(tensors, metadata={"step": version})
        expected[version] = {
            name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()
        }
    publisher.close()
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n")


def signed(folder):
    """Small tensors in many chunks, signed; compacted deltas, tombstones and a floor."""
    bucket, run = begin(
        folder, SMALL, small(0), chunk=50, public_key=SIGNER.public_key,
        aliases={"lm_head.weight": "embed.weight"}, config={"kept": [1, None, "é"]},
    )  # fmt: skip
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=3, anchor_every=3, compaction_strides=(2, 4),
        blob_bytes=200, signer=SIGNER,
    )  # fmt: skip
    publish(folder, publisher, VERSIONS, small)
    prune(bucket, run, cutoff=3, grace_s=0, signer=SIGNER)


def unsigned(folder):
    """Large tensors, not signed; an anchor made later, a part, an intent, a directory's layout."""
    bucket, run = begin(folder, LARGE, large(0), chunk=1 << 23)
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=1, anchor_every=0, compaction_strides=()
    )
    publish(folder, publisher, 3, large)
    mirror = load_mirror(bucket, run, at=1)
    payload = upload_anchor(bucket, run, chunks_of(run, mirror), mirror)
    ref = store_payload(bucket, run, payload, version=1)
    later = CompactedDelta(
        run=run.id, version=1, payload=ref, digest=mirror.digest.hex(), created_at=2.0
    )
    bucket.create(keys.compacted(None, 1), encode_compacted(later))
    part = Part(
        run=run.id, version=3, rank=0, ranks=2, epoch=1, base_digest="0" * 32, digest="0" * 32,
        delta=ref,
    )  # fmt: skip
    bucket.put(keys.part(3, "session", 0), seal(part, key=keys.part(3, "session", 0)))
    intent = DeletionIntent(run=run.id, blobs=["f" * 64])
    key = keys.deletion_intent("intent")
    bucket.put(key, seal(intent, key=key))


def unknown_codec(folder):
    """Version 1 is coded by a codec of a later release."""
    bucket, run = begin(folder, SMALL, small(0), chunk=50)
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=1, anchor_every=0, compaction_strides=()
    )
    publish(folder, publisher, 2, small)
    manifest = read_manifest(bucket, run, 1)
    ref = msgspec.structs.replace(manifest.delta, codec="dw9", codec_since="9.1")
    changed = msgspec.structs.replace(manifest, delta=ref)
    bucket.put(keys.manifest(1), encode_manifest(changed))


CODES = [
    TensorSpec("layer.weight_packed", (1200, 8), "I32"),
    TensorSpec("layer.weight_blocks", (60, 16), "U8"),
]


def packed(version):
    """4-bit codes, of which each step changes one in four elements."""
    place = np.arange(9600, dtype="u8")
    words = place * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    codes = (place % 8 * 4).astype("u4")
    words = words.astype("u4") ^ (np.uint32(version) << codes) * (place % 4 == 0)
    blocks = np.arange(960, dtype="u2") * 7 % 251
    blocks = blocks.astype("u1") ^ np.uint8(version) * (np.arange(960) % 5 == 0)
    return {
        "layer.weight_packed": words.astype("u4").reshape(1200, 8),
        "layer.weight_blocks": blocks.astype("u1").reshape(60, 16),
    }


def codes(folder):
    """4-bit codes (`DWD2`) in chunks so small that a table has several pages, in a blob."""
    bucket, run = begin(folder, CODES, packed(0), chunk=16)
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=2, anchor_every=2, compaction_strides=(2,)
    )
    publish(folder, publisher, 4, packed)


def directory_of(step):
    """A model's directory: the bytes of each file by its name."""
    tensors = {"b.weight": ("BF16", [5, 3]), "a.weight": ("F32", [4])}
    header, data = {"__metadata__": {"step": str(step)}}, b""
    for name, (dtype, shape) in tensors.items():
        count = int(np.prod(shape))
        bits = (np.arange(count) * 7 + step).astype(codec.unsigned_of(dtype)).tobytes()
        offsets = [len(data), len(data) + len(bits)]
        header[name] = {"shape": shape, "dtype": dtype, "data_offsets": offsets}
        data += bits
    text = json.dumps(header).encode() + b"   "
    weight_file = len(text).to_bytes(8, "little") + text + data
    config = json.dumps({"step": step, "é": None}).encode()
    return {"model.safetensors": weight_file, "config.json": config}


def directory(folder):
    """Published from directories, to be written again byte for byte."""
    bucket = open_bucket(str(folder / "bucket"), create=True)
    expected = {}
    with TemporaryDirectory() as root, CheckpointPublisher(bucket) as publisher:
        for step in range(3):
            path = Path(root, f"checkpoint-{step}")
            path.mkdir()
            for name, data in directory_of(step).items():
                (path / name).write_bytes(data)
            publisher.publish(path)
            expected[step] = {
                n: hashlib.sha256(d).hexdigest() for n, d in directory_of(step).items()
            }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def fork(folder):
    """A fork that names the piece tables of the run above, and a fork of that fork."""
    bucket, run = begin(folder, SMALL, small(0), chunk=50)
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=1, anchor_every=4, compaction_strides=(),
        blob_bytes=200,
    )  # fmt: skip
    publish(folder, publisher, VERSIONS, small)
    first = open_bucket(fork_run(bucket, run, 6, "one").url)
    below = read_run(first)
    publisher = Publisher(
        first, below, load_mirror(first, below), epoch=2, anchor_every=0, compaction_strides=()
    )
    publisher.publish(small(7))
    publisher.close()
    second = fork_run(first, below, 7, "two")
    for place in (first, open_bucket(second.url)):
        place.delete(keys.CLOCK)


def main(root):
    for make in (signed, unsigned, unknown_codec, directory, codes, fork):
        folder = Path(root, f"format-1-{make.__name__.replace('_', '-')}")
        if folder.exists():
            continue
        folder.mkdir(parents=True)
        make(folder)
        (folder / "bucket" / keys.CLOCK).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
