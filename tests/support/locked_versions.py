"""Compares the installed packages with the versions that requirements/ locks."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def locked(folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Returns the locked version of each package that `make setup` installs."""
    text = "\n".join((folder / f"{name}.txt").read_text() for name in ("core", "rl", "dev"))
    found = re.findall(r"^(?:# not locked: )?([a-z0-9-]+)==([^\s]+)", text, re.MULTILINE)
    return dict(found)


@cache
def differences() -> dict[str, tuple[str, str]]:
    """Returns locked and installed version of each package in which they differ.

    A package that is not installed does not count, nor does the label of PyTorch's CPU build.
    """
    installed = {
        re.sub(r"[-_.]+", "-", one.name).lower(): one.version.partition("+")[0]
        for one in importlib.metadata.distributions()
    }
    return {
        name: (version, installed[name])
        for name, version in locked().items()
        if name in installed and installed[name] != version
    }
