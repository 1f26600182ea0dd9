"""scripts/setup.sh installs what is locked, and scripts/newest.py says what goes beyond that."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys

import locked_versions
import pytest
from documents import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

FAKE_PYTHON = """#!/bin/sh
# Stands for the environment's Python: notes what pip was asked for.
if [ "$1" = -c ]; then
    case "$2" in *implementation*) exit "${FAKE_MISFIT:-0}" ;; esac
    exit 0
fi
echo "$*" >>"$FAKE_LOG"
"""


def script():
    spec = importlib.util.spec_from_file_location("newest_script", ROOT / "scripts/newest.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture
def asked(tmp_path):
    """Returns the packages that a setup with these variables asked pip for."""
    fake = tmp_path / "venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)

    def run(**variables):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        places = {"VENV": str(tmp_path / "venv"), "PYTHON": sys.executable, "FAKE_LOG": str(log)}
        places["CHROMIUM"] = sys.executable
        script = ROOT / "scripts" / "setup.sh"
        environment = {**os.environ, **places, **variables}
        done = subprocess.run(
            ["sh", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines(), done.stdout

    return run


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the lock fits x86-64 Linux"
)
def test_setup_installs_the_lock_where_it_fits(asked):
    lines, said = asked()
    *files, own = lines
    assert said == ""
    assert all("--require-hashes" in line and "--no-deps" in line for line in files)
    named = [word for line in files for word in line.split() if word.startswith("requirements/")]
    assert named == [f"requirements/{name}.txt" for name in ("build", "core", "rl", "dev")]
    assert own.endswith("--no-deps --no-build-isolation --editable .")


@pytest.mark.parametrize("variables", [{"RANGES": "1"}, {"FAKE_MISFIT": "1"}])
def test_setup_says_that_it_installs_ranges(asked, variables):
    (line,), said = asked(**variables)
    assert line.endswith("--editable .[rl,dev]")
    assert "ranges of pyproject.toml" in said


def test_setup_says_that_a_browser_is_missing(asked, tmp_path):
    _, said = asked(CHROMIUM=str(tmp_path / "chromium"))
    assert "the page of deltawire watch is not tested" in said


def test_locked_versions_are_read_with_pytorch():
    found = locked_versions.locked()
    assert {"msgspec", "torch", "transformers", "pytest"} <= found.keys()


def test_upper_bounds_are_dropped():
    names = ["a>=1.2,<2", "b[x]>=3,<4; sys_platform == 'linux'", "c~=1.0", "d"]
    found = [script().without_upper_bound(Requirement(name)) for name in names]
    assert found == ["a>=1.2", 'b[x]>=3; sys_platform == "linux"', "c", "d"]


def test_changes_say_what_the_range_admits():
    found = script().changed(
        {"a": "1.3", "b": "2.0", "c": "1.0", "new": "1"},
        {"a": "1.2", "b": "1.9", "c": "1.0"},
        {"a": SpecifierSet(">=1,<2"), "b": SpecifierSet(">=1,<2")},
    )
    assert [(one.name, one.installed, one.allowed) for one in found] == [
        ("a", "1.3", True),
        ("b", "2.0", False),
    ]


def test_failures_are_grouped_by_what_they_say(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="m" name="one"><failure message="old name&#10;more"/></testcase>'
        '<testcase classname="m" name="two"><error message="old name"/></testcase>'
        '<testcase classname="m" name="three"/>'
        "</testsuite></testsuites>"
    )
    assert script().failures(report) == {"old name": ["m.one", "m.two"]}
