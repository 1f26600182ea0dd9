"""Writes requirements/: a hash-locked requirement file for each extra, and a bill of materials.

    make lock            resolves with pip, and writes the files

pip resolves all extras together, at the newest versions that the ranges of pyproject.toml admit.
Each file then holds the closure of one extra, one package a line with the SHA-256 of its file, so
that pip refuses anything else::

    pip install --require-hashes -r requirements/torch.txt
    pip install --require-hashes -r requirements/rl.txt
    pip install --no-deps .

``scripts/setup.sh`` installs these versions. The wheels are those for CPython 3.11 on Linux,
x86-64. PyTorch has a file for itself: that of the default index, with the CUDA libraries that it
needs. Builds for CPUs and for other CUDA releases have the same version and other hashes, and come
from other indices; where one is installed first, the other files are the same. ``build.txt`` holds
what builds deltawire and the packages that have no wheel.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
SBOM = FOLDER / "sbom.cdx.json"
NOT_LOCKED = {"torch": "install torch.txt, or another build of this version, first"}
"""Packages that have a file for themselves, with what to do; what they need comes with them."""
SEPARATE = {
    "torch": "its builds have equal versions and different hashes",
    "build": "it is installed before anything that is built",
    "trackio": "it excludes the versions that the other extras are tested with",
}
"""Files that are resolved without the others, with the reason."""
TITLES = {
    "core": "deltawire without extras",
    "torch": "PyTorch of the default index",
    "build": "The tools that build deltawire and packages without a wheel",
}
BUILD_TOOLS = ("cmake>=3.25,<5", "ninja>=1.11,<2", "setuptools", "wheel>=0.45,<1")
"""The build's tools that no ``requires`` names: scikit-build-core calls CMake and Ninja, and source
archives of `SOURCE_ONLY` need setuptools. PyTorch bounds setuptools."""
RESOLVER = "pip>=25.3,<27"
"""pip before 23.3 downloads every wheel to read what it needs."""
SOURCE_ONLY = frozenset({"cellpylib", "pycosat", "zss"})
"""Packages of which only a source archive fits: pip runs their build scripts. A new one is refused
until it is added here by hand."""
ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}
_SPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")


@dataclass(frozen=True)
class Package:
    """One resolved package: its wheel's hash, licence and direct requirements."""

    name: str
    version: str
    sha256: str
    file: str
    license: str
    requires: tuple[str, ...]


def project() -> dict[str, Any]:
    """The ``[project]`` table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def extras() -> dict[str, list[Requirement]]:
    """The direct requirements by extra; ``core`` are those of the package itself."""
    table = project()
    named = {"core": table["dependencies"], **table["optional-dependencies"]}
    return {name: _direct(texts, named) for name, texts in named.items() if name not in SEPARATE}


def _direct(texts: Iterable[str], named: Mapping[str, list[str]]) -> list[Requirement]:
    """The requirements of an extra; another extra that it names is replaced by that one's."""
    found: list[Requirement] = []
    for one in map(Requirement, texts):
        if one.name == "deltawire":
            for extra in sorted(one.extras):
                found += _direct(named[extra], named)
        else:
            found.append(one)
    return found


def separate() -> dict[str, list[Requirement]]:
    """The direct requirements of the files of `SEPARATE`."""
    table = project()["optional-dependencies"]
    torch = next(one for one in map(Requirement, table["rl"]) if one.name == "torch")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return {
        "torch": [torch],
        "build": [Requirement(text) for text in (*build, *BUILD_TOOLS)],
        "trackio": [Requirement(text) for text in table["trackio"]],
    }


def resolve(wanted: Iterable[str], fixed: Iterable[str] = ()) -> dict[str, Package]:
    """Let pip resolve requirements together, at ``fixed`` versions; by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        constraints.write_text("\n".join(sorted(set(fixed))))
        command = [_resolver(), "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--prefer-binary", "--disable-pip-version-check"]
        command += ["--report", str(report), "--constraint", str(constraints), *wanted]
        # Packages come from the default index only: hashes of local copies say nothing.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL")
        } | {"PIP_CONFIG_FILE": os.devnull}
        subprocess.run(command, check=True, env=environment)  # noqa: S603  (pip, with our words)
        found = json.loads(report.read_text())["install"]
    packages = [_package(one) for one in found]
    sources = {package.name for package in packages if not package.file.endswith(".whl")}
    if new := sorted(sources - SOURCE_ONLY - NOT_LOCKED.keys()):
        raise SystemExit(f"only source archives of {', '.join(new)}: look at them, then add them")
    return {package.name: package for package in packages}


@cache
def _resolver() -> str:
    """An environment with a pip that resolves from metadata; removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="deltawire-lock-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = str(Path(folder) / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", RESOLVER]
    subprocess.run(pip, check=True)  # noqa: S603  (pip, with our words)
    return python


def _own() -> str:
    return str(project().get("version", importlib.metadata.version("deltawire")))


