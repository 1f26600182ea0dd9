"""Tensors that are left out of a version keep their bits, whatever was published before."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.store import open_bare_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import load_mirror, open_publisher
from deltawire.wire import keys
from deltawire.wire.run import TensorSpec

SPECS = [
    TensorSpec("a", (70,), "BF16"),
    TensorSpec("b", (5, 9), "F32"),
    TensorSpec("c", (8,), "I32"),
]
NAMES = [spec.name for spec in SPECS]
DTYPES = {"a": "<u2", "b": "<u4", "c": "<u4"}


def fresh(seed):
    rng = np.random.default_rng(seed)
    return {s.name: rng.integers(0, 1 << 15, s.shape).astype(DTYPES[s.name]) for s in SPECS}


@given(steps=st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.booleans()), max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_left_out_keeps_its_bits(steps):
    bucket = open_bare_bucket("memory://")
    held = fresh(0)
    publisher = open_publisher(bucket, held, anchor_every=3, compaction_strides=())
    run = publisher.run
    for number, (names, whole) in enumerate(steps, start=1):
        new = fresh(number)
        held = {n: new[n] if n in names else held[n] for n in NAMES}
        if whole:
            publisher.publish(held)
        else:
            publisher.publish({n: held[n] for n in names}, partial=True)
        publisher.flush()
        found = load_mirror(bucket, run)
        for name in NAMES:
            assert np.array_equal(found.tensors[name], held[name].reshape(-1)), (number, name)
    publisher.close()


class Refusing(DelegatingBucket):
    """Refuses blobs while told to."""

    refuse = False

    def create(self, key, data):
        if self.refuse and key.startswith(keys.BLOBS):
            raise InputError("full")
        return super().create(key, data)

    def put(self, key, data):
        if self.refuse and key.startswith(keys.BLOBS):
            raise InputError("full")
        super().put(key, data)


def test_an_upload_that_failed_leaves_nothing_of_its_weights():
    """Its weights were staged already; the next version must not carry them."""
    bucket = Refusing(open_bare_bucket("memory://"))
    publisher = open_publisher(bucket, fresh(0), compaction_strides=())
    publisher.flush()
    bucket.refuse = True
    publisher.publish(fresh(1))
    with pytest.raises(InputError, match="full"):
        publisher.flush()
    bucket.refuse = False
    publisher.publish({"c": fresh(2)["c"]}, partial=True)
    publisher.close()
    found = load_mirror(bucket, publisher.run)
    wanted = {**fresh(0), "c": fresh(2)["c"]}
    assert all(np.array_equal(found.tensors[n], wanted[n].reshape(-1)) for n in NAMES)


def test_without_partial_every_tensor_is_required():
    bucket = open_bare_bucket("memory://")
    publisher = open_publisher(bucket, fresh(0))
    with pytest.raises(InputError, match="only one of the two has"):
        publisher.publish({"a": fresh(1)["a"]})
    with pytest.raises(InputError, match="only one of the two has"):
        publisher.publish({"z": fresh(1)["a"]}, partial=True)
    publisher.close()
