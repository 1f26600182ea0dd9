"""Runs vLLM's tests in a separate environment, built on first use and cached."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from engine_run import RUN
from peft_logits import write_reference

from deltawire.config import BuildConfig
from deltawire.rl.control.rollout_reader import read_group
from deltawire.store import open_bucket
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys

ROOT = Path(__file__).parents[2]
MATRIX = [
    (family, ranks)
    for family in [
        "qwen3", "llama", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3",
    ]
    for ranks in (1, 2)
]  # fmt: skip

LIVE = "test_followed_weights.py"

pytestmark = [pytest.mark.timeout(1200), pytest.mark.drills]


@pytest.fixture(scope="session")
def vllm_python():
    """The Python of vLLM's environment."""
    if sys.platform != "linux" or shutil.which("sh") is None:
        pytest.skip("vLLM's CPU build is for Linux")
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "setup-vllm.sh")], capture_output=True, text=True, check=False
    )
    if done.returncode == 3:
        pytest.skip(f"NOT TESTED: vLLM's CPU build is not available: {done.stderr[-2000:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()[-1]


def run_tests(python, file, *arguments):
    """The tests of one file under `tests/engines/on_vllm`, in vLLM's environment."""
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [
            python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=",
            "-o", "filterwarnings=", "-o", "timeout=900",
            str(Path(__file__).parent / "on_vllm" / file),
            *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]


def test_a_dense_model_on_one_rank_follows_its_run(vllm_python):
    run_tests(vllm_python, LIVE, "--family", "qwen3", "--tensor-parallel", "1")


@pytest.mark.long
def test_experts_on_two_ranks_follow_their_run(vllm_python):
    run_tests(
        vllm_python, LIVE, "--family", "qwen3_moe", "--tensor-parallel", "2", "--versions", "20"
    )


@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen3", "1"), pytest.param("qwen3_moe", "2", marks=pytest.mark.long)]
)
def test_weights_that_vllm_loads_itself_are_attested(vllm_python, family, ranks):
    run_tests(vllm_python, "test_attest_only.py", "--family", family, "--tensor-parallel", ranks)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen3", "1"), pytest.param("qwen3_moe", "2", marks=pytest.mark.long)],
)
def test_a_server_that_others_update_is_attested_over_http(vllm_python, family, ranks):
    file = "test_attested_over_http.py"
    run_tests(vllm_python, file, "--family", family, "--tensor-parallel", ranks)


@pytest.mark.matrix
def test_an_endpoint_is_attested_by_its_log_probabilities(vllm_python):
    run_tests(vllm_python, "test_black_box.py")


def test_vllm_serve_is_moved_by_its_own_calls(vllm_python):
    run_tests(vllm_python, "test_served_over_http.py", "-k", "own_calls")


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.long)], ids=["one rank", "two ranks"]
)
def test_an_adapter_follows_its_run(vllm_python, ranks):
    run_tests(vllm_python, LIVE, "--adapter", "--tensor-parallel", str(ranks), "--versions", "50")


@pytest.mark.long
def test_a_killed_server_continues_with_the_newest_adapter(vllm_python):
    run_tests(vllm_python, "test_server_killed.py", "--tensor-parallel", "2")


