"""Small models and tokenizers that the tests of the upper layers share."""

import os
import tempfile

# Read by torch when it is first imported; the codec's tests never import it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait for each other spin by default, on processors that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Runs of tests need not survive a power cut; the tests of that say so themselves.
os.environ.setdefault("DELTAWIRE_DURABLE", "0")
# Libraries that report their use do so in a thread that outlives a test.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Tests write the rows of their tasks into temporary folders.
os.environ.setdefault("DELTAWIRE_DATA_DIRS", tempfile.gettempdir())
# It would come before the endpoint of a test's own server.
os.environ.pop("AWS_ENDPOINT_URL_S3", None)

import atexit
import copy
import gc
import importlib.util
import re
import shutil
import signal
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import thread_leaks
from interrupts import hear_interrupts
from locked_versions import differences
from skip_list import SkipList

# Without a GPU Triton's kernels are interpreted. It has to know before anything imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# pytest puts folders of tests on the path, where tests/engines/vllm looks like a package: a library
# that asks for vLLM would find one without a version.
if importlib.util.find_spec("vllm") is None:
    sys.modules["vllm"] = None  # type: ignore[assignment]

# The versions that readers of pinned runs remember are not those of this machine's user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="deltawire-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

pytest_plugins = ["forks", "processor_time"]
ROOT = Path(__file__).parent
SKIPS = ROOT / "skips.toml"
SLOW_FIRST = (
    "engines/test_vllm.py",
    "e2e",
    "crash/rl",
    "crash/runtime",
    "unit/envs",
    "property/codec",
    "unit/benchmarks",
    "engines",
    "crash/sync/publish",
    "crash/sync/maintain",
)

# For stores on loopback: as patient as any other, but quick about it.
QUICK_RETRIES = {
    "max_retries": 4,
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=4),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=20),
}


def pytest_addoption(parser):
    parser.addoption(
        "--drills",
        type=int,
        default=int(os.environ.get("DELTAWIRE_DRILLS", "1")),
        metavar="N",
        help="how often to run each drill, with another seed each time (DELTAWIRE_DRILLS)",
    )
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail if a test is skipped that tests/skips.toml does not list with its reason",
    )


def pytest_configure(config):
    hear_interrupts()
    if differences() and not os.environ.get("DELTAWIRE_NEWEST"):
        # A dependency's newer release may announce changes; `make newest` makes errors of them.
        for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"):
            config.addinivalue_line("filterwarnings", f"default::{kind}")
    if config.getoption("strict_skips"):
        config.pluginmanager.register(SkipList(SKIPS), "skip-list")
    # Not in the environment that has only vLLM's own packages.
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        # The same examples on every machine, so that a change is judged by what it changes; `make
        # drills` draws new ones.
        settings.register_profile(
            "any machine",
            deadline=None,
            suppress_health_check=slow,
            derandomize=not os.environ.get("NEW_EXAMPLES"),
        )
        settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keeps the garbage collector from what lives as long as the session.

    That is a million objects, of modules and of tests. A collection that visits them takes half a
    second, and each test whose executors have idle threads at its end asks for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Start the slow files first: the last file that a process gets ends the whole session."""
    order = {name: place for place, name in enumerate(SLOW_FIRST)}

    def place(item):
        path = item.path.relative_to(ROOT).as_posix()
        return min((order[name] for name in order if path.startswith(name)), default=len(order))

    items.sort(key=place)


def pytest_generate_tests(metafunc):
    if "drill_seed" in metafunc.fixturenames:
        metafunc.parametrize("drill_seed", range(metafunc.config.getoption("drills")))


def pytest_terminal_summary(terminalreporter):
    """Prints how many cases the drills of damaged answers ran (tests/maintenance_faults)."""
    reports = [
        report for word in ("passed", "failed") for report in terminalreporter.getreports(word)
    ]
    cases = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == "damaged answers"
    ]
    if cases:
        terminalreporter.write_line(
            f"damaged answers: {sum(cases)} cases of {len(cases)} maintenance commands"
        )


def _fail_if_threads_stay(before):
    if left := thread_leaks.leaked(before):
        names = ", ".join(map(thread_leaks.describe, left))
        pytest.fail(f"threads still run, and may run into later tests: {names}", pytrace=False)


@pytest.fixture(autouse=True)
def _test_ends_its_threads():
    """Fails a test that leaves a thread running."""
    before = thread_leaks.threads()
    yield
    _fail_if_threads_stay(before)


@pytest.fixture(autouse=True)
def _signals_as_before():
    """Restores handlers that a test's process has set: a later test of Ctrl-C would meet them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _module_ends_its_threads():
    """Fails a module whose fixtures leave a thread running."""
    before = thread_leaks.threads()
    yield
    _fail_if_threads_stay(before)


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server with a bucket named drills."""
    from deltawire.testing.s3_server import S3Server

    with S3Server("ministack") as server:
        server.make_bucket("drills")
        yield server


@pytest.fixture(scope="session")
def moto_server():
    """Another implementation of S3, with a bucket named drills."""
    from deltawire.testing.s3_server import S3Server

    with S3Server("moto") as server:
        server.make_bucket("drills")
        yield server


@pytest.fixture(scope="session")
def disk_s3_server(tmp_path_factory):
    """A third implementation, which keeps its objects on the disk."""
    from disk_s3_server import DiskS3Server

    server = DiskS3Server(tmp_path_factory.mktemp("disk-s3"))
    yield server
    server.kill()


@pytest.fixture
def new_bucket(request, tmp_path):
    """``new_bucket(kind)`` is an empty bare bucket: a folder, in memory, or on an S3 server."""
    from deltawire.store import open_bare_bucket

    place = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    numbers = count()

    def make(kind):
        number = next(numbers)
        if kind == "memory":
            return open_bare_bucket("memory://")
        if kind == "folder":
            return open_bare_bucket(str(tmp_path / f"bucket-{number}"), create=True)
        if kind == "disk":
            server = request.getfixturevalue("disk_s3_server")
            path = f"{request.node.path.stem}/{place}/{number}"
            return server.open_bare(path, retry_config=QUICK_RETRIES)
        server = request.getfixturevalue({"s3": "s3_server", "moto": "moto_server"}[kind])
        url = f"s3://drills/{request.node.path.stem}/{place}/{number}"
        return server.open_bare(url, retry_config=QUICK_RETRIES)

    return make


def sharpen(model, seed=0):
    """Give a fresh model weights large enough that its distributions are far from uniform."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def _qwen3():
    from deltawire.config import BuildConfig
    from deltawire.train.build import build_model

    sizes = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=128)
    return sharpen(build_model(sizes, seed=0))


@pytest.fixture
def tiny(_qwen3):
    """A Qwen3 of two layers with a byte vocabulary, float32, of the test's own."""
    return copy.deepcopy(_qwen3)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """The project's own tokenizer."""
    from deltawire.train.build import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def sharp():
    """`sharpen`, for models that a test makes itself."""
    return sharpen


@pytest.fixture(scope="session")
def make_group():
    """A small finished group: ``make_group(worker, versions)`` with one version a trajectory."""
    import numpy as np

    from deltawire.wire.rollouts import Group, Trajectory

    def make(worker, versions, *, task="t", temperature=1.0):
        trajectories = [
            Trajectory(
                np.array([7, 8], np.int32),
                np.array([-1.0, -0.5], np.float32),
                np.array([version, version], np.int32),
                np.ones(2, np.uint8),
                1.0,
                "stop",
            )
            for version in versions
        ]
        return Group(worker, "n", task, temperature, np.array([1], np.int32), trajectories)

    return make
