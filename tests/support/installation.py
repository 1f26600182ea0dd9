"""Runs a command of deltawire as if only the packages of some extras were installed.

    python tests/support/installation.py rl doctor --json

The first argument names extras, joined by commas; empty is the core. The requirements of those
extras are read from pyproject.toml, and everything else that is installed can be neither imported
nor
found.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def closure(extras: Iterable[str]) -> set[str]:
    """The names of deltawire and of all packages that it needs with these extras."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    texts = project["dependencies"] + [text for extra in extras for text in optional[extra]]
    waiting = [Requirement(text) for text in texts]
    seen = set[tuple[str, frozenset[str]]]()
    while waiting:
        one = waiting.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            needed = importlib.metadata.requires(one.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # Another platform's.
        for requirement in map(Requirement, needed):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *one.extras)):
                waiting.append(requirement)
    return {"deltawire", *(name for name, _ in seen)}


def hide_others(extras: Iterable[str]) -> None:
    """From now on nothing outside the packages of these extras is found, nor its metadata."""
    present = closure(extras)
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not present & {canonicalize_name(owner) for owner in owners}
    }

    class Finder(importlib.metadata.DistributionFinder):
        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            return None if top in hidden else PathFinder.find_spec(name, path, target)

        def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008
            for found in importlib.metadata.MetadataPathFinder.find_distributions(context):
                if canonicalize_name(found.metadata["Name"]) in present:
                    yield found

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder()


if __name__ == "__main__":
    hide_others(filter(None, sys.argv[1].split(",")))
    from deltawire.cli.main import main

    sys.exit(main(sys.argv[2:]))