@pytest.mark.matrix
def test_a_server_of_one_rank_that_is_killed_in_a_swap_continues(vllm_python):
    run_tests(vllm_python, "test_server_killed.py", "--kills", "swap")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", []),
        ("qwen3", ["--tensor-parallel", "2"]),
        ("qwen3", ["--pipeline-parallel", "2"]),
        ("llama", []),
        ("qwen3_moe", []),
        ("qwen3_moe", ["--tensor-parallel", "2", "--expert-parallel"]),
    ],
    ids=["one", "two", "stages", "llama", "experts", "divided experts"],
)
def test_adapters_follow_their_run_however_the_model_is_sharded(vllm_python, family, parallel):
    run_tests(vllm_python, LIVE, "--adapter", "--family", family, *parallel)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tied", "ranks"), [(False, 1), (False, 2), (True, 1), (True, 2)],
    ids=["one rank", "two ranks", "tied", "tied on two ranks"],
)  # fmt: skip
def test_adapters_of_embedding_and_head_compute_what_peft_computes(
    vllm_python, tmp_path, tied, ranks
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights, and of what it saves.
        write_reference(tmp_path, tied=tied)
    run_tests(
        vllm_python, "test_adapter_logits.py", "--tensor-parallel", str(ranks),
        "--reference", str(tmp_path),
    )  # fmt: skip


@pytest.mark.matrix
def test_an_adapter_is_served_from_a_slot_or_refused_by_name(vllm_python):
    run_tests(vllm_python, "test_adapter_slots.py")


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "ranks"), MATRIX)
def test_every_family_follows_its_run(vllm_python, family, ranks):
    run_tests(vllm_python, LIVE, "--family", family, "--tensor-parallel", str(ranks))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3_moe", ["--tensor-parallel", "2", "--expert-parallel"]),
        ("deepseek_v3", ["--tensor-parallel", "2", "--expert-parallel"]),
        ("qwen3", ["--pipeline-parallel", "2"]),
        ("qwen3_moe", ["--pipeline-parallel", "2"]),
    ],
    ids=["experts", "latent experts", "stages", "stages of experts"],
)
def test_a_run_is_followed_however_the_model_is_sharded(vllm_python, family, parallel):
    run_tests(vllm_python, LIVE, "--family", family, *parallel)


@pytest.mark.matrix
def test_kernels_replaced_on_a_cpu_compute_what_vllm_specifies(vllm_python):
    run_tests(vllm_python, "test_unpacked_kernels.py")


@pytest.mark.matrix
def test_weights_that_vllm_rearranges_are_refused(vllm_python):
    run_tests(vllm_python, "test_refused_weights.py")


@pytest.mark.matrix
def test_quantized_codes_that_vllm_repacks_are_refused(vllm_python):
    run_tests(vllm_python, "test_quantized_runs.py")


@pytest.mark.matrix
def test_vllm_serve_follows_its_run(vllm_python):
    run_tests(vllm_python, "test_served_over_http.py", "-k", "not own_calls")


@pytest.mark.matrix
def test_vllm_is_hot_loaded_as_the_hosted_services_are(vllm_python):
    run_tests(vllm_python, "test_hot_load.py")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options", [["--family", "qwen3_moe"], ["--adapter"]], ids=["weights", "adapter"]
)
def test_a_killed_worker_costs_no_wrong_token(vllm_python, options):
    run_tests(vllm_python, "test_worker_killed.py", "--tensor-parallel", "2", *options)


