"""Checks an installed deltawire: its files, that it needs no torch, that it moves a model.

Runs with the Python that it is installed in, and prints one JSON object with the time that
importing it and ``deltawire --help`` take: the best of five, in milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

DATA = (
    "_native.pyi",
    "py.typed",
    "dashboard/report.css",
    "plan/accelerators.json",
    "plan/models.json",
    "plan/profiles.json",
    "plan/published.json",
    "watch/static/index.html",
    "watch/static/style.css",
    "watch/static/uplot/uPlot.esm.js",
    "watch/static/uplot/uPlot.min.css",
    "watch/static/uplot/LICENSE.txt",
)
HEAVY = ("torch", "transformers", "aiohttp")
ROUNDS = 5


def check_files() -> None:
    """Every file that the package reads, and those that its page loads, are there."""
    package = files("deltawire")
    missing = [name for name in DATA if not package.joinpath(name).is_file()]
    if missing:
        raise SystemExit(f"the wheel lacks {', '.join(missing)}")
    page = package.joinpath("watch/static/main.js").read_text()
    if "export" not in page and "import" not in page:
        raise SystemExit("main.js is not the page's module")


def check_without_torch() -> None:
    """Importing and ``--help`` work, in an environment without the heavy packages."""
    present = [name for name in HEAVY if importlib.util.find_spec(name) is not None]
    if present:
        raise SystemExit(f"this environment is not empty: it has {', '.join(present)}")
    import deltawire

    if deltawire.__version__ != version("deltawire"):
        raise SystemExit("the package and its metadata state different versions")


def check_round_trip() -> None:
    """Publish versions to a folder, and read each of them back, bit for bit."""
    from deltawire.store import open_bucket
    from deltawire.testing.tiny import audit, start_publisher, weights

    with tempfile.TemporaryDirectory() as folder:
        bucket = open_bucket(folder)
        publisher = start_publisher(bucket)
        for version in range(4):
            publisher.publish(weights(version))
        publisher.close()
        if audit(bucket, weights) != 3:
            raise SystemExit("the newest version is not the last one that was published")


def best_ms(*arguments: str) -> float:
    """Milliseconds of the fastest of several runs of this Python."""
    spent = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(  # noqa: S603 - our own words
            [sys.executable, *arguments], check=True, capture_output=True
        )
        spent.append(time.perf_counter() - started)
    return round(min(spent) * 1e3, 1)


def main() -> int:
    """Run all checks."""
    check_files()
    check_without_torch()
    check_round_trip()
    from deltawire._native import simd

    command = str(Path(sys.executable).with_name("deltawire"))
    subprocess.run(  # noqa: S603 - the command that was just installed
        [command, "--version"], check=True, capture_output=True
    )
    found = {
        "version": version("deltawire"),
        "python": sys.version.split()[0],
        "simd": simd(),
        "python_ms": best_ms("-c", "pass"),
        "import_ms": best_ms("-c", "import deltawire"),
        "help_ms": best_ms("-m", "deltawire", "--help"),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
