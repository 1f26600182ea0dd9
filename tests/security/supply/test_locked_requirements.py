"""requirements/ locks each extra by hash, and the bill of materials says what that is."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "requirements"
LINE = re.compile(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.]*) --hash=sha256:([0-9a-f]{64})")
KNOWN_LICENSES = re.compile(
    r"mit|bsd|apache|isc|psf|python software|mpl|mozilla|unlicense|zlib|cc0|hpnd|0bsd|public domain"
    r"|unicode|lgpl|zpl|free",
    re.IGNORECASE,
)


@cache
def script():
    spec = importlib.util.spec_from_file_location("lock_script", ROOT / "scripts/lock.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def locked(extra):
    """Version and hash by package, as a file states them."""
    lines = (FOLDER / f"{extra}.txt").read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), extra
    return {match[1]: (match[2], match[3]) for match in found}


def bill():
    return json.loads((FOLDER / "sbom.cdx.json").read_text())


DIRECT = {**script().extras(), **script().separate()}
EXTRAS = sorted(DIRECT)


def test_there_is_one_file_for_each_extra():
    # real.txt is no extra: scripts/real_model.py unpacks its packages and installs none.
    assert sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem != "real") == EXTRAS
    assert set(EXTRAS) - {"build", "core", "torch"} == set(
        script().project()["optional-dependencies"]
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_direct_dependency_is_locked_in_its_range(extra):
    """After a changed range or a new dependency, run `make lock`."""
    text = (FOLDER / f"{extra}.txt").read_text()
    for one in DIRECT[extra]:
        name = canonicalize_name(one.name)
        if name in script().NOT_LOCKED and extra != "torch":
            version = re.search(rf"^# not locked: {name}==(\S+) ", text, re.MULTILINE)[1]
        else:
            version = locked(extra)[name][0]
        assert one.specifier.contains(version), f"{extra}: {name} {version} is not in {one}"


def test_ranges_end_at_the_next_minor_release():
    """Packages that break their users in minor releases are admitted as far as they are tested."""
    strict = {"torch", "transformers", "peft", "trl", "tinker", "verifiers"}
    found = {}
    for group in script().extras().values():
        found |= {one.name: one.specifier for one in group if one.name in strict}
    assert found.keys() == strict
    release = re.search(r"^torch==(\S+)", (FOLDER / "torch.txt").read_text(), re.MULTILINE)[1]
    for name, specifier in found.items():
        version = release if name == "torch" else {**locked("dev"), **locked("rl")}[name][0]
        major, minor = map(int, version.split(".")[:2])
        assert specifier.contains(version)
        assert not specifier.contains(f"{major}.{minor + 1}.0"), name


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_line_has_a_hash(extra):
    assert locked(extra)
    text = (FOLDER / f"{extra}.txt").read_text()
    assert "://" not in text
    assert len(text.splitlines()) < 200


def test_extras_agree_with_each_other():
    """One environment can hold several of them, and PyTorch."""
    every: dict[str, tuple[str, str]] = {}
    for extra in set(EXTRAS) - {"trackio"}:
        for name, found in locked(extra).items():
            assert every.setdefault(name, found) == found, f"{extra}: {name}"


def test_the_bill_of_materials_agrees_with_the_locks():
    """The members that CycloneDX 1.5 requires, and the hashes of the locked files."""
    table = bill()
    assert (table["bomFormat"], table["specVersion"], table["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", table["serialNumber"]
    )
    components = table["components"]
    assert len({one["bom-ref"] for one in components}) == len(components)
    found = {}
    for one in components:
        assert one["type"] == "library"
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
        for value in one.get("hashes", ()):
            assert value["alg"] == "SHA-256"
            found[one["name"], one["version"]] = value["content"]
    every = {(name, v): digest for extra in EXTRAS for name, (v, digest) in locked(extra).items()}
    assert found == every
    assert len(components) == len(every)
    assert "://" not in (FOLDER / "sbom.cdx.json").read_text().replace("urn:uuid", "")


def test_licences_are_known():
    """Each direct dependency states one; of the others, what is stated must be known."""
    direct = {canonicalize_name(one.name) for group in EXTRAS for one in DIRECT[group]}
    for one in bill()["components"]:
        if one["name"] not in direct and "licenses" not in one:
            continue
        (licence,) = one["licenses"]
        text = licence.get("expression") or licence["license"]["name"]
        if re.search("NVIDIA|Proprietary", text):  # CUDA libraries, which PyTorch brings.
            assert one["name"].startswith(("nvidia-", "cuda-"))
            assert one["name"] in locked("torch")
            continue
        assert KNOWN_LICENSES.search(text), f"{one['name']}: {text!r}"
        assert not re.search(r"\bA?GPL", text), f"{one['name']}: {text}"


def test_packages_without_a_wheel_are_the_known_ones():
    """pip runs the build scripts of such a package; a new one is looked at first."""
    sources = {
        one["name"]
        for one in bill()["components"]
        for prop in one.get("properties", ())
        if prop["name"] == "deltawire:file" and not prop["value"].endswith(".whl")
    }
    assert sources == script().SOURCE_ONLY


def test_a_closure_follows_markers_and_extras():
    module = script()

    def package(name, *requires):
        return module.Package(name, "1.0", "0" * 64, f"{name}.whl", "MIT", requires)

    packages = {
        one.name: one
        for one in (
            package("a", "b", "c; extra == 'more'", "d; sys_platform == 'win32'"),
            *(package("b", "a"), package("c"), package("d"), package("torch", "d")),
        )
    }
    names = [one.name for one in module.closure([Requirement("a")], packages)]
    assert names == ["a", "b"]
    found = module.closure([Requirement("a[more]"), Requirement("torch")], packages)
    assert [one.name for one in found] == ["a", "b", "c", "torch"]
    text = module.lock_text("x", found)
    assert "# not locked: torch==1.0 (" in text
    assert "torch==1.0 --hash" not in text
    assert "torch==1.0 --hash" in module.lock_text("torch", found)
    assert f"c==1.0 --hash=sha256:{'0' * 64}" in text.splitlines()
