"""A group beyond the bounds of its run is refused before it takes memory."""

import pytest

from deltawire.errors import CorruptError
from deltawire.rl.control import rollout_reader
from deltawire.rl.control.rollout_reader import READS, Bounds, read_group
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.rollouts import MAX_GROUP_BYTES

SMALL = Bounds(264, 1.0, 256, episodes=8, drawn=64, turns=2, routes=0)


@pytest.fixture
def bucket():
    return open_bucket("memory://")


@pytest.fixture
def decoded(monkeypatch):
    """The sizes of the objects that were decoded."""
    sizes, whole = [], rollout_reader.decode_group

    def counted(data, **where):
        sizes.append(len(data))
        return whole(data, **where)

    monkeypatch.setattr(rollout_reader, "decode_group", counted)
    return sizes


def test_a_group_that_no_honest_worker_makes_is_not_decoded(bucket, decoded):
    assert SMALL.bytes < MAX_GROUP_BYTES // 6
    bucket.put(keys.rollout("a", 0), b"\x00" * (SMALL.bytes + 1))
    with pytest.raises(CorruptError, match=f"exceeds the limit of {SMALL.bytes}"):
        read_group(bucket, "a", 0, bounds=SMALL)
    assert decoded == []


def test_damaged_bytes_are_decoded_once(bucket, decoded):
    bucket.put(keys.rollout("a", 0), b"\xff" * 1000)
    with pytest.raises(CorruptError, match="not a valid"):
        read_group(bucket, "a", 0, bounds=SMALL)
    assert decoded == [1000]


def test_other_bytes_are_decoded_again(bucket, decoded, monkeypatch):
    """An answer that a network cut off is read again, as before."""
    answers = iter([b"\xff", b"\xfe", b"\xff"])
    monkeypatch.setattr(bucket, "get", lambda key, limit: next(answers))
    with pytest.raises(CorruptError):
        read_group(bucket, "a", 0, bounds=SMALL)
    assert len(decoded) == READS - 1


def test_the_largest_group_within_the_bounds_fits(bucket):
    """Every bound at its limit, encoded."""
    from dataclasses import replace

    import numpy as np

    from deltawire.wire.rollouts import Group, Trajectory, encode_group

    context, prompt = 256, np.zeros(128, np.int32)
    one = Trajectory(
        np.zeros(128, np.int32),
        np.full(128, -1.0, np.float32),
        np.zeros(128, np.int32),
        np.ones(128, np.uint8),
        0.0,
        "stop",
        prompt=prompt,
        turns=2,
        cause="",
        probes={f"{n:03}" + "x" * 61: 1.0 for n in range(64)},
    )
    failed = replace(
        one,
        prompt=np.zeros(rollout_reader.MAX_FAILED_PROMPT, np.int32),
        cause="é" * 512,
    )
    parts = [replace(one, episode=n) for n in range(7)] + [replace(failed, episode=7)]
    group = Group("a", "0" * 64, "t" * 256, 1.0, prompt, parts, "f" * 64)
    data = encode_group(group)
    bounds = replace(SMALL, context=context, drawn=1 << 20)
    assert 4 * rollout_reader.MAX_FAILED_PROMPT < len(data) <= bounds.bytes
    bucket.put(keys.rollout("a", 0), data)
    assert read_group(bucket, "a", 0, bounds=bounds)[0].tokens == 8 * 128
