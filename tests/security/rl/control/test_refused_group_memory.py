"""A hostile group of a long-context run costs its own bytes before it is refused, and costs them
once. Sizes of what is allocated, compared and asked for are counted, not seconds."""

import tracemalloc

import msgspec
import numpy as np
import pytest

from deltawire.errors import CorruptError
from deltawire.rl.control import rollout_reader
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.store import open_bucket
from deltawire.wire import keys, rollouts
from deltawire.wire.ledger import Ledger
from deltawire.wire.rollouts import MAX_GROUP_BYTES, decode_group

CONTEXT = 1 << 16
LONG = Bounds(
    1000, 1.0, CONTEXT, episodes=16, drawn=1 << 20, turns=100, routes=0, budgets=frozenset({9})
)
SIZE = 20 << 20


def sequence(tokens=8, *, token=1, prompt=b"", turns=1, thinking=None, reuse=None, mask=b"\x01"):
    arrays = (np.full(tokens, token, "<i4"), np.zeros(tokens, "<f4"), np.zeros(tokens, "<i4"))
    body = [*(one.tobytes() for one in arrays), mask * tokens, 0.0, "stop", -1, prompt, turns]
    return [*body, "", {}, b"", thinking or [9, [], b""], reuse]


def packed(sequences, prompt=b"\0" * 8):
    group = {"worker": "a", "nonce": "n", "task": "t", "temperature": 1.0, "prompt": prompt}
    return msgspec.msgpack.encode({**group, "sequences": sequences})


LONG_PROMPT = np.zeros(1 << 20, "<i4").tobytes()
HOSTILE = {
    "turns of thinking": (
        lambda: [sequence(turns=10**6, thinking=[9, [[0, "cut"]] * 10**6, b""])] * 4,
        "more than 3200 turns of thinking",
    ),
    "inserted ranges": (
        lambda: [sequence(thinking=[9, [], b"\0" * (SIZE // 8)])] * 8,
        "more than 3200 turns of thinking",
    ),
    "one long sequence": (lambda: [sequence(SIZE // 13)], "more than 65536 tokens"),
    "long prompts": (
        lambda: [sequence(prompt=LONG_PROMPT + b"\0" * 4)] * 5,
        "a prompt of more than 1048576 tokens",
    ),
    "many trajectories": (lambda: [sequence(380)] * 4000, "more than 1600 trajectories"),
    "a token beyond the vocabulary": (
        lambda: [sequence(CONTEXT - 9)] * 23 + [sequence(token=1000)],
        "not in the vocabulary",
    ),
    "a wrong value at the end": (
        lambda: [sequence(CONTEXT - 9)] * 23 + [sequence(token=-1)],
        "a negative token",
    ),
}


@pytest.fixture
def bucket():
    return open_bucket("memory://")


@pytest.fixture
def asked(bucket, monkeypatch):
    """The sizes of the answers that were read."""
    sizes, get = [], bucket.get

    def counted(key, limit):
        data = get(key, limit=limit)
        sizes.append(len(data or b""))
        return data

    monkeypatch.setattr(bucket, "get", counted)
    return sizes


def refuse(bucket, data, reason, bounds=LONG):
    """Refuses a group, and returns the most memory that this took."""
    bucket.put(keys.rollout("a", 0), data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=reason):
            read_group(bucket, "a", 0, bounds=bounds)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_refused_group_costs_its_own_bytes(bucket, asked, kind):
    sequences, reason = HOSTILE[kind]
    data = packed(sequences())
    assert SIZE / 2 < len(data) < MAX_GROUP_BYTES == LONG.bytes
    peak = refuse(bucket, data, reason)
    assert peak < 1.1 * len(data) + (4 << 20)
    assert len(asked) == 2, "the same bytes are asked for twice, not three times"


def test_a_refused_group_is_not_held(bucket):
    """Errors that wait for a round of readers to end do not hold the objects that they refused."""
    data = packed(HOSTILE["one long sequence"][0]())
    buffer = RolloutBuffer(bucket, Ledger(), limit=10, bounds=LONG)
    bucket.put(keys.rollout("a", 0), data)
    tracemalloc.start()
    try:
        refused = buffer._read(("a", 0))
        assert "more than 65536 tokens" in str(refused)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_trainer_asks_for_no_more_than_its_bounds(bucket, asked):
    """The rollout buffer reads within the bounds, and asks for a refused group in one poll only."""
    small = Bounds(264, 1.0, 256, episodes=8, drawn=64, turns=2, routes=0)
    bucket.put(keys.rollout("a", 0), b"\0" * (small.bytes + 1))
    buffer = RolloutBuffer(bucket, Ledger(), limit=10, bounds=small)
    for _ in range(3):
        buffer.poll(["a"])
    assert buffer.damaged == [keys.rollout("a", 0)]
    assert set(asked) == {0}, "only the group that follows was asked for, which is not there"
    assert len(asked) == 3


def test_large_groups_are_read_one_at_a_time(bucket, monkeypatch):
    monkeypatch.setattr(rollout_reader, "LARGE_GROUP", 1000)
    get, held = bucket.get, []

    def watched(key, limit):
        held.append((limit, rollout_reader._LARGE.locked()))
        return get(key, limit=limit)

    monkeypatch.setattr(bucket, "get", watched)
    bucket.put(keys.rollout("a", 0), packed([sequence(500)]))
    assert read_group(bucket, "a", 0, bounds=LONG)[0].tokens == 500
    assert held == [(1000, False), (LONG.bytes, True)]
    held.clear()
    bucket.put(keys.rollout("a", 1), packed([sequence(5)]))
    assert read_group(bucket, "a", 1, bounds=LONG)[0].tokens == 5
    assert held == [(1000, False)]


@pytest.mark.parametrize("given", [False, True])
def test_a_prompt_is_compared_once_however_many_reuse_its_tokens(monkeypatch, given):
    compared = []
    equal = np.array_equal

    def counted(one, other):
        compared.append(len(one))
        return equal(one, other)

    monkeypatch.setattr(rollouts.np, "array_equal", counted)
    tokens = 10_000
    prompt = np.zeros(tokens, "<i4").tobytes()
    first = sequence(4, prompt=prompt if given else b"")
    others = []
    for _ in range(1000):
        one = sequence(4, reuse=[0, 2])
        one[3] = b"\0\0\1\1"
        others.append(one)
    group = decode_group(packed([first, *others], prompt), run="", key="")
    assert len(group.trajectories) == 1001
    assert sum(compared) <= tokens * given + 3 * 2 * 1000


def test_the_largest_token_looks_at_each_prompt_once():
    looked = []

    class Counted(np.ndarray):
        def max(self, *args, **changes):
            looked.append(len(self))
            return super().max(*args, **changes)

    group = decode_group(packed([sequence(4)] * 1000, b"\0" * 4000), run="", key="")
    object.__setattr__(group, "prompt", group.prompt.view(Counted))
    assert group.largest_token == 1
    assert looked == [1000]
