"""Reads rows of JSONL and Parquet files, folders of them, and saved Hugging Face datasets.

::

    data.jsonl                     one JSON object a line
    data.parquet
    folder/*.jsonl | *.parquet     in the order of their names; with a split, those named after it
    folder/dataset_info.json       what `datasets.Dataset.save_to_disk` writes
    folder/dataset_dict.json       what `datasets.DatasetDict.save_to_disk` writes: one is a split

Parquet and Arrow files need the extra ``data``. They are mapped into memory, not read; for a JSONL
file the offsets of the lines are kept, eight bytes each.
"""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

MAX_ROW_BYTES = 64 << 20
_READ_BYTES = 1 << 24
_LONGEST_BLANK = 64
_HINT = "give a .jsonl or .parquet file, a folder of them, or what save_to_disk wrote"


class Rows(Protocol):
    """Rows of one dataset by their number.

    Example::

        rows = open_rows(Path("data/train.jsonl"))
        print(len(rows), rows[0]["question"])
    """

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns; for JSONL, those of the first row."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One row; raises `InputError` for a line that is not a JSON object."""
        ...


def open_rows(path: Path, *, split: str = "") -> Rows:
    """Opens the rows at ``path``, of one ``split`` if there are several.

    Raises `InputError` if there is nothing to read, if the split is missing or not unique, and
    without pyarrow where it is needed.
    """
    if not path.exists():
        raise InputError(f"no data at {path}", hint=_HINT)
    if path.is_file():
        if split:
            raise InputError(f"{path} is a single file without a split {split!r}")
        rows = _open_file(path)
    elif (path / "dataset_dict.json").is_file():
        rows = _saved(path / _split_of(path, split))
    elif (path / "dataset_info.json").is_file() or (path / "state.json").is_file():
        if split:
            raise InputError(f"{path} holds a single dataset without a split {split!r}")
        rows = _saved(path)
    else:
        rows = _joined([_open_file(file) for file in _files(path, split)])
    if not len(rows):
        raise InputError(f"the data at {path} has no rows", hint=_HINT)
    return rows


def require_columns(rows: Rows, names: Iterable[str], *, source: str) -> None:
    """Raises `InputError` if a named column is missing."""
    columns = rows.columns
    missing = [name for name in names if name not in columns]
    if missing:
        raise InputError(
            f"{source} has no column {missing[0]!r}",
            hint=f"its columns are {', '.join(sorted(map(str, columns))[:20])}",
        )


def _split_of(path: Path, split: str) -> str:
    try:
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}/dataset_dict.json is damaged: {error}") from error
    known = [name for name in splits if isinstance(name, str) and "/" not in name]
    if split not in known and not (not split and len(known) == 1):
        raise InputError(
            f"{path} has no split {split!r}" if split else f"{path} has several splits",
            hint=f"set split to one of {', '.join(known)}",
        )
    return split or known[0]


def _files(path: Path, split: str) -> list[Path]:
    every = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in _OPENERS and not any(p.startswith(".") for p in file.parts)
    )
    if split:
        every = [
            file
            for file in every
            if file.stem == split or file.stem.startswith(f"{split}-") or file.parent.name == split
        ]
    if not every:
        named = f" of split {split!r}" if split else ""
        raise InputError(f"{path} has no .jsonl or .parquet files{named}", hint=_HINT)
    return every


def _open_file(path: Path) -> Rows:
    if path.suffix not in _OPENERS:
        raise InputError(f"{path} is not a data file", hint=_HINT)
    try:
        return _OPENERS[path.suffix](path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


class _JsonLines:
    """Rows of a JSONL file; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._starts, self._ends = _lines(self._data)
        self.columns: Sequence[str] = list(self[0]) if len(self) else []

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, end = int(self._starts[number]), int(self._ends[number])
        if end - start > MAX_ROW_BYTES:
            raise InputError(f"row {number} of {self._path} has more than {MAX_ROW_BYTES} bytes")
        try:
            row = json.loads(self._data[start:end])
        except (ValueError, RecursionError) as error:
            raise InputError(f"row {number} of {self._path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"row {number} of {self._path} is not a JSON object")
        return row


def _lines(data: mmap.mmap | bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the first byte of each line that is not blank, and the byte after its last, int64
    each.
    """
    breaks = [np.zeros(0, np.int64)]
    for place in range(0, len(data), _READ_BYTES):
        piece = np.frombuffer(data[place : place + _READ_BYTES], np.uint8)
        breaks.append(np.flatnonzero(piece == ord("\n")) + place)
    ends = np.concatenate([*breaks, [len(data)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    kept = [
        number
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        if end - start > _LONGEST_BLANK or data[start:end].strip()
    ]
    return starts[kept], ends[kept]


class _ArrowRows:
    """Rows of an Arrow table."""

    def __init__(self, table: Any, path: Path) -> None:
        self._table = table
        self._path = path
        self.columns: Sequence[str] = list(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(number, 1).to_pylist()[0]
        return row


class _Joined:
    """Rows of several files, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        self.columns: Sequence[str] = parts[0].columns

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]


def _joined(parts: Sequence[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else _Joined(parts)


def require_arrow() -> Any:
    """Imports pyarrow; raises `InputError` that says how to install it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "Parquet files and saved datasets need the package pyarrow",
            hint="pip install 'deltawire[data]'",
        ) from error
    return pyarrow


def _parquet(path: Path) -> Rows:
    arrow = require_arrow()
    try:
        return _ArrowRows(arrow.parquet.read_table(path, memory_map=True), path)
    except arrow.ArrowException as error:
        raise InputError(f"{path} is not Parquet: {error}") from error


def _saved(path: Path) -> Rows:
    """Returns the dataset that `save_to_disk` wrote into ``path``."""
    arrow = require_arrow()
    try:
        state = json.loads((path / "state.json").read_text())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}/state.json is missing or damaged: {error}") from error
    if state.get("_indices_files"):
        raise InputError(
            f"the dataset at {path} has an index mapping",
            hint="save it again after flatten_indices()",
        )
    if any(Path(name).name != name for name in names) or not names:
        raise InputError(f"{path}/state.json names files that are not in its folder")
    try:
        tables = [
            arrow.ipc.open_stream(arrow.memory_map(str(path / name))).read_all() for name in names
        ]
        return _ArrowRows(arrow.concat_tables(tables), path)
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"cannot read the dataset at {path}: {error}") from error


_OPENERS = {".jsonl": _JsonLines, ".parquet": _parquet}
