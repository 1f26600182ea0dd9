"""The prediction of what each process of a run on processors holds."""

import json

import pytest

from deltawire.config import parse_config, run_config
from deltawire.config.checkpoints import stores_last_state
from deltawire.plan import run_memory as predicting
from deltawire.plan.run_memory import GIB, memory_of

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
PARAMETERS = 134_515_008


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def predicted(model, **changes):
    values = {"name": "x", "model": {"path": str(model)}}
    values["rollout"] = {"context": 128, "slots": 32, "workers": 3} | changes.pop("rollout", {})
    values["train"] = {"groups_per_step": 4, "max_tokens_per_batch": 256} | changes.pop("train", {})
    return memory_of(run_config(values | changes, url=""))


def test_each_parameter_takes_what_its_copies_take(model):
    found = predicted(model)
    trainer, worker, evaluator = found.processes
    assert (trainer.process, worker.process, evaluator.process) == (
        "trainer",
        "worker",
        "evaluator",
    )
    assert (trainer.count, worker.count, evaluator.count) == (1, 3, 1)
    each = {"weights": 4, "masters": 4, "optimizer": 8, "gradients": 4, "publisher": 4}
    assert {name: trainer.parts[name] / PARAMETERS for name in each} == each
    assert worker.parts["weights"] == 4 * PARAMETERS
    assert found.version_bytes == 2 * PARAMETERS
    assert found.checkpoint_bytes == 12 * PARAMETERS
    assert found.step_tokens == 4 * 8 * 128
    assert found.total == trainer.total + 3 * worker.total + evaluator.total


def test_an_adapter_has_no_states_of_the_frozen_weights(model):
    full = predicted(model).processes[0]
    lora = predicted(model, train={"adapter": {"kind": "lora"}}).processes[0]
    for part in ("masters", "optimizer", "gradients"):
        assert lora.parts[part] < full.parts[part] / 20
    assert lora.parts["weights"] > full.parts["weights"]
    assert lora.parts["publisher"] < full.parts["publisher"] * 0.6


def test_activations_grow_with_the_batch_and_never_past_a_step(model):
    small, large = (predicted(model, train={"max_tokens_per_batch": n}) for n in (256, 2048))
    one, other = small.processes[0].parts, large.processes[0].parts
    assert other["activations"] == pytest.approx(8 * one["activations"])
    assert {name for name in one if one[name] != other[name]} == {"activations", "logits"}
    whole, more = (predicted(model, train={"max_tokens_per_batch": n}) for n in (4096, 8192))
    assert whole.total == more.total
    saved = predicted(model, train={"activation_checkpointing": "full"}).processes[0]
    assert saved.parts["activations"] < one["activations"] / 2


def test_a_token_keeps_what_packed_attention_in_float32_keeps(model):
    """Counted by hand for 8 answers of 96 tokens to a prompt of 32, with an adapter of rank 16."""
    rollout = {"context": 128, "max_tokens": 96, "group_size": 8}
    adapter = {"kind": "lora", "rank": 16}
    held = [
        predicted(model, rollout=rollout, train={"adapter": adapter, "max_tokens_per_batch": n})
        .processes[0]
        .parts["activations"]
        for n in (256, 512)
    ]
    width, inner, heads, rank = 576, 1536, 9, 16
    norms = 2 * (4 * width + 8)
    inputs = 2 * 4 * width + 7 * 4 * rank  # Of the projections, and the adapters' products.
    prefixed = (32 + 8 * 128) / (32 + 8 * 96)  # Keys for each token of the row.
    attention = 4 * width * (1 + 2 * prefixed + 2) + 8 * heads  # Queries; keys, values; results.
    gated = 4 * 4 * inner
    token = 30 * (norms + inputs + attention + gated)
    assert (held[1] - held[0]) / 256 == pytest.approx(1.05 * token, rel=1e-6)
    assert 1.40e6 < token < 1.45e6


def test_keys_and_values_grow_with_slots_and_context(model):
    parts = [
        predicted(model, rollout={"slots": slots, "context": context}).processes[1].parts
        for slots, context in ((64, 512), (128, 512), (64, 1024))
    ]
    token = 30 * 2 * 3 * 64 * 4
    sizes = (64 * 512, 128 * 512, 64 * 1024)
    assert [part["cache"] for part in parts] == [size * token for size in sizes]
    assert parts[1]["logits"] == 2 * parts[0]["logits"] == 128 * 5 * 4 * 49152


def test_an_evaluator_reads_other_prompts_and_a_worker_those_of_groups(model):
    rollout = {"context": 1024, "max_tokens": 24}
    _, worker, evaluator = predicted(model, rollout=rollout, evaluate={"slots": 32}).processes
    assert worker.parts["activations"] == 32 * 1024 * 2 * 576 * 4, "attention in decoding"
    assert evaluator.parts["activations"] == 32 * 1000 * 4 * (3 * 1536 + 4 * 576)
    assert worker.parts["version"] == 2 * PARAMETERS


@pytest.mark.parametrize("train", [{"exporter": "f32"}, {"compute": "bfloat16"}, {"ranks": 2}])
def test_nothing_is_predicted_where_the_formulas_do_not_hold(model, train):
    assert predicted(model, train=train) is None


def test_a_run_without_a_directory_has_no_prediction():
    assert memory_of(run_config({"name": "x"}, url="")) is None


def test_the_constants_are_those_of_the_head():
    from deltawire.train import head

    assert predicting.LOGITS == head.CHUNK_ELEMENTS
    assert (predicting.LEAST_ROWS, predicting.MOST_ROWS) == (head._LEAST, head._MOST)


def test_the_lines_name_every_process_and_the_disk(model):
    text = "\n".join(predicted(model).lines())
    for words in ("1 x trainer: ", "3 x worker: ", "1 x evaluator: ", "together: ", "269 MB"):
        assert words in text
    assert "1.61 GB on disk, 2 are kept: 3.23 GB" in text
    short = "\n".join(predicted(model, train={"versions": 5}).lines())
    assert "no checkpoint is stored (1.61 GB, unless the run is stopped)" in short
    asked = predicted(model, train={"versions": 5, "final_checkpoint": "always"}).lines()
    assert "1.61 GB on disk, 1 are kept" in asked[-1]
    assert predicted(model).total / GIB > 5


@pytest.mark.parametrize(
    ("versions", "ended_at", "size", "stored"),
    [
        (5, 5, 1 << 30, False),
        (5, 5, 1 << 20, True),
        (50, 5, 1 << 30, True),  # A stop rule ended it.
        (50, 50, 1 << 30, True),
    ],
)
def test_which_ends_of_a_run_store_its_state(versions, ended_at, size, stored):
    values = {"name": "t", "train": {"versions": versions, "checkpoint_every": 20}}
    config = parse_config(values, source="test")
    assert stores_last_state(config, ended_at, size) is stored


def test_the_bytes_of_kept_intervals_are_stated(model):
    """Two states each, and the groups of the versions between them, at 13 bytes a token."""
    found = predicted(model, retain={"proofs": 3}, train={"versions": 200, "checkpoint_every": 10})
    each = 2 * 12 * PARAMETERS + 10 * 4 * 8 * 128 * 13
    assert (found.proofs, found.interval_bytes) == (3, each)
    line = f"3 intervals are kept for proofs: about {3 * each / 1e9:.2f} GB, and all versions"
    assert line in "\n".join(found.lines())
    few = predicted(model, retain={"proofs": 30}, train={"versions": 25, "checkpoint_every": 10})
    assert few.proofs == 3
