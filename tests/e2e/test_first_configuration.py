"""A new user's first steps: a configuration is written, and its run ends with proven weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.store import open_bucket
from deltawire.sync import newest_version


def deltawire(*arguments, folder):
    """Run a command in a folder; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "deltawire", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.drills
@pytest.mark.long
def test_what_init_writes_runs(tmp_path):
    deltawire("init", "first.toml", "--versions", "2", folder=tmp_path)
    path = Path(tmp_path / "first.toml")
    text = path.read_text()
    for before, after in (
        ("max_steps = 400", "max_steps = 4"),
        ("heldout = 200", "heldout = 8"),
        ("workers = 2", "workers = 1"),
        ("layers = 4", "layers = 1"),
        ("groups_per_step = 16", "groups_per_step = 2"),
        ("every = 1\n", "every = 0\n"),
    ):
        text = text.replace(before, after)
    path.write_text(text)
    deltawire("run", "first.toml", "--plain", folder=tmp_path)
    bucket = open_bucket(str(tmp_path / "runs" / "first" / "bucket"))
    assert newest_version(bucket) == 2
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
