"""Finds the Python environment that runs vLLM. Imports nothing outside the core packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from deltawire.errors import InputError

PYTHON = "DELTAWIRE_VLLM_PYTHON"
HINT = (
    f"run make engines to build the environment, or set {PYTHON} to a Python that has vllm and "
    "deltawire"
)


def vllm_python() -> str:
    """Returns the Python that runs vLLM: the one that the environment variable `PYTHON` names, this
    one if it has vLLM, or that of a ``.venv-vllm`` in the same folder as this environment.

    A run's configuration cannot name it, because the configuration comes from a bucket. Raises
    `InputError` if there is none.
    """
    if named := os.environ.get(PYTHON, ""):
        if not os.access(named, os.X_OK):
            raise InputError(f"{PYTHON} is {named}, which cannot be run", hint=HINT)
        return named
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # The folder's name is not enough.
        return sys.executable
    neighbour = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if not os.access(neighbour, os.X_OK):
        raise InputError("there is no environment with vLLM", hint=HINT)
    return str(neighbour)
