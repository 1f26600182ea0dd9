"""Snapshots for hosted providers: their own package reads exports, and imports round-trip."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from deltawire.errors import CorruptError, InputError
from deltawire.export.snapshots import SPEC, export_snapshot, import_snapshot
from deltawire.store import Bucket, open_bucket
from deltawire.sync import CheckpointPublisher, read_run
from deltawire.wire.run import Run

ROWS, COLUMNS = 64, 96


def write_checkpoint(path: Path, step: int) -> Path:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 14, ROWS * COLUMNS, np.uint16)
    for _ in range(step):
        bits[rng.integers(0, bits.size, bits.size // 50)] ^= 1
    norm = np.arange(5, dtype=np.float32) + step
    entries = {
        "weight": {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, bits.nbytes]},
        "norm": {
            "dtype": "F32",
            "shape": [5],
            "data_offsets": [bits.nbytes, bits.nbytes + norm.nbytes],
        },
    }
    text = json.dumps(entries).encode() + b"  "
    path.mkdir()
    data = len(text).to_bytes(8, "little") + text + bits.tobytes() + norm.tobytes()
    (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def published(tmp_path: Path) -> tuple[Bucket, Run, list[Path]]:
    bucket = open_bucket("memory://")
    paths = [write_checkpoint(tmp_path / f"step-{n}", n) for n in range(3)]
    with CheckpointPublisher(bucket, name="my run") as series:
        for path in paths:
            series.publish(path)
    run = read_run(bucket)
    return bucket, run, paths


def test_a_whole_snapshot_is_the_directory_and_its_spec(
    published: tuple[Bucket, Run, list[Path]], tmp_path: Path
) -> None:
    bucket, run, paths = published
    made = export_snapshot(bucket, run, 1, tmp_path / "out")
    assert made.incremental_snapshot_metadata is None
    assert "/" not in made.identity
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    spec = json.loads(files.pop(SPEC))["tensor_map"]
    assert files == {path.name: path.read_bytes() for path in paths[1].iterdir()}
    assert spec == {
        "weight": {"shape": [ROWS, COLUMNS], "dtype": "BF16"},
        "norm": {"shape": [5], "dtype": "F32"},
    }
    with pytest.raises(InputError, match="already"):
        export_snapshot(bucket, run, 1, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_the_providers_own_package_rebuilds_the_version(
    published: tuple[Bucket, Run, list[Path]], tmp_path: Path
) -> None:
    library = pytest.importorskip("fireworks_delta_compression")
    bucket, run, paths = published
    made = export_snapshot(bucket, run, 2, tmp_path / "delta", base=0)
    assert made.incremental_snapshot_metadata == {
        "previous_snapshot_identity": export_snapshot(bucket, run, 0, tmp_path / "b").identity,
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    delta = tmp_path / "delta" / "model.safetensors"
    assert delta.stat().st_size < (paths[2] / "model.safetensors").stat().st_size / 2
    library.decompress_delta_into_source(
        str(delta), str(tmp_path / "b" / "model.safetensors"), "arc_v2"
    )
    from safetensors.torch import load_file as load

    rebuilt, wanted = load(tmp_path / "b" / "model.safetensors"), load(paths[2] / delta.name)
    assert all(bool((rebuilt[name] == wanted[name]).all()) for name in wanted)


def test_an_export_is_imported_byte_for_byte(
    published: tuple[Bucket, Run, list[Path]], tmp_path: Path
) -> None:
    pytest.importorskip("fireworks_delta_compression")
    bucket, run, paths = published
    export_snapshot(bucket, run, 2, tmp_path / "delta", base=1)
    import_snapshot(tmp_path / "delta", paths[1], tmp_path / "whole")
    for path in paths[2].iterdir():
        assert (tmp_path / "whole" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(CorruptError, match="does not fit"):
        import_snapshot(tmp_path / "delta", paths[0], tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
