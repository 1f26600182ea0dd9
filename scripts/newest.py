"""Tests deltawire with the newest releases of its dependencies, also beyond their ranges.

    make newest                          all tests, in .venv-newest
    make newest TESTS=tests/unit/trl     some of them

Prints each package that is newer than its lock, whether its range admits it, and what broke.
Deprecation warnings fail here: they announce what the next releases break. Exit status 1 if a test
fails. PyTorch is upgraded where the index of its CPU builds is reachable.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-newest"
PYTHON = str(ENVIRONMENT / "bin" / "python")
REPORT = ROOT / "build" / "newest.xml"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]


class Package(NamedTuple):
    """A package whose newest release is not the locked one."""

    name: str
    locked: str
    installed: str
    allowed: bool
    """True if the range of pyproject.toml admits the installed release."""


def without_upper_bound(one: Requirement) -> str:
    """Returns a requirement that admits every later release."""
    lower = [str(part) for part in one.specifier if part.operator not in ("<", "<=", "~=", "==")]
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    marker = f"; {one.marker}" if one.marker else ""
    return f"{one.name}{extras}{','.join(sorted(lower))}{marker}"


def changed(
    installed: Mapping[str, str], locked: Mapping[str, str], ranges: Mapping[str, SpecifierSet]
) -> list[Package]:
    """Returns the packages whose installed release differs from the locked one, by name."""
    return [
        Package(
            name,
            locked[name],
            version,
            ranges[name].contains(version, prereleases=True) if name in ranges else True,
        )
        for name, version in sorted(installed.items())
        if name in locked and version != locked[name]
    ]


def failures(report: Path) -> dict[str, list[str]]:
    """Returns the failed tests of a JUnit report by the first line of what they say."""
    found: dict[str, list[str]] = defaultdict(list)
    # pytest wrote this file a moment ago.
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
        for kind in ("failure", "error"):
            node = case.find(kind)
            if node is not None:
                message = (node.get("message") or "no message").strip().splitlines()[0]
                found[message].append(f"{case.get('classname')}.{case.get('name')}")
    return dict(found)


def install(direct: Sequence[Requirement]) -> None:
    """Make the environment, and upgrade every direct dependency and what it needs."""
    environment = {**os.environ, "RANGES": "1", "VENV": str(ENVIRONMENT)}
    _run(["sh", str(ROOT / "scripts" / "setup.sh")], environment)
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    _run([*pip, "pip", "uv"])
    torch = [
        "uv",
        "pip",
        "install",
        "--python",
        PYTHON,
        "--torch-backend=cpu",
        "--upgrade",
        "torch",
    ]
    if subprocess.run([str(ENVIRONMENT / "bin" / torch[0]), *torch[1:]]).returncode:  # noqa: PLW1510, S603
        sys.stdout.write("no newer CPU build of PyTorch can be reached: it stays as it is\n")
    wanted = sorted({without_upper_bound(one) for one in direct if one.name != "torch"})
    # Equal to what is installed, so that no package brings a build for GPUs.
    version = _installed()["torch"]
    constraint = ENVIRONMENT / "torch.txt"
    constraint.write_text(f"torch=={version}\n")
    _run([*pip, "--upgrade-strategy", "eager", "--constraint", str(constraint), *wanted])


def _installed() -> dict[str, str]:
    (site,) = ENVIRONMENT.glob("lib/python3*/site-packages")
    return {
        canonicalize_name(one.name): one.version
        for one in importlib.metadata.distributions(path=[str(site)])
    }


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own words


def main() -> int:
    """Install, test, report."""
    from lock import extras
    from locked_versions import locked

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", help="files or folders (default: all tests)")
    arguments = parser.parse_args()
    direct = [one for extra in ("core", "rl", "dev") for one in extras()[extra]]
    install(direct)
    REPORT.unlink(missing_ok=True)
    command = [PYTHON, "-m", "pytest", "-n", "3"]
    command += [f"--junitxml={REPORT}", *arguments.tests]
    environment = {**os.environ, "DELTAWIRE_NEWEST": "1"}
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode  # noqa: PLW1510, S603
    ranges = {canonicalize_name(one.name): one.specifier for one in direct}
    installed = {name: re.sub(r"\+.*", "", version) for name, version in _installed().items()}
    sys.stdout.write("\nnewer than the lock:\n")
    for one in changed(installed, locked(), ranges):
        note = "" if one.allowed else "  beyond its range"
        sys.stdout.write(f"  {one.name} {one.locked} -> {one.installed}{note}\n")
    for message, tests in sorted((failures(REPORT) if REPORT.exists() else {}).items()):
        sys.stdout.write(f"\nbreaks {len(tests)} tests: {message}\n")
        sys.stdout.writelines(f"  {test}\n" for test in tests[:5])
    return min(status, 1)


if __name__ == "__main__":
    sys.exit(main())
