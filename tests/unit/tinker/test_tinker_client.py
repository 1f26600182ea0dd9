"""Tinker's own client against the server: every verb, on a tiny model and a folder."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tinker_scenarios
from tinker_serving import PATIENCE_S, ServerProcess, make_model

from deltawire.store import open_bucket
from deltawire.sync.maintain.fsck import check_run

pytest.importorskip("tinker")

SCENARIOS = ("loop", "resume", "listed", "losses", "custom", "refused")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The facts of each scenario, and the bucket that they left."""
    folder = tmp_path_factory.mktemp("tinker")
    model = make_model(folder)
    arguments = ("--context", "64", "--slots", "8", "--models", "2", "--samplers", "2")
    server = ServerProcess(folder / "bucket", model, *arguments).start()
    try:
        command = [sys.executable, tinker_scenarios.__file__, server.url, *SCENARIOS]
        answer = subprocess.run(command, capture_output=True, timeout=2 * PATIENCE_S, check=False)
    finally:
        server.stop()
    facts = {"bucket": folder / "bucket"}
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError):
            facts |= json.loads(line)
    assert set(SCENARIOS) <= set(facts), answer.stderr.decode()
    return facts


def facts_of(seen, name):
    assert "error" not in seen[name], seen[name]["error"]
    return seen[name]


def test_a_loop_learns_and_samples(seen):
    found = facts_of(seen, "loop")
    assert found["lora"] is False
    assert found["losses"][-1] < found["losses"][0] / 10
    assert found["tokens"] == [list(b"cabc")] * 2
    assert found["reasons"] == ["length"] * 2
    assert len(set(found["ids"])) == 2
    assert found["stopped"] == [list(b"ca"), "stop"]
    first, again, other = found["seeded"]
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_the_sampler_and_the_trainer_agree(seen):
    found = facts_of(seen, "loop")
    assert found["prompt"][0] is None
    assert found["scores"][1:] == pytest.approx(found["trained"], abs=1e-5)
    assert found["prompt"][1:] == pytest.approx(found["scores"][1:5], abs=1e-5)
    assert found["last"][:-2] == [None] * (len(found["last"]) - 2)
    assert found["last"][-2:] == pytest.approx(found["scores"][-2:], abs=1e-6)


def test_the_likeliest_tokens_come_with_the_prompt(seen):
    found = facts_of(seen, "loop")
    text = list(b"abcabcabcabc")
    assert found["top"][0] is None
    assert [len(row) for row in found["top"][1:]] == [3] * (len(text) - 1)
    for row, token, score in zip(found["top"][1:], text[1:], found["of top"][1:], strict=True):
        scores = [one for _, one in row]
        assert scores == sorted(scores, reverse=True)
        assert dict(row).get(token, score) == pytest.approx(score, abs=1e-5)
        assert score <= scores[0] + 1e-5
    # The model has learned the text, so each of its tokens is the likeliest one.
    assert [row[0][0] for row in found["top"][4:]] == text[4:]


def test_a_state_continues_to_the_same_bits(seen):
    found = facts_of(seen, "resume")
    assert found["path"]
    assert found["again"] == found["ahead"]
    assert found["fresh"] != found["ahead"]  # Its optimizer started again.


def test_the_rest_client_and_the_command_line_list_what_there_is(seen):
    found = facts_of(seen, "listed")
    assert all(found[name] for name in ("run", "total", "checkpoint", "session", "models")), found
    assert "training run" in found["command"], found["command"]
    assert "NotFoundError" in found["publish"]
    assert "everyone who has the server's key" in found["publish"]
    assert "no billing here" in found["storage"]
    assert "NotFoundError" in found["gone"]
    assert "there is no checkpoint" in found["gone"]


def test_every_loss_is_there(seen):
    found = facts_of(seen, "losses")
    assert list(found) == ["importance_sampling", "ppo", "cispo", "dro", "gspo"]
    norms = list(found.values())
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-5)
    assert norms[0] > 0


def test_a_custom_loss_has_the_exact_gradient(seen):
    found = facts_of(seen, "custom")
    assert found["own"] == pytest.approx(found["builtin"], rel=1e-6)
    assert found["metrics"]["mine"] == 1.0
    assert "surrogate_loss:sum" in found["metrics"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loss", "stable_reinforce"),
        ("setting", "no setting 'unknown'"),
        ("token", "not one of the model's"),
        ("base", "no base model 'org/other'"),
        ("external", "no call 'save_weights_external'; every save is a version"),
        ("rate", "learning_rate is NaN or infinite"),
        ("optimizer", "no optimizer 'dimuon'"),
        ("checkpoint", "no checkpoint"),
        ("sampler", "no checkpoint"),
        ("twice", "there is a checkpoint"),
        ("topk", "topk_prompt_logprobs"),
        ("long", "a prompt of 5000 tokens does not fit into this server's context"),
        ("temperature", "temperature is -1"),
        ("top_p", "top_p is 2"),
        ("top_k", "top_k is -3"),
        ("no tokens", "max_tokens is 0"),
        ("context", "with 10000 new ones, does not fit into this server's context"),
    ],
)
def test_what_cannot_be_honored_is_refused(seen, what, words):
    assert words in facts_of(seen, "refused")[what]


def test_a_refusal_leaves_the_model_usable(seen):
    assert facts_of(seen, "refused")["after"] > 0


def test_every_run_is_whole(seen):
    bucket = Path(seen["bucket"])
    runs = [bucket, *(bucket / "models").iterdir()]
    assert len(runs) == 8
    for run in runs:
        found = check_run(open_bucket(str(run)))
        assert found.whole, found.faults
