"""Tests that need SGLang; `tests/engines/test_sglang.py` runs them in a separate environment."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if SPEC is not None and SPEC.origin is not None else ["*.py"]

# Models and runs are those of vLLM's tests.
sys.path.insert(1, str(Path(__file__).parents[1] / "on_vllm"))

# Read by SGLang and torch when they are first imported, and by the processes that SGLang starts.
os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def pytest_addoption(parser):
    if collect_ignore_glob:  # Both folders in one run: the options are those of the other one.
        return
    parser.addoption("--family", default="qwen3", help="a model of shapes.FAMILIES")
    parser.addoption("--tensor-parallel", type=int, default=1)
    parser.addoption("--versions", type=int, default=50, help="random versions to follow")
    parser.addoption("--in-flight", default="keep")
    parser.addoption("--overlap", action="store_true", help="with SGLang's overlapped schedule")


@pytest.fixture(scope="session")
def family(request):
    return request.config.getoption("family")


@pytest.fixture(scope="session")
def arguments(request):
    """The server's arguments that the command line asks for."""
    ranks = request.config.getoption("tensor_parallel")
    found = [] if ranks == 1 else ["--tp-size", str(ranks)]
    return found if request.config.getoption("overlap") else [*found, "--disable-overlap-schedule"]
