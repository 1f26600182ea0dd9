"""The swap by itself, timed: what is measured is a real swap, and its memory does not grow."""

import msgspec
import pytest

from benchmarks.scatter import LAYER_ELEMENTS, time_scatter
from deltawire.errors import InputError


def test_allocation_follows_the_changes_and_not_the_model():
    small, large = (time_scatter(n * LAYER_ELEMENTS, 20_000, rounds=1) for n in (1, 3))
    assert large.parameters == 3 * small.parameters == 3 * LAYER_ELEMENTS
    assert 0.97 * 20_000 < small.changes <= 20_000
    for one in (small, large):
        assert one.staged_bytes == one.changes * (8 + 2 + 2)
        assert one.swap_bytes < 1 << 18
        assert min(value for value in msgspec.structs.astuple(one)[1:]) > 0
        assert one.device == "cpu"
    more = time_scatter(LAYER_ELEMENTS, 200_000, rounds=1)
    assert 9 < more.staged_bytes / small.staged_bytes < 10.5
    assert more.swap_bytes < 1 << 18


def test_no_device_is_made_up():
    with pytest.raises(InputError, match="unknown device tpu"):
        time_scatter(LAYER_ELEMENTS, 10, device="tpu")
