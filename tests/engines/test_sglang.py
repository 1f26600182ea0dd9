"""Runs SGLang's tests in a separate environment, built on first use and cached."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine_run import RUN

ROOT = Path(__file__).parents[2]
FOLLOW = "test_followed_weights.py"

pytestmark = [pytest.mark.timeout(7200), pytest.mark.drills]


@pytest.fixture(scope="session")
def sglang_python():
    """The Python of SGLang's environment."""
    if sys.platform != "linux" or shutil.which("sh") is None:
        pytest.skip("SGLang's environment is for Linux")
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "setup-engine.sh"), "sglang"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"NOT TESTED: SGLang's environment cannot be built: {done.stderr[-2000:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()[-1]


def run_tests(python, file, *arguments):
    """The tests of one file under `tests/engines/on_sglang`, in SGLang's environment."""
    done = subprocess.run(
        [
            python, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-o", "addopts=",
            "-o", "filterwarnings=", "-o", "timeout=3600",
            str(Path(__file__).parent / "on_sglang" / file),
            *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]


@pytest.mark.long
def test_a_dense_model_follows_its_run(sglang_python):
    run_tests(sglang_python, FOLLOW, "--versions", "50")


@pytest.mark.long
def test_weights_that_sglang_loads_itself_are_attested(sglang_python):
    run_tests(sglang_python, "test_attest_only.py")


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_that_two_ranks_of_sglang_load_are_attested(sglang_python, family):
    run_tests(sglang_python, "test_attest_only.py", "--tensor-parallel", "2", "--family", family)


@pytest.mark.matrix
def test_a_run_is_followed_under_the_overlapped_schedule(sglang_python):
    run_tests(sglang_python, FOLLOW, "--versions", "20", "--overlap")


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["recompute", "drain"])
def test_running_sequences_are_treated_as_asked(sglang_python, what):
    run_tests(
        sglang_python, FOLLOW, "--versions", "10", "--in-flight", what,
        "-k", "attested or newly or cache_of_older",
    )  # fmt: skip


@pytest.mark.matrix
def test_experts_follow_their_run(sglang_python):
    run_tests(sglang_python, FOLLOW, "--versions", "10", "--family", "qwen3_moe")


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_two_ranks_follow_their_run(sglang_python, family):
    run_tests(
        sglang_python, FOLLOW, "--versions", "10", "--tensor-parallel", "2", "--family", family
    )


@pytest.mark.matrix
def test_a_killed_rank_costs_no_wrong_token(sglang_python):
    run_tests(sglang_python, "test_rank_killed.py", "--tensor-parallel", "2")


@pytest.mark.long
def test_a_server_that_cannot_follow_does_not_serve(sglang_python):
    run_tests(sglang_python, "test_refused_servers.py")


@pytest.mark.long
def test_a_run_samples_from_sglang_and_stops_its_servers(sglang_python, tmp_path):
    # No answer of an untrained model is rewarded, and its weights change all the same.
    decay = "optimizer.learning_rate = 2e-2\noptimizer.weight_decay = 1.0"
    assert "optimizer.learning_rate = 1e-3" in RUN
    text = RUN.replace("optimizer.learning_rate = 1e-3", decay)
    (tmp_path / "run.toml").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "deltawire", "run", str(tmp_path / "run.toml"),
            "--engine", "sglang", "--out", str(tmp_path / "run"), "--json",
        ],
        capture_output=True, text=True, check=False, timeout=2000,
        env={**os.environ, "DELTAWIRE_SGLANG_PYTHON": sglang_python, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["versions"] == 4
    assert found["bytes"]["delta_total"] > 0
    assert [worker["bit_identical"] for worker in found["workers"]] == [True]
    assert found["proof"]["repeated"] == found["proof"]["lost"] == 0
    assert found["staleness"]["max"] <= 2
    # Of tempered probabilities: those of the untempered distribution would be far away.
    assert 0 <= found["parity"]["numeric_k3_max"] < 1e-6
    assert list(tmp_path.glob("dw-sglang-*")) == []
