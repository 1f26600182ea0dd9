"""An index of a run's groups in a local file, so that a million of them can be searched.

A row holds what a list shows of a group. It is made from the event that its worker recorded, and
completed once a version names the group as consumed and it was read (`group_indexer`). The file is
a cache: it may be deleted at any time, and is built again. Memory does not grow with the run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from deltawire.errors import InputError
from deltawire.events import Event, Generated
from deltawire.private_files import private_folder
from deltawire.wire import keys
from deltawire.wire.payload import Index

SCHEMA = 2
MAX_PAGE = 500
MOST_COUNTED = 10_000
"""A filtered list counts its groups up to here."""
MAX_FACETS = 200
MAX_CAUSE = 512
MOST_NAMES = 2000
"""A text that more tasks or causes contain is looked for row by row."""
LONG_S = 0.02
SHARE = 20
"""Counts over all groups are computed again after this many times their own duration."""
_BUSY_S = 20.0
_LARGEST = (1 << 63) - 1

_CAUSE = 6
"""The place of the cause in a row made from an event."""
_T = TypeVar("_T")

Order = Literal["newest", "oldest", "best", "worst", "longest"]

_TABLES = """
CREATE TABLE IF NOT EXISTS groups (
  worker TEXT NOT NULL, sequence INTEGER NOT NULL, at REAL NOT NULL, reward REAL NOT NULL,
  tokens INTEGER NOT NULL, failed INTEGER NOT NULL, cause TEXT NOT NULL,
  low INTEGER, high INTEGER, trained INTEGER, dropped INTEGER,
  task TEXT NOT NULL DEFAULT '', family TEXT NOT NULL DEFAULT '', answers INTEGER,
  reward_min REAL, reward_max REAL, overlong INTEGER, status TEXT NOT NULL DEFAULT 'stored',
  PRIMARY KEY (worker, sequence)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON groups (at, worker, sequence);
CREATE INDEX IF NOT EXISTS by_reward ON groups (reward, worker, sequence);
CREATE INDEX IF NOT EXISTS by_tokens ON groups (tokens, worker, sequence);
CREATE INDEX IF NOT EXISTS by_version ON groups (trained, at, worker, sequence);
CREATE INDEX IF NOT EXISTS by_task ON groups (task, at, worker, sequence);
CREATE INDEX IF NOT EXISTS by_family ON groups (family, at, worker, sequence);
CREATE INDEX IF NOT EXISTS by_cause ON groups (cause, at, worker, sequence);
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS names (
  kind TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
"""
# Each task and each cause is in `names` once, so that a text is compared with few of them.

_NAME = "INSERT OR IGNORE INTO names VALUES (?, ?)"

_FROM_EVENT = """
INSERT INTO groups (worker, sequence, at, reward, tokens, failed, cause, low, high)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (worker, sequence) DO UPDATE SET at = excluded.at WHERE status <> 'stored'
"""

_FROM_GROUP = """
INSERT INTO groups (worker, sequence, at, reward, tokens, failed, cause, low, high, trained, task,
                    family, answers, reward_min, reward_max, overlong, status)
VALUES (:worker, :sequence, :at, :reward, :tokens, :failed, :cause, :low, :high, :trained, :task,
        :family, :answers, :reward_min, :reward_max, :overlong, :status)
ON CONFLICT (worker, sequence) DO UPDATE SET
  reward = excluded.reward, tokens = excluded.tokens, failed = excluded.failed,
  cause = excluded.cause, low = excluded.low, high = excluded.high, trained = excluded.trained,
  task = excluded.task, family = excluded.family, answers = excluded.answers,
  reward_min = excluded.reward_min, reward_max = excluded.reward_max,
  overlong = excluded.overlong, status = excluded.status
"""

_NAMED = """
INSERT INTO groups (worker, sequence, at, reward, tokens, failed, cause, trained, status)
VALUES (?, ?, ?, 0, 0, 0, '', ?, ?)
ON CONFLICT (worker, sequence) DO UPDATE SET trained = excluded.trained, status = excluded.status
"""

_ORDERS: dict[Order, tuple[str, str]] = {
    "newest": ("at", "DESC"),
    "oldest": ("at", "ASC"),
    "best": ("reward", "DESC"),
    "worst": ("reward", "ASC"),
    "longest": ("tokens", "DESC"),
}


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """The index's record of a group.

    ``status`` is ``stored`` (known by its event only), ``read``, ``gone`` (deleted by retention) or
    ``damaged``. ``low`` and ``high`` are the oldest and the newest version that drew its tokens,
    ``trained`` the version that it was consumed for, ``dropped`` the one that dropped it. Task,
    family and the fields after them are known once it was read.
    """

    worker: str
    sequence: int
    at: float
    reward: float
    tokens: int
    failed: int
    cause: str
    low: int | None = None
    high: int | None = None
    trained: int | None = None
    dropped: int | None = None
    task: str = ""
    family: str = ""
    answers: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    overlong: int | None = None
    status: str = "stored"


_FIELDS = ", ".join(GroupRow.__struct_fields__)


class GroupQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups a list shows; the default shows all, newest first.

    ``text`` is part of a task's identity or of a cause; ``task``, ``family``, ``worker`` and
    ``cause`` are whole. ``version`` is the version that was trained on the group.
    """

    text: str = ""
    task: str = ""
    family: str = ""
    worker: str = ""
    cause: str = ""
    version: Index | None = None
    version_min: Index | None = None
    version_max: Index | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    failed: bool = False
    dropped: bool = False
    order: Order = "newest"


class GroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list. ``count`` is that of the whole list, up to `MOST_COUNTED`; ``next`` asks
    for the page after this one, and is empty at the end."""

    rows: list[GroupRow]
    count: int
    next: str


class Facets(msgspec.Struct, frozen=True, kw_only=True):
    """Values that groups can be filtered by, with their numbers of groups, the most frequent
    first."""

    families: list[tuple[str, int]]
    causes: list[tuple[str, int]]
    workers: list[tuple[str, int]]
    groups: int
    read: int


class _Counted(NamedTuple):
    """A value, the state of the file that it was computed from, and when it is computed again."""

    value: object
    written: int
    due: float


class GroupIndex:
    """The index in one file; any thread may use it.

    Example::

        index = GroupIndex(path)
        index.add_events(events)
        page = index.find(GroupQuery(family="sums"), limit=50)
    """

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)
        self._path = path
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._counted: dict[str, _Counted] = {}
        try:
            self._open()
        except sqlite3.DatabaseError:
            self._remove()  # Damaged, or of another release.
            self._open()

    def _open(self) -> None:
        # The file exists before SQLite opens it, so that it has the mode of a private file.
        self._path.touch(mode=0o600)
        self._writer = self._connect()
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA):
            self._writer.close()
            raise sqlite3.DatabaseError
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = OFF")  # A cache: it is built again.
        self._writer.executescript(_TABLES + f"PRAGMA user_version = {SCHEMA};")
        self._reader = self._connect()
        self._reader.execute("PRAGMA query_only = ON")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )

    def _remove(self) -> None:
        with contextlib.suppress(AttributeError):
            self._writer.close()
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file."""
        with self._lock, self._reading:
            self._reader.close()
            self._writer.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    def add_events(self, events: Iterable[Event]) -> None:
        """Adds the groups that workers said they stored."""
        rows = [_row_of(event) for event in events if _possible(event)]  # type: ignore[arg-type]
        if rows:
            with self._transaction() as writer:
                writer.executemany(_FROM_EVENT, rows)
                causes = {row[_CAUSE] for row in rows} - {""}
                writer.executemany(_NAME, [("cause", cause) for cause in causes])

    def add_version(
        self,
        version: int,
        at: float,
        rows: Sequence[GroupRow],
        missing: Sequence[tuple[str, int, str]] = (),
        dropped: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Adds what a version consumed: groups that were read, ``missing`` ones with their status,
        and the groups that it dropped. The version then counts as indexed."""
        with self._transaction() as writer:
            stored = [_stored(row) for row in rows]
            writer.executemany(_FROM_GROUP, stored)
            names = {(kind, row[kind]) for row in stored for kind in ("task", "cause")}
            writer.executemany(_NAME, [(kind, name) for kind, name in names if name])
            writer.executemany(
                _NAMED, [(worker, number, at, version, why) for worker, number, why in missing]
            )
            writer.executemany(
                "UPDATE groups SET dropped = ? WHERE worker = ? AND sequence = ?",
                [(version, worker, sequence) for worker, sequence in dropped],
            )
            writer.execute("INSERT OR IGNORE INTO versions VALUES (?)", (version,))

    def indexed_versions(self) -> set[int]:
        """The versions that were indexed."""
        return {version for (version,) in self._fetch("SELECT version FROM versions", ())}

    @property
    def count(self) -> int:
        """How many groups are in the index; a large number may be some seconds old."""
        statement = "SELECT COUNT(*) FROM groups"
        return self._seldom("count", lambda: int(self._fetch(statement, ())[0][0]))

    def get(self, worker: str, sequence: int) -> GroupRow | None:
        """The record of one group."""
        found = self._fetch(
            f"SELECT {_FIELDS} FROM groups WHERE worker = ? AND sequence = ?",  # noqa: S608
            (worker, sequence),
        )
        return _group(found[0]) if found else None

    def find(self, query: GroupQuery, *, after: str = "", limit: int = 50) -> GroupPage:
        """Returns a page of the groups that match; raises `InputError` for a wrong ``after``."""
        column, direction = _ORDERS[query.order]
        clauses, values = _conditions(query)
        if query.text:
            clause, found_names = self._text(query.text)
            clauses, values = [*clauses, clause], [*values, *found_names]
        where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
        counted = self._fetch(
            f"SELECT COUNT(*) FROM (SELECT 1 FROM groups {where} LIMIT {MOST_COUNTED + 1})",  # noqa: S608
            values,
        )
        if after:
            sign = "<" if direction == "DESC" else ">"
            clauses = [*clauses, f"({column}, worker, sequence) {sign} (?, ?, ?)"]
            values = [*values, *_cursor(after)]
            where = f"WHERE {' AND '.join(clauses)}"
        limit = min(limit, MAX_PAGE)
        order = ", ".join(f"{name} {direction}" for name in (column, "worker", "sequence"))
        found = self._fetch(
            f"SELECT {_FIELDS} FROM groups {where} ORDER BY {order} LIMIT ?",  # noqa: S608
            [*values, limit + 1],
        )
        rows = [_group(row) for row in found[:limit]]
        more = len(found) > limit
        token = _token(getattr(rows[-1], column), rows[-1]) if more else ""
        return GroupPage(rows=rows, count=counted[0][0], next=token)

    def _text(self, text: str) -> tuple[str, list[str]]:
        """A condition for groups whose task or cause contains a text, in any case, and its
        values."""
        # SQLite's LIKE ends a pattern at a NUL, and would match everything.
        escaped = text.replace("\x00", "\ufffd")
        for letter in "\\%_":
            escaped = escaped.replace(letter, f"\\{letter}")
        pattern, parts, values = f"%{escaped}%", [], list[str]()
        for kind in ("task", "cause"):
            names = self._fetch(
                "SELECT name FROM names WHERE kind = ? AND name LIKE ? ESCAPE '\\' LIMIT ?",
                (kind, pattern, MOST_NAMES + 1),
            )
            if len(names) > MOST_NAMES:
                parts.append(f"{kind} LIKE ? ESCAPE '\\'")
                values.append(pattern)
            elif names:
                parts.append(f"{kind} IN ({', '.join('?' * len(names))})")
                values += [name for (name,) in names]
        return f"({' OR '.join(parts) or '0'})", values

    def facets(self) -> Facets:
        """The values of families, causes and workers; those of a large index may be some seconds
        old."""
        return self._seldom("facets", self._facets)

    def _facets(self) -> Facets:

        def counts(column: str, clause: str = "") -> list[tuple[str, int]]:
            return self._fetch(
                f"SELECT {column}, COUNT(*) AS n FROM groups {clause} GROUP BY {column} "  # noqa: S608
                f"ORDER BY n DESC, {column} LIMIT {MAX_FACETS}",
                (),
            )

        workers = counts("worker")
        return Facets(
            families=[(name, n) for name, n in counts("family") if name],
            causes=counts("cause", "WHERE cause > ''"),
            workers=workers,
            groups=self.count,
            read=self._fetch("SELECT COUNT(*) FROM groups WHERE task > ''", ())[0][0],
        )

    def _seldom(self, name: str, compute: Callable[[], _T]) -> _T:
        """Returns a value that may take long to compute: the last one if no group was added since,
        or if it took more than `LONG_S` and is younger than `SHARE` times that."""
        written = self._fetch("PRAGMA data_version", ())[0][0]
        known = self._counted.get(name)
        if known is not None and (known.written == written or time.monotonic() < known.due):
            return cast("_T", known.value)
        began = time.thread_time()
        value = compute()
        took = time.thread_time() - began
        due = time.monotonic() + SHARE * took if took > LONG_S else 0.0
        self._counted[name] = _Counted(value, written, due)
        return value

    def _fetch(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()


def _row_of(event: Generated) -> tuple[Any, ...]:
    versions = [_within(version) for version in event.versions]
    return (
        event.process,
        event.sequence,
        event.at,
        event.reward_mean,
        _within(event.tokens),
        _within(event.failed),
        _storable(event.cause),
        min(versions, default=None),
        max(versions, default=None),
    )


def _stored(row: GroupRow) -> dict[str, Any]:
    values = msgspec.structs.asdict(row)
    return {
        name: _storable(value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def _possible(event: Event) -> bool:
    """Tells whether an event names a group that can exist: anyone who writes to the bucket may have
    written it."""
    return (
        isinstance(event, Generated)
        and keys.valid_name(event.process)
        and 0 <= event.sequence <= keys.MAX_NUMBER
    )


def _within(value: int) -> int:
    return max(-1, min(value, _LARGEST))


def _storable(text: str) -> str:
    """Replaces what SQLite cannot store, which is what UTF-8 cannot encode."""
    return text[:MAX_CAUSE].encode("utf-8", "replace").decode()


def _group(row: Sequence[Any]) -> GroupRow:
    return GroupRow(**dict(zip(GroupRow.__struct_fields__, row, strict=True)))


def _conditions(query: GroupQuery) -> tuple[list[str], list[Any]]:
    clauses: list[str] = []
    values: list[Any] = []
    for name in ("task", "family", "worker", "cause"):
        if value := getattr(query, name):
            clauses.append(f"{name} = ?")
            values.append(value)
    for clause, value in (
        ("trained = ?", query.version),
        ("trained >= ?", query.version_min),
        ("trained <= ?", query.version_max),
        ("reward >= ?", query.reward_min),
        ("reward <= ?", query.reward_max),
    ):
        if value is not None:
            clauses.append(clause)
            values.append(value)
    if query.failed:
        clauses.append("failed > 0")
    if query.dropped:
        clauses.append("dropped IS NOT NULL")
    return clauses, values


def _token(key: float, row: GroupRow) -> str:
    data = json.dumps([key, row.worker, row.sequence], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _cursor(token: str) -> tuple[float, str, int]:
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        return msgspec.json.decode(data, type=tuple[float, str, int])
    except (ValueError, msgspec.DecodeError) as error:
        raise InputError(f"{token[:40]!r} is not a place in a list of groups") from error
