"""The workflows of .github agree with pyproject.toml, the Makefile and the scripts."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from documents import ROOT

import deltawire

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEELS = PROJECT["tool"]["cibuildwheel"]


def read(name):
    # YAML 1.1 reads the key "on" as true.
    return yaml.safe_load((FOLDER / name).read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_a_workflow_may_do_little_and_ends(name):
    workflow = read(name)
    assert workflow[True], "no trigger"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        assert set(job.get("permissions", {})) <= {"contents", "id-token"}
        known = workflow["jobs"].keys()
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= known
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            # A branch such as main may change under a release; one action names its releases so.
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d[\d.]*|release/v1)", step["uses"])
        # Text of a pull request in a script would be run.
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_commands_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (FOLDER / name).read_text()
    used = re.findall(r"\bmake ([a-z-]+)", text)
    assert set(used) <= targets
    assert used or name != "ci.yml"
    paths = re.findall(r"\b(?:src|scripts)/[\w./]+\.py\b", text)
    assert all((ROOT / path).is_file() for path in paths)


def test_ci_runs_what_a_contributor_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    own = {line for line in lines if line.startswith(("make ", "sh "))}
    assert "sh scripts/first_hour.sh" in own
    assert own <= {step["run"] for step in steps(read("ci.yml")) if "run" in step}
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    versions = [
        step["with"]["python-version"]
        for step in steps(read("ci.yml"))
        if "python-version" in step.get("with", {})
    ]
    assert set(versions) == {oldest}


def test_wheels_are_built_for_every_configured_platform():
    rows = read("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    built = {(row["platform"], row["arch"]) for row in rows}
    configured = {
        (platform, arch) for platform in ("linux", "macos") for arch in WHEELS[platform]["archs"]
    }
    assert built == configured
    for arch in WHEELS["linux"]["archs"]:
        for libc in ("manylinux", "musllinux"):
            assert WHEELS["linux"][f"{libc}-{arch}-image"].startswith(libc)


def test_wheels_begin_at_the_oldest_python_and_share_one_stable_abi():
    built = [name.removesuffix("-*") for name in WHEELS["build"].split()]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert built[0] == f"cp{oldest.replace('.', '')}"
    assert built == [f"cp3{minor}" for minor in range(11, 11 + len(built))]
    # An older cibuildwheel does not know the newest Python.
    used = next(
        step["uses"]
        for step in steps(read("wheels.yml"))
        if step.get("uses", "").startswith("pypa/cibuildwheel")
    )
    assert tuple(map(int, used.partition("@v")[2].split("."))) >= (3, 2, 0)
    assert "cp314" in built
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] in built
    assert (ROOT / WHEELS["test-command"].partition("{project}/")[2]).is_file()


def test_only_a_tag_of_this_version_is_published():
    job = read("wheels.yml")["jobs"]["publish"]
    assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(job["needs"]) == {"wheels", "source"}
    check = next(step["run"] for step in job["steps"] if "__version__" in step.get("run", ""))
    pattern = re.search(r'grep -qx "(.*)" (\S+)', check)
    assert pattern is not None
    line = pattern[1].replace('\\"', '"').replace("${GITHUB_REF_NAME#v}", deltawire.__version__)
    assert line in (ROOT / pattern[2]).read_text().splitlines()
