"""Any model over any versions: what is followed and what is loaded is what was published."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.store import open_bucket
from deltawire.sync import Mirror, Publisher, Subscriber, create_run, load_mirror
from deltawire.testing.tiny import same_bits
from deltawire.wire.run import Run, TensorSpec

NAMES = ["model.embed.weight", "a", "b/../c", "ü ", "0" * 300]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (5, 9), (2, 3, 4), (700,)]


@st.composite
def histories(draw):
    """A tensor table and the tensors of each version."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    specs = [
        TensorSpec(
            name,
            draw(st.sampled_from(SHAPES)),
            draw(st.sampled_from(["BF16", "BF16", "F32", "F64", "U8"])),
        )
        for name in names
    ]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    now = {
        spec.name: np.frombuffer(
            rng.bytes(spec.count * codec.ITEMSIZE[spec.dtype]), codec.unsigned_of(spec.dtype)
        ).reshape(spec.shape)
        for spec in specs
    }
    versions = [now]
    for density in draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), max_size=7)):
        now = {
            name: np.asarray(
                np.where(rng.random(bits.shape) < density, rng.integers(0, 256, bits.shape), bits)
            ).astype(bits.dtype)
            for name, bits in now.items()
        }
        versions.append(now)
    return specs, versions


@settings(deadline=None, max_examples=40)
@given(histories(), st.integers(1, 5), st.data())
def test_publish_and_follow(history, anchor_every, data):
    specs, versions = history
    bucket = open_bucket("memory://")
    flat = {name: bits.reshape(-1) for name, bits in versions[0].items()}
    digest = codec.digest_model(flat).hex()
    run = create_run(
        bucket, Run(id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest=digest)
    )
    blank = {spec.name: np.zeros(spec.count, codec.unsigned_of(spec.dtype)) for spec in specs}
    publisher = Publisher(
        bucket, run, Mirror(blank, -1, codec.ZERO), epoch=0, anchor_every=anchor_every
    )
    try:
        for number, tensors in enumerate(versions):
            assert publisher.publish(tensors) == number
    finally:
        publisher.close()

    start = data.draw(st.integers(0, len(versions) - 1), label="joins at")
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=start), stepwise=True)
    for number in range(start, len(versions)):
        mirror = subscriber.mirror
        assert mirror.version == number
        assert same_bits(mirror.tensors, versions[number])
        assert mirror.digest == codec.digest_model(mirror.tensors)
        before = {name: bits.copy() for name, bits in mirror.tensors.items()}
        update = subscriber.prepare()
        assert same_bits(mirror.tensors, before)
        if number + 1 == len(versions):
            assert update is None
        else:
            subscriber.commit(update)
    at = data.draw(st.integers(0, len(versions) - 1), label="loaded at")
    loaded = load_mirror(bucket, run, at=at)
    assert loaded.version == at
    assert same_bits(loaded.tensors, versions[at])
