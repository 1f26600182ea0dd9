"""The wheel, as a new user gets it: built from the source archive, in an empty environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_wheel_is_built_and_works_in_an_empty_environment(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dist.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    names = sorted(path.suffix for path in tmp_path.iterdir())
    assert names == [".gz", ".whl"]
    # Times are printed for the release's checklist; a busy machine may take any.
    assert found["import_ms"] > 0
    assert found["help_ms"] > 0
