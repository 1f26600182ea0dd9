"""A fork's bucket reads payloads from the run above it, and nothing else."""

import pytest

from deltawire.store import DelegatingBucket, open_bare_bucket, open_bucket
from deltawire.store.forked import FORKS, ForkedBucket, split_fork
from deltawire.wire import keys

BLOB = keys.blob("ab" * 32)
PART = keys.checkpoint_part(3, 0)


@pytest.fixture
def places(tmp_path):
    upper = open_bucket(str(tmp_path / "run"), create=True)
    return upper, open_bucket(f"{upper.url}/forks/one", create=True)


@pytest.mark.parametrize("key", [BLOB, PART])
def test_payloads_come_from_above(places, key):
    upper, fork = places
    assert fork.get(key, limit=9) is None
    upper.put(key, b"above")
    assert fork.get(key, limit=9) == b"above"
    assert bytes(fork.read_ranges(key, [(1, 3)])[0]) == b"bov"
    assert fork.size(key) is None  # A writer stores again what only the run above has.
    assert fork.list("") == []
    fork.put(key, b"own")
    assert (fork.get(key, limit=9), upper.get(key, limit=9)) == (b"own", b"above")
    fork.delete(key)
    assert upper.get(key, limit=9) == b"above"


@pytest.mark.parametrize(
    "key",
    [
        *(keys.RUN, keys.manifest(0), keys.rollout("w0", 0), keys.checkpoint_commit(3)),
        *(keys.checkpoint_kept(3), keys.TRAINER, f"{BLOB}x", f"x/{BLOB}", keys.tag("best")),
    ],
)
def test_nothing_else_comes_from_above(places, key):
    upper, fork = places
    upper.put(key, b"above")
    assert fork.get(key, limit=9) is None
    assert fork.read_ranges(key, [(0, 1)]) is None


def test_a_folder_named_so_without_a_run_above(tmp_path, monkeypatch):
    place = open_bare_bucket(str(tmp_path / "forks" / "one"), create=True)
    assert isinstance(place, ForkedBucket)
    assert place.get(BLOB, limit=9) is None
    monkeypatch.setattr("deltawire.store.opening.split_fork", lambda _: ("", "x"))
    assert open_bare_bucket(str(tmp_path), create=True).get(BLOB, limit=9) is None


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://bucket/run/forks/one", ("s3://bucket/run", "one")),
        ("/a/forks/one/forks/two/", ("/a/forks/one", "two")),
        ("/a/forks/one/lines/x", ("/a/lines/x", "one")),
        ("/a/forks/", ("/a/forks/", "")),
        ("/a/forks/..", ("/a/forks/..", "")),
        ("/forks/one", ("/forks/one", "")),
    ],
)
def test_the_place_names_the_run_above(url, found):
    assert split_fork(url) == found


def test_the_names_are_those_of_the_keys():
    assert keys.FORKS == FORKS
    assert keys.fork("one") == "forks/one"
    assert issubclass(ForkedBucket, DelegatingBucket)
