"""Tests what deltawire needs of a store; one that passes can carry runs.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def bucket(self):
            return Bucket(MyStore(...), "mine://somewhere", local=False)

The bucket must be empty for each test, and safe for use by several threads. Without pytest,
`deltawire.testing.conformance` and ``deltawire doctor URL --conformance`` run the same cases.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from deltawire.errors import CorruptError, DeltawireError, InputError
from deltawire.store import Bucket

MANIFEST = "weights/manifests/{:010d}.json"


@contextmanager
def _raises(kind: type[DeltawireError], *, containing: str) -> Iterator[list[DeltawireError]]:
    """Fails unless the block raises ``kind`` with these words; the list then holds the error."""
    caught: list[DeltawireError] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no error was raised; expected: {containing}"
    assert containing in str(caught[0]), f"another error was raised: {caught[0]}"


class StoreSuite:
    """Subclass it as ``Test…`` with a fixture ``bucket``: an empty `Bucket`."""

    def test_put_then_get(self, bucket: Bucket) -> None:
        """A read sees a finished put, to the byte, also of an empty object and of every byte."""
        for number, data in enumerate((b"", b"\0", bytes(range(256)), b"x" * 300_000)):
            bucket.put(f"a/{number}", data)
            assert bucket.get(f"a/{number}", limit=len(data)) == data

    def test_get_of_nothing(self, bucket: Bucket) -> None:
        """A missing object is None, also next to, above and below existing ones."""
        bucket.put("a/b/c", b"1")
        for key in ("z", "a/z", "a/b", "a", "a/b/cc", "a/b/"):
            assert bucket.get(key, limit=10) is None, key

    def test_ranges(self, bucket: Bucket) -> None:
        """Ranges come in the order asked for, far apart or overlapping, and never short."""
        data = bytes(range(256)) * 5000
        bucket.put("a/b", data)
        wanted = [(0, 1), (1_200_000, 80_000), (5, 300), (100, 300), (1_279_999, 1)]
        parts = bucket.read_ranges("a/b", wanted)
        assert parts is not None
        assert [bytes(part) for part in parts] == [data[s : s + n] for s, n in wanted]
        assert bucket.read_ranges("a/c", [(0, 1)]) is None
        for beyond in ([(1_279_999, 2)], [(0, 1), (2_000_000, 1)]):
            with _raises(CorruptError, containing="ends within"):
                bucket.read_ranges("a/b", beyond)

    def test_ranges_of_a_large_object(self, bucket: Bucket) -> None:
        """Objects of more than 8 MiB are fetched in ranges, and a short one is never padded."""
        size = (9 << 20) + 17
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        bucket.put("a/large", data)
        wanted = [(0, 8 << 20), (8 << 20, size - (8 << 20))]
        parts = bucket.read_ranges("a/large", wanted)
        assert parts is not None
        assert b"".join(parts) == data
        for cut in (8 << 20, (8 << 20) + 5, 100):
            bucket.put("a/large", data[:cut])
            with _raises(CorruptError, containing="ends within"):
                bucket.read_ranges("a/large", wanted)

    def test_head_and_list_objects(self, bucket: Bucket) -> None:
        """Size and age come without reading; ages are of one clock, and a put renews them.

        S3 gives whole seconds for one object and may give finer ones in a listing.
        """
        second_s = timedelta(seconds=1)
        bucket.put("a/1", b"123")
        bucket.put("a/2", b"")
        first, second = bucket.list_objects("a/")
        assert (first.key, first.bytes, second.bytes) == ("a/1", 3, 0)
        looked = bucket.head("a/1")
        assert looked is not None
        assert (looked.key, looked.bytes) == (first.key, first.bytes)
        assert abs(looked.modified - first.modified) < second_s
        assert (bucket.size("a/1"), bucket.size("a/3"), bucket.head("a")) == (3, None, None)
        assert first.modified <= second.modified
        bucket.put("a/1", b"12")
        again = bucket.head("a/1")
        assert again is not None
        assert again.bytes == 2
        assert again.modified > second.modified - second_s
        assert bucket.list_objects("a/", after="a/1") == [second]

    def test_put_replaces(self, bucket: Bucket) -> None:
        """A put replaces the whole of an object, a longer one too."""
        bucket.put("a", b"the first and longer one")
        bucket.put("a", b"second")
        assert bucket.get("a", limit=100) == b"second"

    def test_get_limit(self, bucket: Bucket) -> None:
        """An object of exactly the limit is read; one byte more is refused, naming the key."""
        bucket.put("a/b", b"12345")
        assert bucket.get("a/b", limit=5) == b"12345"
        with _raises(CorruptError, containing="5 bytes exceeds the limit of 4") as caught:
            bucket.get("a/b", limit=4)
        assert caught[0].key == "a/b"

    def test_create_once(self, bucket: Bucket) -> None:
        """The first create wins; a later one returns False and changes nothing."""
        assert bucket.create("a", b"first") is True
        assert bucket.create("a", b"second") is False
        assert bucket.get("a", limit=100) == b"first"

    def test_create_after_put_and_after_delete(self, bucket: Bucket) -> None:
        """A put makes a create fail, a delete lets it succeed."""
        bucket.put("a", b"put")
        assert bucket.create("a", b"created") is False
        bucket.delete("a")
        assert bucket.create("a", b"created") is True
        assert bucket.get("a", limit=100) == b"created"

    def test_create_race_has_one_winner(self, bucket: Bucket) -> None:
        """Exactly one of several concurrent creates returns True, and its bytes stay."""
        writers = 6
        with ThreadPoolExecutor(writers) as pool:
            for round_ in range(8):
                key, barrier = MANIFEST.format(round_), threading.Barrier(writers)

                def attempt(
                    number: int, key: str = key, barrier: threading.Barrier = barrier
                ) -> bool:
                    barrier.wait()
                    return bucket.create(key, bytes([number]) * 5000)

                won = list(pool.map(attempt, range(writers)))
                assert won.count(True) == 1, won
                assert bucket.get(key, limit=5000) == bytes([won.index(True)]) * 5000

    def test_put_is_atomic(self, bucket: Bucket) -> None:
        """A concurrent reader sees one whole object or another, never a mixture."""
        sizes, rounds = (10, 200_000), 30
        bucket.put("a", bytes([0]) * sizes[0])
        done = threading.Event()

        def write() -> None:
            for number in range(rounds):
                bucket.put("a", bytes([number]) * sizes[number % 2])
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not (done.is_set() or writing.done()):
                data = bucket.get("a", limit=max(sizes))
                assert data is not None
                assert data == bytes([data[0]]) * sizes[data[0] % 2]
            writing.result()

    def test_exists(self, bucket: Bucket) -> None:
        """True for an object, False for a missing one and for a prefix."""
        bucket.put("a/b", b"")
        assert bucket.exists("a/b") is True
        assert bucket.exists("a/c") is False
        assert bucket.exists("a") is False

    def test_list_is_sorted_and_complete(self, bucket: Bucket) -> None:
        """All keys under a prefix come sorted by bytes, in whatever order they were written."""
        wanted = [MANIFEST.format(number) for number in (0, 9, 10, 99, 100, 1000)]
        for key in reversed(wanted):
            bucket.put(key, b"")
        bucket.put("weights/blobs/0", b"")
        assert bucket.list("weights/manifests/") == wanted
        assert bucket.list("weights/") == ["weights/blobs/0", *wanted]
        assert bucket.list("") == ["weights/blobs/0", *wanted]

    def test_list_prefix_is_a_folder(self, bucket: Bucket) -> None:
        """``w1/`` does not list ``w10/``; an unused prefix lists nothing."""
        for key in ("r/w1/1", "r/w10/1", "r/w1/2"):
            bucket.put(key, b"")
        assert bucket.list("r/w1/") == ["r/w1/1", "r/w1/2"]
        assert bucket.list("r/w/") == []
        assert bucket.list("nothing/") == []

    def test_list_after(self, bucket: Bucket) -> None:
        """With ``after``, only keys that sort after it are listed, whether it exists or not."""
        for number in range(0, 10, 2):
            bucket.put(MANIFEST.format(number), b"")
        for after, wanted in ((3, [4, 6, 8]), (4, [6, 8]), (8, []), (100, [])):
            found = bucket.list("weights/manifests/", after=MANIFEST.format(after))
            assert found == [MANIFEST.format(number) for number in wanted], after

    def test_list_of_many(self, bucket: Bucket) -> None:
        """Listings are complete over more than one page of a store."""
        wanted = [MANIFEST.format(number) for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: bucket.put(key, b"x"), wanted))
        assert bucket.list("weights/manifests/") == wanted

    def test_is_listed(self, bucket: Bucket) -> None:
        """True for an object that a listing shows, at any place; False for anything else."""
        for number in (1, 7, 900):
            bucket.put(MANIFEST.format(number), b"")
        bucket.put("run.json", b"")
        for key in (MANIFEST.format(1), MANIFEST.format(7), MANIFEST.format(900), "run.json"):
            assert bucket.is_listed(key) is True, key
        missing = (MANIFEST.format(0), MANIFEST.format(8), MANIFEST.format(901), "run", "a/b")
        for key in (*missing, "weights/manifests", "zzz"):
            assert bucket.is_listed(key) is False, key

    def test_list_prefixes(self, bucket: Bucket) -> None:
        """Names under a prefix that have keys below are listed once each, without those keys."""
        for key in ("r/w10/1", "r/w1/1", "r/w1/2", "r/w1/x/3", "r/loose", "other/1"):
            bucket.put(key, b"")
        assert bucket.list_prefixes("r/") == ["w1", "w10"]
        assert bucket.list_prefixes("r/w1/") == ["x"]
        assert bucket.list_prefixes("r/w10/") == []
        assert bucket.list_prefixes("nothing/") == []

    def test_delete(self, bucket: Bucket) -> None:
        """A delete removes one object only; deleting a missing one is no error."""
        bucket.put("a/b", b"1")
        bucket.put("a/bb", b"2")
        bucket.delete("a/b")
        bucket.delete("a/b")
        assert bucket.get("a/b", limit=10) is None
        assert bucket.list("a/") == ["a/bb"]

    def test_hostile_keys(self, bucket: Bucket) -> None:
        """A key that leaves the bucket, or is invalid, is refused and writes nothing."""
        for key in ("../out", "a/../../out", "a//b", "a/./b", "a\0b", "a\nb"):
            with _raises(InputError, containing="not a key") as caught:
                bucket.put(key, b"1")
            assert "\n" not in str(caught[0])
            for verb in (bucket.delete, bucket.exists, bucket.list):
                with _raises(InputError, containing="not a key"):
                    verb(key)
            with _raises(InputError, containing="not a key"):
                bucket.get(key, limit=1)
            with _raises(InputError, containing="not a key"):
                bucket.create(key, b"1")
        assert bucket.list("") == []
