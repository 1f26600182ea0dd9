"""Patches: which values they change, and which they do not touch."""

import numpy as np
import pytest

from deltawire import codec
from deltawire.codec import patch as patches
from deltawire.errors import CorruptError, InputError


def patch_at(*positions, dtype=np.uint16):
    return codec.Patch(np.array(positions, np.int64), np.ones(len(positions), dtype))


def test_diff_spans_chunks(monkeypatch):
    monkeypatch.setattr(patches, "_CHUNK_ELEMENTS", 7)
    base = np.zeros(50, np.uint16)
    target = base.copy()
    target[[0, 6, 7, 13, 14, 49]] = 1
    patch = codec.diff(base, target)
    assert patch.positions.tolist() == [0, 6, 7, 13, 14, 49]
    assert patch.positions.dtype == np.int64
    assert len(patch) == 6


def test_diff_needs_two_alike():
    with pytest.raises(InputError):
        codec.diff(np.zeros(3, np.uint16), np.zeros(4, np.uint16))
    with pytest.raises(InputError):
        codec.diff(np.zeros(3, np.uint16), np.zeros(3, np.uint32))
    with pytest.raises(InputError):
        codec.diff(np.zeros(3, np.float16), np.zeros(3, np.float16))


@pytest.mark.parametrize("positions", [(4,), (-1,), (0, 5), (3, -1, 2), (2**40,)])
def test_out_of_bounds_is_corrupt_and_writes_nothing(positions):
    bits = np.zeros(4, np.uint16)
    with pytest.raises(CorruptError):
        codec.apply(patch_at(*positions), bits)
    with pytest.raises(CorruptError):
        codec.undo(patch_at(*positions), bits)
    assert not bits.any()


def test_wrong_targets_are_input_errors():
    with pytest.raises(InputError):
        codec.apply(patch_at(1), np.zeros(4, np.uint32))
    bits = np.zeros(4, np.uint16)
    bits.flags.writeable = False
    with pytest.raises(InputError):
        codec.apply(patch_at(1), bits)


def test_patch_checks_its_arrays():
    with pytest.raises(InputError):
        codec.Patch(np.array([1], np.int32), np.array([1], np.uint16))
    with pytest.raises(InputError):
        codec.Patch(np.array([1, 2]), np.array([1], np.uint16))
    with pytest.raises(InputError):
        codec.Patch(np.array([1]), np.array([1.0]))


def test_apply_writes_into_a_tensor_in_place():
    torch = pytest.importorskip("torch")
    base = torch.zeros(4, 4, dtype=torch.bfloat16)
    target = base.clone()
    target[1, 2] = -0.0
    target[3, 3] = 1.5
    payload = codec.encode(base, target, dtype="BF16")
    patch = codec.decode_patch(payload, base, dtype="BF16")
    old = codec.undo(patch, codec.bits_of(base))
    codec.apply(patch, base)
    assert torch.equal(base.view(torch.int16), target.view(torch.int16))
    codec.apply(old, base)
    assert not base.view(torch.int16).any()
