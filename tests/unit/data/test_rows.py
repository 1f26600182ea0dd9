"""Rows of every format are the same rows, and what cannot be read is named."""

import json

import pytest

from deltawire.data import open_rows, require_columns
from deltawire.errors import InputError

ROWS = [{"question": f"q{n}", "answer": n, "text": "ü" * n} for n in range(7)]


def write_lines(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows=ROWS):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=3)
    return path


def saved(path, rows=ROWS):
    """Writes what `Dataset.save_to_disk` writes, in two shards."""
    arrow = pytest.importorskip("pyarrow")
    path.mkdir(parents=True)
    names = []
    for number, part in enumerate((rows[:3], rows[3:])):
        names.append(f"data-{number:05}-of-00002.arrow")
        table = arrow.Table.from_pylist(part)
        with (
            arrow.OSFile(str(path / names[-1]), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    (path / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (path / "state.json").write_text(json.dumps(state))
    return path


def read(path, **settings):
    rows = open_rows(path, **settings)
    return [rows[number] for number in range(len(rows))]


def test_every_format_has_the_same_rows(tmp_path):
    assert read(write_lines(tmp_path / "a.jsonl")) == ROWS
    assert read(parquet(tmp_path / "a.parquet")) == ROWS
    assert read(saved(tmp_path / "saved")) == ROWS
    folder = tmp_path / "folder"
    write_lines(folder / "train-00000.jsonl", ROWS[:4])
    write_lines(folder / "train-00001.jsonl", ROWS[4:])
    write_lines(folder / "test-00000.jsonl", ROWS[:1])
    write_lines(folder / ".cache" / "train-00002.jsonl", ROWS)
    assert read(folder, split="train") == ROWS
    assert read(folder, split="test") == ROWS[:1]
    parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    assert read(tmp_path / "hub", split="train") == ROWS


def test_what_hugging_face_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    assert read(tmp_path / "one") == ROWS
    both = datasets.DatasetDict({"train": whole, "test": whole.select(range(2))})
    both.save_to_disk(tmp_path / "both")
    assert read(tmp_path / "both", split="test") == ROWS[:2]
    with pytest.raises(InputError, match="has several splits; set split to one of train, test"):
        open_rows(tmp_path / "both")
    with pytest.raises(InputError, match="has no split 'dev'"):
        open_rows(tmp_path / "both", split="dev")


def test_blank_lines_and_long_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    long = {"text": "x" * (1 << 17)}
    path.write_text("\n  \n" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(long))
    assert read(path) == [ROWS[0], long]
    path.write_text(json.dumps(ROWS[0]) + "\n[1]\n{no\n")
    rows = open_rows(path)
    with pytest.raises(InputError, match=r"row 1 of .* is not a JSON object"):
        rows[1]
    with pytest.raises(InputError, match=r"row 2 of .* is not JSON"):
        rows[2]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="no data at"):
        open_rows(tmp_path / "none")
    with pytest.raises(InputError, match=r"has no \.jsonl or \.parquet files"):
        open_rows(tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(InputError, match="is not a data file"):
        open_rows(tmp_path / "a.csv")
    with pytest.raises(InputError, match="has no rows"):
        open_rows(write_lines(tmp_path / "empty.jsonl", []))
    rows = open_rows(write_lines(tmp_path / "a.jsonl"))
    require_columns(rows, ["question"], source="here")
    with pytest.raises(InputError, match="here has no column 'solution'; its columns are answer"):
        require_columns(rows, ["question", "solution"], source="here")


def test_damaged_files_are_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(InputError, match="is not Parquet"):
        open_rows(tmp_path / "a.parquet")
    path = saved(tmp_path / "saved")
    state = {"_data_files": [{"filename": "../../secret.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="names files that are not in its folder"):
        open_rows(path)
