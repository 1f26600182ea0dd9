"""Keys: no name becomes a path, and every key is read back as it was built."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.wire import keys

HOSTILE = [
    "", ".", "..", "../x", "a/b", "a\\b", "/a", "-a", "_a", "a.b", "a b", "a\n", "\na", "a\0",
    "ü", "１", "a" * 64, "a%2Fb", "con:", "~", "*",
]  # fmt: skip
HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_everywhere(name):
    assert not keys.valid_name(name)
    for build in (
        lambda: keys.rollout(name, 0),
        lambda: keys.rollouts_of(name),
        lambda: keys.heartbeat(name),
        lambda: keys.events(name, 0),
    ):
        with pytest.raises(InputError) as caught:
            build()
        assert len(str(caught.value).splitlines()) == 1
    assert keys.process_of(f"{keys.HEARTBEATS}{name}.json") is None


@pytest.mark.parametrize("name", ["a", "0", "worker-1", "A_b-C", "a" * 63])
def test_good_names(name):
    assert keys.valid_name(name)
    assert keys.process_of(keys.heartbeat(name)) == name
    assert keys.rollout(name, 7) == f"rollouts/{name}/0000000007"
    assert keys.rollout(name, 7).startswith(keys.rollouts_of(name))
    assert keys.events(name, 7) == f"events/{name}/0000000007.jsonl"


@pytest.mark.parametrize("number", [-1, 10**10, 10**400])
def test_numbers_that_do_not_fit(number):
    for build in (keys.manifest, lambda n: keys.rollout("w", n), lambda n: keys.events("w", n)):
        with pytest.raises(InputError):
            build(number)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**10 - 1))
def test_numbers_are_read_back(number):
    for key in (keys.manifest(number), keys.rollout("w", number), keys.events("w", number)):
        assert keys.trailing_number(key) == number


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**10 - 1), st.integers(0, 10**10 - 1))
def test_keys_sort_as_their_numbers(one, two):
    assert (keys.manifest(one) < keys.manifest(two)) == (one < two)


@pytest.mark.parametrize(
    "key",
    [
        "", "weights/manifests/", "weights/manifests/1.json", "weights/manifests/x000000001.json",
        "weights/manifests/-000000001.json", "weights/manifests/00000000001.json",
        "weights/manifests/１２３４５６７８９０.json", "weights/manifests/0x00000001.json",
        "weights/manifests/0000000001/x",
    ],
)  # fmt: skip
def test_keys_without_a_number(key):
    assert keys.trailing_number(key) is None


@pytest.mark.parametrize("key", ["fleet/a", "fleet/a.json.json", "a.json", "fleet/x/a.json", ""])
def test_keys_of_no_worker(key):
    assert keys.process_of(key) is None


@pytest.mark.parametrize(
    "digest", ["", HASH[:-1], HASH + "0", HASH.upper(), HASH + "\n", "../" + HASH[3:]]
)
def test_what_is_no_hash(digest):
    with pytest.raises(InputError):
        keys.blob(digest)


def test_checkpoint_and_blob_keys():
    assert keys.blob(HASH) == f"weights/blobs/{HASH}"
    assert keys.checkpoint_part(12, 0) == "checkpoints/0000000012/state-0000000000.bin"
    assert keys.checkpoint_commit(12) == "checkpoints/0000000012/commit.json"


def test_compacted_deltas_are_parsed_from_their_keys():
    for base, target in ((0, 4), (None, 8), (60, 64)):
        assert keys.compacted_of(keys.compacted(base, target)) == (base, target)
    for stray in ("x", "0000000004-0000000000.json.bak", "4-0.json", "0000000004-anchors.json",
                  "0000000004.json", "../0000000004-anchor.json"):  # fmt: skip
        assert keys.compacted_of(keys.COMPACTED + stray) is None
    ahead = [
        keys.compacted(None, 4),
        keys.compacted(0, 4),
        keys.compacted(3, 5),
        keys.compacted(None, 5),
    ]
    assert [key > keys.compacted_after(4) for key in ahead] == [False, False, True, True]


@pytest.mark.parametrize("token", ["", "a/b", "..", "é"])
def test_a_session_is_no_path(token):
    with pytest.raises(InputError):
        keys.part(0, token, 0)
