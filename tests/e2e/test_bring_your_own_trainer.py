"""The example that brings its own trainer works as documented."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "bring_your_own_trainer" / "run.py"


def test_the_example_arrives_byte_for_byte(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    told = capfd.readouterr()
    assert "files are the same, byte for byte" in told.out
    assert "checkpoint-100: version 0 already" in told.err
    shards = sorted(path.name for path in (tmp_path / "serving" / "model").glob("*.safetensors"))
    assert len(shards) > 1