@pytest.mark.matrix
def test_the_example_serves_what_it_trains(vllm_python):
    example = ROOT / "examples" / "vllm" / "run.py"
    done = subprocess.run(
        [vllm_python, str(example)], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "all of an answer by version 5" in done.stdout


@pytest.mark.matrix
def test_the_benchmark_of_swaps_gives_its_figures(vllm_python):
    done = subprocess.run(
        [
            str(Path(vllm_python).parent / "deltawire"), "bench", "swap", "--json",
            "--parameters", "10", "--repeats", "1",
        ],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["pause_ms"] > 0
    assert found["parameters_doubled"] > 1.5 * found["parameters"]
    assert 0 < found["swap_allocated_bytes"] < 2 * found["parameters"]


@pytest.mark.matrix
def test_the_benchmark_of_adapter_swaps_gives_its_figures(vllm_python):
    done = subprocess.run(
        [
            sys.executable, "-m", "deltawire", "bench", "adapters", "--json",
            "--keys", "adapter_swap_ms,adapter_swap_speedup", "--repeats", "1",
        ],
        capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, "DELTAWIRE_VLLM_PYTHON": vllm_python},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["adapter_swap_ms"] > 0
    assert found["adapter_swap_speedup"] > 0
    assert found["details"]["slot_swap"]["changed_elements"] > 0


@pytest.mark.matrix
def test_a_run_samples_from_vllm_and_stops_its_servers(vllm_python, tmp_path):
    found = whole_run(vllm_python, RUN, tmp_path)
    # Of tempered probabilities: those of the untempered distribution would be far away.
    assert 0 <= found["parity"]["numeric_k3_max"] < 1e-6


ADAPTER = """
[train.adapter]
kind = "lora"
rank = 4
alpha = 16.0
targets = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
rank_pattern = { "layers\\\\.1\\\\.self_attn\\\\.q_proj" = 2 }
[warm_start]
max_steps = 60
check_every = 60
learning_rate = 5e-3
batch = 32
"""


@pytest.mark.matrix
@pytest.mark.parametrize("vocabulary", [False, True], ids=["linear", "embedding and head too"])
def test_a_run_samples_with_its_adapter_from_vllm(vllm_python, tmp_path, vocabulary):
    # No staleness: the trainer compares the probabilities of every version that it published.
    text = RUN.replace("max_staleness = 2", "max_staleness = 0").replace("1e-3", "1e-2") + ADAPTER
    if vocabulary:
        write_untied(tmp_path / "model")
        _, _, rest = text.partition("[task]")
        text = f'name = "tiny"\n[model]\npath = "{tmp_path / "model"}"\n[task]{rest}'
        text = text.replace('"down_proj"]', '"down_proj", "embed_tokens", "lm_head"]')
    found = whole_run(vllm_python, text, tmp_path)
    assert found["bytes"]["delta_total"] > 0, "rewards differed, so the adapter was trained"
    # An adapter that was not applied, or with another scale, would be far away by version 3.
    assert 0 <= found["parity"]["numeric_k3_max"] < 1e-6


def write_untied(folder):
    """A model as `RUN` builds it, but with a head of its own."""
    built = build_model(
        BuildConfig(hidden_size=64, layers=2, head_size=32, feed_forward_size=128, context=128),
        seed=0,
    )
    built.config.tie_word_embeddings = False
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(built.config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


THINKING = """
[task]
environment = "serial_steps"
dataset = "parity"
options = { min_length = 2, max_length = 8, chain_share = 0.5, start = "(", end = ")" }
prompt = "{question}("
heldout = 4
[rollout]
workers = 1
group_size = 4
max_tokens = 16
slots = 16
context = 96
[rollout.thinking]
start = "("
end = ")"
budgets = [2, 6]
answer_tokens = 4
"""


@pytest.mark.matrix
def test_a_run_with_thinking_budgets_samples_from_vllm(vllm_python, tmp_path):
    model, _, rest = RUN.partition("[task]")
    found = whole_run(vllm_python, model + THINKING + rest[rest.index("[train]") :], tmp_path)
    # Inserted tokens have the probability that the trainer gives them, or none: never another.
    assert 0 <= found["parity"]["numeric_k3_max"] < 1e-6
    bucket = open_bucket(str(tmp_path / "run" / "bucket"))
    ends, budgets = Counter(), set()
    for key in bucket.list(keys.ROLLOUTS):
        group, *_ = read_group(bucket, *keys.group_of(key))
        for one in group.trajectories:
            assert one.thinking is not None
            budgets.add(one.thinking.budget)
            for thought, ended in one.thinking.turns:
                ends[ended] += 1
                assert thought <= one.thinking.budget
            for start, stop in one.thinking.forced:
                assert not one.mask_T[start:stop].any(), "inserted tokens are not in the loss"
    assert budgets == {2, 6}
    assert ends["forced"], "a random model does not close its chain"


def whole_run(vllm_python, text, folder):
    """The report of a run of this configuration with vLLM, which leaves no process and no file."""
    (folder / "run.toml").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "deltawire", "run", str(folder / "run.toml"),
            "--engine", "vllm", "--out", str(folder / "run"), "--json",
        ],
        capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, "DELTAWIRE_VLLM_PYTHON": vllm_python, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["versions"] == 4
    assert [worker["bit_identical"] for worker in found["workers"]] == [True]
    assert found["proof"]["repeated"] == found["proof"]["lost"] == 0
    assert found["staleness"]["max"] <= 2
    assert list(folder.glob("dw-vllm-*")) == []
    assert not [line for line in _command_lines() if str(folder) in line]
    return found


def _command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            yield path.read_bytes().decode(errors="replace")
