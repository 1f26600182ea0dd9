"""Tests that need SGLang; `tests/engines/test_sglang.py` runs them in a separate environment."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if SPEC is not None and SPEC.origin is not None else ["*.py"]

HERE = Path(__file__).parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "followed")]
pytest.register_assert_rewrite("drills")

# Read by SGLang and torch when they are first imported, and by the processes that SGLang starts.
os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def pytest_addoption(parser):
    if collect_ignore_glob:  # Both folders in one run: the options are those of the other one.
        return
    parser.addoption("--family", default="qwen3", help="a model of shapes.FAMILIES")
    parser.addoption("--tensor-parallel", type=int, default=1)
    parser.addoption("--versions", type=int, default=50, help="random versions to follow")
    parser.addoption("--in-flight", default="keep")
    parser.addoption("--load-seconds", type=float, default=6, help="how long to swap under load")
    parser.addoption("--overlap", action="store_true", help="with SGLang's overlapped schedule")


@pytest.fixture(scope="session")
def family(request):
    return request.config.getoption("family")


@pytest.fixture(scope="session")
def ranks(request):
    """So many, each in its own process and on its own core."""
    count = request.config.getoption("tensor_parallel")
    if count > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % os.cpu_count()) for rank in range(count)
        )
    return count


@pytest.fixture(scope="session")
def adapter():
    """False: SGLang serves no adapter of a run."""
    return False


@pytest.fixture
def start(arguments):
    """Starts a server on a trainer's run."""
    from server import Server

    def started(trainer):
        run = trainer.publisher.bucket.url
        return Server(trainer.model, "--load-format", "dummy", *arguments, run=run).__enter__()

    return started


@pytest.fixture(scope="session")
def arguments(request, ranks):
    """The server's arguments that the command line asks for."""
    found = [] if ranks == 1 else ["--tp-size", str(ranks)]
    return found if request.config.getoption("overlap") else [*found, "--disable-overlap-schedule"]
