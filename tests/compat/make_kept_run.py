"""Keeps a small run of this release, so that later releases read, join and continue it.

python tests/compat/make_kept_run.py tests/compat/kept/0.1.0.tar.xz

The run is interrupted after a few versions, as an upgrade would. Events are left out.
"""

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

VERSIONS = 3
CONFIG = """\
name = "kept"
[model.build]
hidden_size = 16
layers = 1
head_size = 8
feed_forward_size = 32
context = 128
[task]
heldout = 4
options = { min_word_len = 3, max_word_len = 4 }
[warm_start]
max_steps = 2
check_every = 2
[rollout]
workers = 1
group_size = 4
max_tokens = 6
slots = 16
context = 96
[train]
versions = 1000000
groups_per_step = 2
max_staleness = 2
checkpoint_every = 2
"""
LEFT_OUT = ("events", "archive", "leases")


def main() -> None:
    """Makes the run and packs its bucket."""
    with TemporaryDirectory() as folder:
        config, out = Path(folder) / "kept.toml", Path(folder) / "out"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "deltawire", "run", str(config), "--out", str(out)]
        with subprocess.Popen([*command, "--plain"]) as run:
            manifests = out / "bucket" / "weights" / "manifests"
            while not manifests.is_dir() or len(list(manifests.iterdir())) <= VERSIONS:
                if run.poll() is not None:
                    sys.exit("the run ended by itself")
                time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            run.wait()
        for path in (out / "bucket" / "heartbeats").iterdir():
            heartbeat = json.loads(path.read_text()) | {"host": "kept", "pid": 1}
            path.write_text(json.dumps(heartbeat, separators=(",", ":")) + "\n")
        with tarfile.open(sys.argv[1], "w:xz") as packed:
            for path in sorted((out / "bucket").rglob("*")):
                name = path.relative_to(out / "bucket")
                if path.is_file() and name.parts[0] not in LEFT_OUT:
                    packed.add(path, str(name))


if __name__ == "__main__":
    main()
