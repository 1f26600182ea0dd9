"""Builds the source archive, a wheel from it, and tests the wheel in an empty environment.

    .venv/bin/python scripts/dist.py --out dist

The environment holds nothing but the wheel and what it requires; ``scripts/check_wheel.py`` runs in
it. Wheels of other platforms and versions of Python come from cibuildwheel, which runs the same
check.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(out: Path) -> Path:
    """Build both archives into ``out``; returns the wheel."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as fresh:
        # The wheel is built from the source archive, so a file that this lacks is noticed.
        _run([sys.executable, "-m", "build", "--outdir", fresh, str(ROOT)])
        for archive in Path(fresh).iterdir():
            shutil.move(archive, out / archive.name)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def check(wheel: Path) -> None:
    """Install a wheel into an empty environment and run the check there."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _run([*pip, str(wheel)])
        # Elsewhere than in the checkout, whose files would be found first.
        _run([python, str(ROOT / "scripts" / "check_wheel.py")], cwd=folder)


def _run(command: list[str], *, cwd: str | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)  # noqa: S603 - our own words


def main() -> int:
    """Build, install, check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    wheel = build(parser.parse_args().out.resolve())
    check(wheel)
    sys.stdout.write(f"{wheel}: built and checked\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
