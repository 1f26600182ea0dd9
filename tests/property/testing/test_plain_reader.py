"""The reader that was written from the document reads everything that the writer makes."""

import json
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.codec.delta import layout_of
from deltawire.codec.packed import E2M1, INTEGERS, encode_packed
from deltawire.store import open_bucket
from deltawire.sync import Publisher, create_run, prune
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.testing import reader as plain
from deltawire.testing.payload_reader import FormatError
from deltawire.testing.reader import Reader
from deltawire.testing.tiny import start_run, weights
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.signing import Ed25519Signer, verify

SIGNER = Ed25519Signer(b"a key for plain readers, nothing")


def pair(dtype, count, density, seed):
    """Bits of a base and of a target, of which a share differs, most of it by little."""
    rng = np.random.default_rng(seed)
    unsigned = codec.unsigned_of(dtype)
    if layout_of(dtype).exponent and dtype in {"BF16", "F32"}:
        wide = rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32)
        base = (wide >> 16).astype(unsigned) if dtype == "BF16" else wide
    else:
        base = np.frombuffer(rng.bytes(count * unsigned.itemsize), unsigned).copy()
    step = rng.integers(1, 3 if seed % 2 else 200, count).astype(unsigned)
    target = np.where(rng.random(count) < density, base + step, base).astype(unsigned)
    if count and seed % 3 == 0:
        target[rng.integers(count)] ^= unsigned.type(1 << 8 * unsigned.itemsize - 1)
    return base, target


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(codec.ITEMSIZE)),
    st.one_of(st.integers(0, 80), st.integers(0, 1500)),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.sampled_from([0, 2, 7, 100, 1 << 22]),
    st.integers(0, 2**32),
)
def test_payloads(dtype, count, density, columns, seed):
    base, target = pair(dtype, count, density, seed)
    width = 8 * base.itemsize
    delta = codec.encode(base, target, dtype=dtype, columns=columns)
    changed = plain.decode_delta(delta, base.tolist(), width)
    places = np.flatnonzero(base != target)
    assert changed == {int(i): int(target[i]) for i in places}
    anchor = codec.encode_full(base, dtype)
    assert plain.decode_anchor(anchor, count, width) == base.tolist()
    found = plain.digest_of("a tensor, é", enumerate(base.tolist()), width)
    assert plain.to_hex(found) == codec.digest_bits("a tensor, é", base).hex()


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["U8", "I32"]),
    st.integers(0, 300),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([0, 1, 12]),
    st.sampled_from([INTEGERS, E2M1]),
    st.integers(0, 2**32),
)
def test_payloads_of_codes(dtype, count, density, columns, codes, seed):
    base, target = pair(dtype, count, density, seed)
    payload = encode_packed(base, target, codes, columns=columns)
    changed = plain.decode_delta(payload, base.tolist(), 8 * base.itemsize)
    assert changed == {int(i): int(target[i]) for i in np.flatnonzero(base != target)}


@pytest.mark.parametrize("lanes", [1 << 15, (1 << 15) + 77])
def test_payloads_of_sixteen_lanes(lanes):
    base, target = pair("BF16", lanes, 0.05, 4)
    delta = codec.encode(base, target, dtype="BF16", columns=64)
    assert len(plain.decode_delta(delta, base.tolist(), 16)) == np.count_nonzero(base != target)
    assert plain.decode_anchor(codec.encode_full(base, "BF16"), lanes, 16) == base.tolist()


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 400), st.integers(1, 255))
def test_damage_is_refused_or_noticed_by_the_digest(seed, place, flip):
    base, target = pair("BF16", 300, 0.2, seed)
    payload = bytearray(codec.encode(base, target, dtype="BF16", columns=20))
    payload[place % len(payload)] ^= flip
    try:
        ours = codec.decode_patch(bytes(payload), base, dtype="BF16")
    except codec.delta.CorruptError:
        with pytest.raises(FormatError):
            plain.decode_delta(bytes(payload), base.tolist(), 16)
        return
    theirs = plain.decode_delta(bytes(payload), base.tolist(), 16)
    assert theirs == dict(zip(ours.positions.tolist(), ours.bits.tolist(), strict=True))


