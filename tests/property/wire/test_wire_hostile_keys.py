"""Keys come from listings, and any writer of the bucket chooses them: each is either one
that deltawire would make, or none."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.wire import keys

PREFIXES = [
    keys.MANIFESTS, keys.BLOBS, keys.COMPACTED, keys.PARTS, keys.RETENTION_FLOORS, keys.TAGS,
    keys.DELETION_INTENTS, keys.ROLLOUTS, keys.HEARTBEATS, keys.LEASES, keys.CHECKPOINTS,
    keys.EVENTS, keys.ROLES, "", "/", "weights//manifests/", "../",
]  # fmt: skip
NUMBERS = st.one_of(
    st.integers(0, 10**10 - 1).map(lambda number: f"{number:010d}"),
    st.sampled_from(["9999999999", "0000000000", "-000000001", "0000000004 ", "٠٠٠٠٠٠٠٠٠٤",
                     "00000000040", "000000004", "1e9", "+000000004", "0x00000004"]),
)  # fmt: skip
WORDS = st.one_of(
    NUMBERS,
    st.sampled_from(["anchor", "w1", "", ".", "..", "CON", "a" * 64, "é", "a\n", "w1\x00", "~"]),
    st.text(string.printable, max_size=12),
)
HOSTILE = st.builds(
    lambda prefix, first, gap, second, end: prefix + first + gap + second + end,
    st.sampled_from(PREFIXES),
    WORDS,
    st.sampled_from(["", "-", "/", "//", "-~", "."]),
    WORDS,
    st.sampled_from(["", ".json", ".jsonl", ".json.json", ".JSON", "/", ".json\n", ".json.bak"]),
)


@settings(max_examples=2000, deadline=None)
@given(HOSTILE)
def test_a_key_is_taken_for_what_it_would_be_made_of_or_for_nothing(key):
    if (compacted := keys.compacted_of(key)) is not None:
        base, target = compacted
        assert key == keys.compacted(base, target)
        assert base is None or base < target
    if (group := keys.group_of(key)) is not None:
        assert key == keys.rollout(*group)
    if (process := keys.process_of(key)) is not None:
        assert key == keys.heartbeat(process)
    if (stream := keys.stream_of(key)) is not None:
        assert key.startswith(f"{keys.EVENTS}{stream}/")
        assert keys.valid_name(stream)
    if (number := keys.trailing_number(key)) is not None:
        assert 0 <= number <= keys.MAX_NUMBER
        assert f"{number:010d}" in key


@given(st.integers(0, 10**10 - 1), st.integers(0, 10**10 - 1))
def test_every_key_that_is_made_comes_back(first, second):
    low, high = min(first, second), max(first, second) + 1
    if high <= keys.MAX_NUMBER:
        assert keys.compacted_of(keys.compacted(low, high)) == (low, high)
        assert keys.compacted_of(keys.compacted(high, low)) is None
    assert keys.compacted_of(keys.compacted(None, first)) == (None, first)
    assert keys.trailing_number(keys.manifest(first)) == first
    assert keys.trailing_number(keys.retention_floor(first)) == first
    assert keys.group_of(keys.rollout("w-1", first)) == ("w-1", first)


@pytest.mark.parametrize("name", ["CON", "con", "Nul", "COM1", "lpt9"])
def test_a_device_of_windows_names_no_process(name):
    assert not keys.valid_name(name)
    assert keys.process_of(f"{keys.HEARTBEATS}{name}.json") is None
    for make in (keys.heartbeat, keys.rollouts_of, keys.tombstone):
        with pytest.raises(InputError, match="cannot name a process"):
            make(name)
    assert keys.valid_name(f"{name}0x")
