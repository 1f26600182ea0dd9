"""Every peer's format gives back the target's bits: a peer that loses any must not be compared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import open_coding
from benchmarks.peers import PEERS, missing
from benchmarks.peers.container import Entry, pack, unpack

FORMATS = ["deltawire", "anchor", *PEERS]

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 600)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
        st.just((3, 70_000)),
    ),
    min_size=1,
    max_size=4,
)


def models(shapes, density, kind, seed):
    """Old and new bits by name, the changes at random places, in a run, or at both ends."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for number, shape in enumerate(shapes):
        before = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        after = before.copy()
        flat = after.reshape(-1)
        if kind == "scattered":
            chosen = np.flatnonzero(rng.random(flat.size) < density)
        elif kind == "run":
            chosen = np.arange(flat.size // 3, flat.size // 3 + int(density * flat.size / 2))
        else:
            chosen = np.unique([0, flat.size - 1])
        flat[chosen] ^= rng.integers(1, 1 << 16, chosen.size, dtype=np.uint16)
        old[f"layers.{number}.weight"], new[f"layers.{number}.weight"] = before, after
    return old, new


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(
    SHAPES,
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from(["scattered", "run", "ends"]),
    st.integers(0, 2**32 - 1),
)
def test_the_targets_bits_come_back(name, shapes, density, kind, seed):
    if name in PEERS and missing(name):
        pytest.skip(f"{name} needs {missing(name)}")
    old, new = models(shapes, density, kind, seed)
    coding = open_coding(name, 1)
    payload = b"".join(coding.encode(old, new))
    weights = {key: bits.copy() for key, bits in old.items()}
    coding.decode(payload, weights)
    assert weights.keys() == new.keys()
    for key, bits in new.items():
        assert weights[key].shape == bits.shape
        assert weights[key].tobytes() == bits.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_does_not_change_the_operands(name):
    if name in PEERS and missing(name):
        pytest.skip(f"{name} needs {missing(name)}")
    old, new = models([(40, 50), (7,)], 0.2, "scattered", 1)
    kept = [{k: v.tobytes() for k, v in model.items()} for model in (old, new)]
    open_coding(name, 1).encode(old, new)
    assert [{k: v.tobytes() for k, v in model.items()} for model in (old, new)] == kept


def test_the_container_is_what_safetensors_reads():
    """The frame that sizes are compared with is the real one."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": Entry("U8", np.arange(5, dtype=np.uint8)),
        "b.indices": Entry("I32", np.array([3, -1], np.int32)),
    }
    data = b"".join(pack(arrays, {"version": "1"}))
    loaded = safetensors.load(data)
    assert loaded.keys() == arrays.keys()
    for name, entry in arrays.items():
        assert loaded[name].dtype == entry.array.dtype
        assert loaded[name].tobytes() == entry.array.tobytes()
    ours, metadata = unpack(data)
    assert metadata == {"version": "1"}
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: entry.array.tobytes() for name, entry in arrays.items()
    }