SPECS = st.lists(
    st.tuples(
        st.sampled_from(sorted(codec.ITEMSIZE)), st.sampled_from([(), (0, 4), (9,), (6, 7), (70,)])
    ),
    min_size=1,
    max_size=5,
)


def reader_of(bucket, *, check=None):
    return Reader(lambda key: bucket.get(key, limit=1 << 26), verify=check)


@settings(deadline=None, max_examples=20)
@given(SPECS, st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 12 << 10]), st.booleans())
def test_runs(shapes, seed, signed, inline, small):
    """Tables inline and in blobs, signed and not, tensors of every dtype, anchors and deltas."""
    specs = [TensorSpec(f"t{i}/é", shape, dtype) for i, (dtype, shape) in enumerate(shapes)]
    versions = [
        {
            spec.name: pair(spec.dtype, spec.count, 0.3, seed + 31 * v + i)[1].reshape(spec.shape)
            for i, spec in enumerate(specs)
        }
        for v in range(4)
    ]
    digest = codec.digest_model({n: a.reshape(-1) for n, a in versions[0].items()}).hex()
    signer = SIGNER if signed else None
    run = Run(
        id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest=digest,
        chunk=16 if small else 1 << 22, public_key=SIGNER.public_key if signed else "",
    )  # fmt: skip
    bucket = open_bucket("memory://")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltawire.wire.piece_table.INLINE_BYTES", inline)
        run = create_run(bucket, run, signer=signer)
        publisher = Publisher(
            bucket,
            run,
            empty_mirror(run),
            epoch=1,
            anchor_every=3,
            blob_bytes=300,
            compaction_strides=(2,),
            signer=signer,
        )
        for tensors in versions:
            publisher.publish(tensors)
            publisher.wait_for_anchor()
        publisher.close()
    reader = reader_of(bucket, check=verify)
    for version, tensors in enumerate(versions):
        expected = {
            name: array.reshape(-1).view(codec.unsigned_of(spec.dtype)).tolist()
            for spec, (name, array) in zip(specs, tensors.items(), strict=True)
        }
        assert reader.read(version) == expected
    for key in bucket.list(keys.COMPACTED):
        base, target = keys.compacted_of(key)
        if base is None:
            continue  # `read` has used it.
        stated = reader.compacted(target, base)
        held = list(reader.read(base).values())
        assert reader.advance(held, stated, stated["payload"]) == list(reader.read(target).values())


def test_what_is_wrong_is_refused():
    bucket = open_bucket("memory://")
    run = create_run(bucket, start_run(open_bucket("memory://")))
    with closing(Publisher(bucket, run, empty_mirror(run), epoch=0, anchor_every=0)) as publisher:
        for version in range(3):
            publisher.publish(weights(version))
    assert set(reader_of(bucket).read(2)) == set(weights(2))
    key = keys.manifest(2)
    data = bucket.get(key, limit=1 << 20)
    bucket.put(key, data.replace(b'"version":2', b'"version":3'))
    with pytest.raises(FormatError, match="seal"):
        reader_of(bucket).read(2)
    bucket.put(key, bucket.get(keys.manifest(1), limit=1 << 20))
    with pytest.raises(FormatError, match="of another"):
        reader_of(bucket).read(2)
    bucket.put(key, data)
    prune(bucket, run, cutoff=2, grace_s=0)
    for blob in bucket.list(keys.BLOBS):
        bucket.delete(blob)
    with pytest.raises(FormatError, match="missing"):
        reader_of(bucket).read(2)


def test_it_shares_no_code_with_deltawire():
    """It runs without NumPy, msgspec and the native module, and imports only its own codec."""
    code = (
        "import sys, importlib.util as u;"
        "s = u.spec_from_file_location('alone', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['alone'] = m; s.loader.exec_module(m);"
        "import json;"
        "print(json.dumps([n for n in sys.modules if n.split('.')[0] in"
        " ('deltawire', 'numpy', 'msgspec')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, plain.__file__], capture_output=True, check=True
    )
    own = ("object_reader", "payload_reader")
    names = {"deltawire", "deltawire.testing", *(f"deltawire.testing.{name}" for name in own)}
    assert set(json.loads(done.stdout)) == names
