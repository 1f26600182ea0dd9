"""Tests that need vLLM; `tests/engines/test_vllm.py` runs them in a separate environment."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLLOWED = str(HERE.parent / "followed")
sys.path.insert(1, FOLLOWED)
pytest.register_assert_rewrite("drills")

SPEC = importlib.util.find_spec("vllm")  # tests/engines/vllm is a folder of that name.
collect_ignore_glob = [] if SPEC is not None and SPEC.origin is not None else ["*.py"]

# Read by vLLM and torch when they are first imported, and by the processes that vLLM starts.
os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_CI_ENV="1",  # no warming up
    TORCHDYNAMO_DISABLE="1",  # nothing is compiled for a few tokens
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    PYTHONPATH=os.pathsep.join([str(HERE), FOLLOWED, os.environ.get("PYTHONPATH", "")]),
)


def pytest_addoption(parser):
    if collect_ignore_glob:  # Both folders in one run: the options are those of the other one.
        return
    parser.addoption("--family", default="qwen3", help="a model of shapes.FAMILIES")
    parser.addoption("--tensor-parallel", type=int, default=1)
    parser.addoption("--pipeline-parallel", type=int, default=1)
    parser.addoption("--expert-parallel", action="store_true")
    parser.addoption("--adapter", action="store_true", help="versions of a LoRA adapter")
    parser.addoption("--versions", type=int, default=50, help="random versions to follow")
    parser.addoption("--reference", help="a directory of tests/support/peft_logits.py")
    parser.addoption("--kills", default="swap,between,rank", help="how a server is killed")
    parser.addoption("--load-seconds", type=float, default=6, help="how long to swap under load")


@pytest.fixture(scope="session")
def family(request):
    return request.config.getoption("family")


@pytest.fixture(scope="session")
def parallel(request):
    """How the ranks share the model, as `engine.Engine` is told."""
    return {
        "stages": request.config.getoption("pipeline_parallel"),
        "experts": request.config.getoption("expert_parallel"),
        "adapter": request.config.getoption("adapter"),
    }


@pytest.fixture(scope="session")
def ranks(request):
    """So many, in all stages together."""
    count = request.config.getoption("tensor_parallel")
    count *= request.config.getoption("pipeline_parallel")
    if count > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % os.cpu_count()) for rank in range(count)
        )
    else:
        # One rank needs no separate process, and so no second import of everything.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return count


@pytest.fixture(scope="session")
def adapter(parallel):
    """True if versions are those of a LoRA adapter."""
    return parallel["adapter"]


@pytest.fixture
def start(ranks, parallel):
    """Starts an engine on a trainer's run."""
    from engine import Engine

    return lambda trainer: Engine(
        trainer.model, ranks=ranks, run=trainer.publisher.bucket.url, **parallel
    )
