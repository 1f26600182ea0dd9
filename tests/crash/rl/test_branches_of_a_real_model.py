"""The tools over versions on short runs of a pretrained model: whole, and with an adapter."""

import json
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from granted_groups import made_up_group, put_group, start_with_groups
from heartbeats import put_heartbeat
from packed_run import train
from transformers import AutoModelForCausalLM

from deltawire.cli.main import main
from deltawire.events import Evaluated, encode_lines
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m"
pytestmark = [
    pytest.mark.drills,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs models/smollm2-135m: make real-model writes it"
    ),
]

VERSIONS = 4
KINDS = {"whole": {}, "lora": {"adapter": {"kind": "lora", "rank": 8, "alpha": 16.0}}}
TRAIN = {
    "versions": VERSIONS, "groups_per_step": 1, "max_staleness": 100, "checkpoint_every": 2,
    "anchor_every": 100, "optimizer": {"learning_rate": 1e-4}, "schedule": {"warmup_steps": 0},
}  # fmt: skip
# A run with an adapter names its tensors and the model's, in run.json and in the state's commit.
MOST_BYTES = {"whole": 100_000, "lora": 160_000}
CHECK = "import os, sys; sys.exit(int(os.environ['DELTAWIRE_VERSION']) >= 3)"


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A run of four versions, with states at 2 and 4."""
    folder = tmp_path_factory.mktemp(request.param)
    bucket = start_with_groups(
        folder, groups=VERSIONS, group=sampled, train=TRAIN | KINDS[request.param],
        directory=MODEL, threads=2,
    )  # fmt: skip
    train(bucket, to=VERSIONS)
    return bucket


@cache
def model():
    """The model as every run here begins with it."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@cache
def sampled(number):
    """A group of random tokens with the log-probabilities that the model gives them."""
    group = made_up_group(number, tokens=8)
    found = []
    for one in group.trajectories:
        ids = torch.tensor(np.concatenate([group.prompt, one.tokens_T])[None], dtype=torch.long)
        with torch.no_grad():
            scores = model()(ids).logits[0, len(group.prompt) - 1 : -1].log_softmax(-1)
        drawn = scores[
            torch.arange(len(one.tokens_T)), torch.tensor(one.tokens_T, dtype=torch.long)
        ]
        found.append(replace(one, logprobs_T=drawn.numpy().astype(np.float32)))
    return replace(group, trajectories=found)


@pytest.fixture
def asked(capsys):
    """Runs a command with --json, and returns what it printed."""

    def run(command, *words, code=0):
        capsys.readouterr()
        own, dashes, others = [*map(str, words)], [], []
        if "--" in own:
            at = own.index("--")
            own, dashes, others = own[:at], ["--"], own[at + 1 :]
        assert main([command, *own, "--json", *dashes, *others]) == code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def question(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    return path


def digests(bucket, *versions):
    return [read_manifest(bucket, read_run(bucket), version).digest for version in versions]


def evaluate(bucket, correct):
    event = Evaluated(
        process="evaluator", at=1.0, version=VERSIONS, accuracy=sum(correct) / len(correct),
        samples=1, problems=len(correct), seconds=1.0, correct=correct,
    )  # fmt: skip
    bucket.put(keys.events("evaluator-" + "0" * 16, 0), encode_lines([event]))


def test_versions_are_tagged_shown_and_compared(trained, asked, question, tmp_path):
    url = trained.url
    assert main(["tag", f"{url}@3", "best"]) == 0
    assert asked("show", f"{url}@best")["bits"]["changed"] > 0
    page = tmp_path / "diff.html"
    found = asked("diff", f"{url}@0", f"{url}@best", "--on", question, "--page", page)
    assert found["answers"]["answers"] == 1
    assert page.stat().st_size > 1000


@pytest.mark.parametrize("serve", [[], ["--serve"]], ids=["directory", "served"])
def test_a_version_is_searched(trained, asked, tmp_path, serve):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    state = ["--state", tmp_path / "state", *serve]
    ends = ["--good", 0, "--bad", VERSIONS]
    found = asked("bisect", trained.url, *ends, *state, "--", sys.executable, script)
    assert found["culprit"] == 3


def test_steps_and_groups_are_explained(trained, asked, question):
    found = asked("why", trained.url, "--on", question, "--steps", 1)
    assert len(found["parts"]) == VERSIONS
    assert abs(found["residual"]) <= 0.05 * abs(found["after"] - found["before"])
    assert [one["exact"] for one in found["groups"]] == [True]


def test_forks_make_its_bits_and_are_compared(trained, asked, capsys, request):
    kind = request.node.callspec.params["trained"]
    for version, state in ((2, "shared"), (3, "computed")):
        made = asked("fork", f"{trained.url}@{version}", f"at-{version}")
        assert (made["version"], made["state"]) == (version, state)
        fork = open_bucket(made["url"])
        if state == "shared":
            assert sum(one.bytes for one in fork.list_objects("")) < MOST_BYTES[kind]
        for place, number in enumerate(range(version, VERSIONS)):
            put_group(fork, place, sampled(number))
        put_heartbeat(fork, "w0", stored=VERSIONS - version, at=time.time())
        train(fork, to=VERSIONS)
        later = range(version, VERSIONS + 1)
        assert digests(fork, *later) == digests(trained, *later)
        evaluate(fork, [1.0] * 100)
    evaluate(trained, [0.0, 1.0] * 50)
    found = asked("compare", trained.url, f"{trained.url}/forks/at-2")
    assert found["verdicts"][0]["verdict"] == "better"
    assert main(["log", trained.url, "--graph"]) == 0
    drawn = capsys.readouterr().out
    assert "at-2" in drawn
    assert "at-3" in drawn


def test_answers_get_other_rewards_and_become_a_table(trained, tmp_path, asked):
    file = tmp_path / "other.py"
    file.write_text("def reward(completion, row):\n    return 1.0 - row['reward']\n")
    ends = ["--from", "3", "--to", "4", "--to-run", "other"]
    assert main(["rescore", trained.url, "--reward", str(file), *ends]) == 0
    other = open_bucket(f"{trained.url}/forks/other")
    assert digests(other, 2) == digests(trained, 2)
    assert digests(other, 4) != digests(trained, 4)
    asked("dataset", trained.url, "--to", tmp_path / "rows")
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "rows")
    assert sorted(set(table.column("version").to_pylist())) == [1, 2, 3, 4]


def test_its_training_is_proven_and_verified(trained, tmp_path, asked):
    pytest.importorskip("in_toto_attestation")
    signer = Ed25519Signer.generate()
    signer.write(tmp_path / "prover.key")
    proof = tmp_path / "proof"
    words = ["--out", proof, "--key", tmp_path / "prover.key"]
    assert asked("prove", trained.url, *words)["versions"] == VERSIONS
    words = ["--proof", proof, "--signed-by", signer.public_key]
    found = asked("verify-training", trained.url, *words)
    assert found["exact"]
    assert found["versions"] == VERSIONS
    assert not found["proof"]["faults"]