def _package(item: dict[str, Any]) -> Package:
    metadata, download = item["metadata"], item["download_info"]
    name = canonicalize_name(metadata["name"])
    return Package(
        name,
        metadata["version"].partition("+")[0],
        download["archive_info"]["hashes"]["sha256"],
        download["url"].rpartition("/")[2],
        _license(metadata),
        tuple(metadata.get("requires_dist", ())),
    )


def _license(metadata: dict[str, Any]) -> str:
    """The licence: an SPDX expression if the package states one, else the shortest description."""
    stated = metadata.get("license_expression")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # pip before 25 reports no expressions; the installed package has one.
        stated = stated or importlib.metadata.metadata(metadata["name"])["License-Expression"]
    if stated:
        return str(stated)
    kinds = [
        text.rpartition(" :: ")[2]
        for text in metadata.get("classifier", ())
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    ]
    first = (metadata.get("license") or "").strip().splitlines()
    return " AND ".join(kinds) or (first[0][:80] if first else "")


def closure(direct: Iterable[Requirement], packages: Mapping[str, Package]) -> list[Package]:
    """The packages that the requirements need, by name, without what those of `NOT_LOCKED` need;
    markers are those of `ENVIRONMENT`."""
    found: dict[tuple[str, frozenset[str]], Package] = {}
    waiting = list(direct)
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        key = (name, frozenset(one.extras))
        if key in found or name not in packages:
            continue
        found[key] = packages[name]
        if name in NOT_LOCKED:
            continue
        for text in packages[name].requires:
            needed = Requirement(text)
            asked = ["", *one.extras]
            if needed.marker is None or any(
                needed.marker.evaluate({**ENVIRONMENT, "extra": extra}) for extra in asked
            ):
                waiting.append(needed)
    return sorted({package.name: package for package in found.values()}.values(), key=_name)


def _name(package: Package) -> str:
    return package.name


def _place(package: Package) -> tuple[str, str]:
    return package.name, package.version


def lock_text(extra: str, packages: Iterable[Package]) -> str:
    """The requirement file of an extra."""
    needed = list(packages)
    lines = [
        f"# {TITLES.get(extra, f'deltawire[{extra}]')}",
        "# Written by scripts/lock.py, for CPython 3.11 on Linux, x86-64.",
    ]
    lines += [
        f"# not locked: {p.name}=={p.version} ({NOT_LOCKED[p.name]})"
        for p in needed
        if p.name in NOT_LOCKED and extra not in SEPARATE
    ]
    lines += [f"# built from source: {p.name}" for p in needed if p.name in SOURCE_ONLY]
    locked = [p for p in needed if p.name not in NOT_LOCKED or extra in SEPARATE]
    lines += [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in locked]
    return "\n".join(lines) + "\n"


def bill(packages: Iterable[Package]) -> str:
    """The bill of materials: CycloneDX 1.5 in JSON, one component a line."""
    components = [_component(package) for package in sorted(packages, key=_place)]
    rows = ",\n    ".join(json.dumps(one, sort_keys=True) for one in components)
    identity = uuid.uuid5(_SPACE, rows)
    return (
        '{\n  "bomFormat": "CycloneDX",\n  "specVersion": "1.5",\n'
        f'  "serialNumber": "urn:uuid:{identity}",\n  "version": 1,\n'
        '  "metadata": {"component": {"type": "library", "bom-ref": "deltawire", '
        f'"name": "deltawire", "version": "{_own()}"}}}},\n'
        f'  "components": [\n    {rows}\n  ]\n}}\n'
    )


def _component(package: Package) -> dict[str, Any]:
    purl = f"pkg:pypi/{package.name}@{package.version}"
    spdx = re.fullmatch(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*", package.license)
    licence = {"expression": package.license} if spdx else {"license": {"name": package.license}}
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
    }
    if package.license:
        found["licenses"] = [licence]
    found["hashes"] = [{"alg": "SHA-256", "content": package.sha256}]
    found["properties"] = [{"name": "deltawire:file", "value": package.file}]
    return found


def main() -> int:
    """Resolve, and write the files."""
    wanted = sorted({str(one) for group in extras().values() for one in group})
    packages = resolve(wanted)
    FOLDER.mkdir(exist_ok=True)
    every: dict[tuple[str, str], Package] = {}
    needed = {extra: closure(direct, packages) for extra, direct in extras().items()}
    for name, direct in separate().items():
        # PyTorch brings the versions in the other files; trackio agrees with neither.
        fixed = [f"{p.name}=={p.version}" for p in packages.values() if name != "trackio"]
        needed[name] = sorted(resolve(map(str, direct), fixed).values(), key=_name)
    for extra, found in needed.items():
        (FOLDER / f"{extra}.txt").write_text(lock_text(extra, found))
        every |= {(one.name, one.version): one for one in found}
    SBOM.write_text(bill(every.values()))
    sys.stdout.write(f"{len(every)} packages in {FOLDER}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
