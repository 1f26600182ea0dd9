"""A group comes back as it went, and each fault in one is found."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.rollouts import BetterAnswer, Group, Trajectory, decode_group, encode_group


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
    heads = [
        (g.worker, g.nonce, g.task, g.family, g.temperature, g.prompt.tolist()) for g in (one, two)
    ]
    bodies = [
        [
            (
                t.tokens_T.tolist(),
                t.logprobs_T.tobytes(),
                t.versions_T.tolist(),
                t.mask_T.tolist(),
                t.reward,
                t.finish,
                t.episode,
                None if t.prompt is None else t.prompt.tolist(),
                t.turns,
                t.cause,
                t.probes,
                t.routes,
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


def test_segments_probes_and_routes_come_back():
    rebuilt = np.array([1, 9], np.int32)
    first = replace(trajectory(), episode=0, turns=3, probes={"hidden": 0.5}, routes=b"\x01")
    segments = [first, replace(first, prompt=rebuilt, turns=2), replace(trajectory(), episode=7)]
    back = decode(encode_group(group(*segments, family="arithmetic")))
    assert same(back, group(*segments, family="arithmetic"))
    assert back.episodes == [0, 0, 1]
    assert back.prompt_of(back.trajectories[1]).tolist() == [1, 9]
    assert back.prompt_of(back.trajectories[2]).tolist() == [1, 2, 3]
    assert group(trajectory(), trajectory()).episodes == [0, 1]


def test_an_episode_that_failed_may_be_empty():
    nothing = trajectory(tokens=(), logprobs=(), versions=(), mask=())
    failed = replace(nothing, reward=0.0, cause="the reward raised ValueError")
    back = decode(encode_group(group(failed, failed)))
    assert back.oldest_version == back.newest_version == -1
    assert back.largest_token == 3
    assert decode(encode_group(group(failed, trajectory()))).oldest_version == 3


def test_a_better_answer_comes_back_and_the_others_keep_their_bytes():
    drawn = replace(trajectory(mask=(1, 1, 1)), episode=0)
    better = BetterAnswer(np.array([9, 2], np.int32), 0.25)
    plain, paired = group(drawn, trajectory()), group(replace(drawn, better=better), trajectory())
    back = decode(encode_group(paired))
    assert same(back, plain)
    found = back.trajectories[0].better
    assert found is not None
    assert (found.tokens_T.tolist(), found.weight) == ([9, 2], 0.25)
    assert back.largest_token == 9
    assert back.tokens == plain.tokens
    one, other = (msgspec.msgpack.decode(encode_group(g))["sequences"] for g in (plain, paired))
    assert [len(sequence) for sequence in one] == [14, 14]
    assert other == [[*one[0], [np.array([9, 2], "<i4").tobytes(), 0.25]], one[1]]
    assert decode(encode_group(plain)).trajectories[0].better is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"episode": -1}, "not one drawn answer"),
        ({"mask_T": np.array([1, 0, 1], np.uint8)}, "not one drawn answer"),
        ({"cause": "forgotten", "reward": 0.0}, "not one drawn answer"),
        ({"tokens": []}, "without tokens"),
        ({"tokens": [3, -1]}, "with a negative one"),
        ({"weight": 1.5}, "Expected `float` <= 1.0"),
        ({"weight": float("nan")}, "Expected `float`"),
    ],
)
def test_a_false_better_answer_is_refused(change, reason):
    tokens = np.array(change.pop("tokens", [9, 2]), np.int32)
    better = BetterAnswer(tokens, change.pop("weight", 1.0))
    drawn = replace(trajectory(mask=(1, 1, 1)), episode=0, better=better)
    sound = BetterAnswer(np.array([9], np.int32), 1.0)
    assert decode(encode_group(group(replace(drawn, better=sound))))
    assert reason in refused(group(replace(drawn, **change)))


def test_a_better_answer_of_one_of_several_segments_is_refused():
    better = BetterAnswer(np.array([9], np.int32), 1.0)
    first = replace(trajectory(mask=(1, 1, 1)), episode=0)
    assert "not one drawn answer" in refused(group(first, replace(first, better=better)))
    raw = msgspec.msgpack.decode(encode_group(group(replace(first, better=better))))
    raw["sequences"][0][14][0] += b"\0"
    assert "not tokens" in refused(msgspec.msgpack.encode(raw))


def test_a_group_of_the_first_release_is_read():
    raw = msgspec.msgpack.decode(encode_group(group()))
    del raw["family"]
    raw["sequences"] = [sequence[:6] for sequence in raw["sequences"]]
    assert same(decode(msgspec.msgpack.encode(raw)), group())


def test_what_the_environment_wrote_needs_no_figures():
    t = trajectory(logprobs=(-1.0, np.nan, -1.0), versions=(0, -1, 0), mask=(1, 0, 1))
    assert same(decode(encode_group(group(t))), group(t))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (group(trajectory(mask=(0, 0, 0))), "no token"),
        (group(trajectory(tokens=(), logprobs=(), versions=(), mask=())), "no token"),
        (group(trajectory(mask=(1, 2, 1))), "no token"),
        (group(trajectory(tokens=(5, 6))), "differ in length"),
        (group(trajectory(logprobs=(-0.5,))), "differ in length"),
        (group(trajectory(versions=(1,) * 4)), "differ in length"),
        (group(trajectory(mask=(1, 1))), "differ in length"),
        (group(trajectory(logprobs=(np.nan, 0, 0))), "log-probability"),
        (group(trajectory(logprobs=(-np.inf, 0, 0))), "log-probability"),
        (group(trajectory(logprobs=(0.01, 0, 0))), "log-probability"),
        (group(trajectory(versions=(-1, 0, 0))), "negative version"),
        (group(trajectory(tokens=(5, -6, 7))), "negative token"),
        (group(prompt=np.array([1, -2], np.int32)), "negative token"),
        (group(prompt=np.array([], np.int32)), "prompt"),
        (group(replace(trajectory(), reward=np.nan)), "reward"),
        (group(replace(trajectory(), reward=np.inf)), "reward"),
        (group(replace(trajectory(), probes={"p": np.nan})), "probe"),
        (group(replace(trajectory(), probes={str(i): 0.0 for i in range(65)})), "not a valid"),
        (group(replace(trajectory(), prompt=np.array([-1], np.int32))), "prompt"),
        (group(replace(trajectory(), mask_T=np.array([0, 2, 0]), cause="c")), "no token"),
        (group(replace(trajectory(), cause="c" * 513)), "not a valid"),
        (group(replace(trajectory(), episode=4096)), "not a valid"),
        (
            group(*(replace(trajectory(), episode=0, reward=r) for r in (1.0, 2.0))),
            "the segments state different rewards for episode 0",
        ),
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
