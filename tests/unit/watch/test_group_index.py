"""The local index of groups: filters, pages, and what a hostile bucket may put into it."""

from __future__ import annotations

import itertools
import sqlite3

import pytest

from deltawire.errors import InputError
from deltawire.events import Generated
from deltawire.watch import group_index
from deltawire.watch.group_index import GroupIndex, GroupQuery, GroupRow


def generated(sequence: int, *, worker: str = "w0", **changes) -> Generated:
    fields = {
        "process": worker,
        "at": 100.0 + sequence,
        "sequence": sequence,
        "versions": [sequence // 2],
        "reward_mean": sequence / 100,
        "tokens": 10 * sequence,
    }
    return Generated(**{**fields, **changes})


@pytest.fixture
def index(tmp_path):
    found = GroupIndex(tmp_path / "cache" / "groups.sqlite")
    yield found
    found.close()


def sequences(index: GroupIndex, **query) -> list[int]:
    return [row.sequence for row in index.find(GroupQuery(**query), limit=500).rows]


def row(sequence: int, **changes) -> GroupRow:
    fields = {
        "worker": "w0",
        "sequence": sequence,
        "at": 1.0,
        "reward": 0.5,
        "tokens": 7,
        "failed": 0,
        "cause": "",
        "trained": 3,
        "task": f"sums/{sequence}",
        "family": "sums",
        "answers": 4,
        "status": "read",
    }
    return GroupRow(**{**fields, **changes})


def test_pages_visit_every_group_once_in_each_order(index) -> None:
    index.add_events(generated(number) for number in range(137))
    orders = {
        "newest": lambda number: -number,
        "oldest": lambda number: number,
        "best": lambda number: -number,
        "worst": lambda number: number,
        "longest": lambda number: -number,
    }
    for order, key in orders.items():
        seen, after = [], ""
        for _ in itertools.count():
            page = index.find(GroupQuery(order=order), after=after, limit=10)
            assert page.count == 137
            seen += [one.sequence for one in page.rows]
            if not (after := page.next):
                break
        assert seen == sorted(range(137), key=key), order


def test_a_group_that_was_read_keeps_the_time_of_its_event_in_either_order(index) -> None:
    index.add_events([generated(1)])
    index.add_version(3, 50.0, [row(1), row(2)])
    index.add_events([generated(2), generated(1, reward_mean=0.9)])
    found = {one.sequence: one for one in index.find(GroupQuery()).rows}
    assert {number: one.at for number, one in found.items()} == {1: 101.0, 2: 102.0}
    assert {one.reward for one in found.values()} == {0.5}
    assert {one.status for one in found.values()} == {"read"}


def test_filters(index) -> None:
    index.add_events(generated(number) for number in range(6))
    index.add_events([generated(9, worker="w1", failed=2, cause="took 100% of 5_s")])
    index.add_version(2, 0.0, [row(0, trained=2, reward=1.0), row(1, family="logic", reward=0.0)])
    index.add_version(5, 0.0, [], [("w0", 2, "gone")], [("w0", 3), ("w0", 4)])
    assert sequences(index, family="logic") == [1]
    assert sequences(index, task="sums/0") == [0]
    assert sequences(index, text="sums") == [1, 0]
    assert sequences(index, text="100% of 5_") == [9]
    assert sequences(index, text="100_ of") == []
    assert sequences(index, worker="w1") == [9]
    assert sequences(index, failed=True) == [9]
    assert sequences(index, dropped=True) == [4, 3]
    assert sequences(index, version=5) == [2]
    assert sequences(index, version_min=3) == [2, 1]
    assert sequences(index, version_max=2) == [0]
    assert sequences(index, reward_min=0.9, reward_max=1.0) == [0]
    assert index.get("w0", 2).status == "gone"
    facets = index.facets()
    assert (facets.groups, facets.read) == (7, 2)
    assert dict(facets.families) == {"sums": 1, "logic": 1}
    assert facets.causes == [("took 100% of 5_s", 1)]
    assert index.indexed_versions() == {2, 5}


def test_no_query_is_part_of_a_statement(index) -> None:
    index.add_events([generated(1)])
    for text in ("' OR 1=1 --", '"; DROP TABLE groups; --', "\x00", "%", "_"):
        for name in ("text", "task", "family", "worker", "cause"):
            assert sequences(index, **{name: text}) == []
    assert sequences(index) == [1]


def test_events_that_no_worker_writes_are_left_out_or_bounded(index) -> None:
    huge = 1 << 200
    index.add_events(
        [
            generated(-1),
            generated(1, worker="../../etc"),
            generated(huge),
            generated(2, tokens=huge, failed=huge, versions=[-huge, huge], cause="\ud800" * 9000),
        ]
    )
    assert sequences(index) == [2]
    found = index.get("w0", 2)
    assert (found.tokens, found.low, found.high) == ((1 << 63) - 1, -1, (1 << 63) - 1)
    assert set(found.cause) == {"?"}


@pytest.mark.parametrize("token", ["x", "bm8", "WzEsMiwzXQ", "🙂"])
def test_a_wrong_place_is_an_input_error(index, token) -> None:
    with pytest.raises(InputError, match="not a place in a list"):
        index.find(GroupQuery(), after=token)


def test_a_damaged_cache_is_built_again(tmp_path) -> None:
    path = tmp_path / "cache" / "groups.sqlite"
    first = GroupIndex(path)
    first.add_events([generated(1)])
    first.close()
    again = GroupIndex(path)
    assert sequences(again) == [1]
    again.close()
    path.write_bytes(b"no database at all" * 100)
    built = GroupIndex(path)
    assert sequences(built) == []
    built.add_events([generated(2)])
    assert sequences(built) == [2]
    built.close()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_text_that_many_names_contain_is_found_all_the_same(index, monkeypatch) -> None:
    rows = [row(number, task=f"Sums/{number % 7}") for number in range(40)]
    index.add_version(3, 1.0, rows)
    index.add_events([generated(99, failed=1, cause="no sums here")])
    for most in (0, 5, 2000):
        monkeypatch.setattr(group_index, "MOST_NAMES", most)
        assert len(sequences(index, text="SUMS")) == 41
        assert sequences(index, text="sums here") == [99]
        assert len(sequences(index, text="s/3", reward_max=0.5)) == 6
        assert sequences(index, text="products") == []


def test_counts_that_take_long_are_kept_for_a_while(index, monkeypatch) -> None:
    index.add_events([generated(1)])
    assert (index.count, index.facets().groups) == (1, 1)
    index.add_events([generated(2)])
    assert (index.count, index.facets().groups) == (2, 2)
    monkeypatch.setattr(group_index, "LONG_S", -1.0)
    monkeypatch.setattr(group_index, "SHARE", 1e9)
    index.add_events([generated(3)])
    assert index.count == 3
    index.add_events([generated(4)])
    assert index.count == 3
    assert len(sequences(index)) == 4


def test_a_file_of_an_older_release_is_built_again(tmp_path) -> None:
    path = tmp_path / "cache" / "groups.sqlite"
    first = GroupIndex(path)
    first.add_events([generated(1)])
    first.close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 1")
    file.close()
    second = GroupIndex(path)
    assert second.count == 0
    second.close()
