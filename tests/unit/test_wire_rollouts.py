"""A group comes back as it went, and each fault in one is found."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.rollouts import Group, Trajectory, decode_group, encode_group


def trajectory(tokens=(5, 6, 7), logprobs=(-0.5, -1.0, 0.0), versions=(3, 4, 4), mask=(1, 0, 1)):
    return Trajectory(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        np.array(mask, np.uint8),
        1.5,
        "stop",
    )


def group(*trajectories, **changes):
    fields = {
        "worker": "w-1",
        "nonce": "n",
        "task": "t",
        "temperature": 0.75,
        "prompt": np.array([1, 2, 3], np.int32),
    }
    members = list(trajectories) or [trajectory(), trajectory()]
    return Group(**{**fields, **changes}, trajectories=members)


def decode(data):
    return decode_group(data, run="s3://b", key="rollouts/w-1/0000000000")


def refused(value):
    data = value if isinstance(value, bytes) else encode_group(value)
    with pytest.raises(CorruptError) as caught:
        decode(data)
    assert caught.value.key == "rollouts/w-1/0000000000"
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def same(one, two):
    heads = [(g.worker, g.nonce, g.task, g.temperature, g.prompt.tolist()) for g in (one, two)]
    bodies = [
        [
            (
                t.tokens_T.tolist(),
                t.logprobs_T.tobytes(),
                t.versions_T.tolist(),
                t.mask_T.tolist(),
                t.reward,
                t.finish,
            )
            for t in g.trajectories
        ]
        for g in (one, two)
    ]
    return heads[0] == heads[1] and bodies[0] == bodies[1]


def test_round_trip():
    value = group()
    back = decode(encode_group(value))
    assert same(back, value)
    assert not same(back, group(trajectory(), trajectory(tokens=(5, 6, 8))))
    dtypes = {a.dtype for t in back.trajectories for a in (t.tokens_T, t.versions_T)}
    assert dtypes == {np.dtype("<i4")}


def test_oldest_version_and_tokens_are_the_models_own():
    value = group(trajectory(), trajectory(versions=(2, 0, 9), mask=(1, 0, 1)))
    back = decode(encode_group(value))
    assert back.oldest_version == 2
    assert back.tokens == 4


def test_what_the_environment_wrote_needs_no_figures():
    t = trajectory(logprobs=(-1.0, np.nan, -1.0), versions=(0, -1, 0), mask=(1, 0, 1))
    assert same(decode(encode_group(group(t))), group(t))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (group(trajectory(mask=(0, 0, 0))), "without a token"),
        (group(trajectory(tokens=(), logprobs=(), versions=(), mask=())), "without a token"),
        (group(trajectory(mask=(1, 2, 1))), "without a token"),
        (group(trajectory(tokens=(5, 6))), "different lengths"),
        (group(trajectory(logprobs=(-0.5,))), "different lengths"),
        (group(trajectory(versions=(1,) * 4)), "different lengths"),
        (group(trajectory(mask=(1, 1))), "different lengths"),
        (group(trajectory(logprobs=(np.nan, 0, 0))), "log-probabilities"),
        (group(trajectory(logprobs=(-np.inf, 0, 0))), "log-probabilities"),
        (group(trajectory(logprobs=(0.01, 0, 0))), "log-probabilities"),
        (group(trajectory(versions=(-1, 0, 0))), "negative version"),
        (group(trajectory(tokens=(5, -6, 7))), "negative token"),
        (group(prompt=np.array([1, -2], np.int32)), "negative token"),
        (group(prompt=np.array([], np.int32)), "prompt"),
        (group(replace(trajectory(), reward=np.nan)), "reward"),
        (group(replace(trajectory(), reward=np.inf)), "reward"),
        (group(temperature=np.nan), "temperature"),
        (group(temperature=np.inf), "temperature"),
        (group(temperature=0.0), "temperature"),
        (group(temperature=-1.0), "temperature"),
        (group(replace(trajectory(), finish="f" * 33)), "not a valid"),
        (group(worker="w" * 65), "not a valid"),
        (group(task="t" * 257), "not a valid"),
        (group(*[trajectory()] * 4097), "not a valid"),
    ],
)
def test_each_fault_in_turn(value, reason):
    assert reason in refused(value)


def test_a_fault_in_the_last_trajectory_is_found():
    assert "negative version" in refused(group(trajectory(), trajectory(versions=(0, 0, -1))))


def packed(**changes):
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode_group(group())), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"prompt": b"12345"},
        {"prompt": "text"},
        {"sequences": []},
        {"sequences": [[b"", b""]]},
        {"sequences": [{"tokens": b""}]},
        {"temperature": "hot"},
        {"worker": None},
    ],
)
def test_other_shapes(changes):
    assert decode(packed()) is not None
    refused(packed(**changes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa9sequences\xdd\xff\xff\xff\xff",
        b"\x81\xa6prompt\xc6\xff\xff\xff\xff",
        b"\x81\xa1x" + b"\x91" * 100_000,
        b"\x81\xa4task\xa2\xff\xff",
    ],
)
def test_hostile_bytes(data):
    refused(data)


def test_a_cut_at_any_place_is_noticed():
    data = encode_group(group())
    for length in range(len(data)):
        refused(data[:length])
