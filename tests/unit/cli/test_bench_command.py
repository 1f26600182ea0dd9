"""``deltawire bench`` runs from a checkout, and says so where there is none."""

import subprocess
import sys

import pytest

from deltawire.cli import bench
from deltawire.errors import InputError


def test_runs_from_any_folder(tmp_path):
    command = [sys.executable, "-m", "deltawire", "bench", "sync", "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--region-size" in result.stdout


def test_a_wheel_refuses_and_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="needs a checkout") as refused:
        bench.benchmark_commands(tmp_path)
    assert "clone the repository" in refused.value.hint
