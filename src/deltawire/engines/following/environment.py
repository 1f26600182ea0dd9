"""Finds the Python environment that runs an engine. Imports nothing outside the core packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from deltawire.errors import InputError

MISSING = {
    "vllm": "there is no environment with vLLM",
    "sglang": "there is no environment with SGLang",
}
"""The error where an engine is not found, by its package."""


def engine_python(engine: str) -> str:
    """Returns the Python that runs ``engine``, by its package's name: the one that a variable such
    as ``DELTAWIRE_VLLM_PYTHON`` names, this one if it has the package, or that of a folder such as
    ``.venv-vllm`` next to this environment.

    A run's configuration cannot name it, because the configuration comes from a bucket. Raises
    `InputError` if there is none.
    """
    variable = f"DELTAWIRE_{engine.upper()}_PYTHON"
    hint = (
        f"run make engines to build the environment, or set {variable} to a Python that has "
        f"{engine} and deltawire"
    )
    if named := os.environ.get(variable, ""):
        if not os.access(named, os.X_OK):
            raise InputError(f"{variable} is {named}, which cannot be run", hint=hint)
        return named
    spec = importlib.util.find_spec(engine)
    if spec is not None and spec.origin is not None:  # The folder's name is not enough.
        return sys.executable
    neighbour = Path(sys.prefix).parent / f".venv-{engine}" / "bin" / "python"
    if not os.access(neighbour, os.X_OK):
        raise InputError(MISSING[engine], hint=hint)
    return str(neighbour)
