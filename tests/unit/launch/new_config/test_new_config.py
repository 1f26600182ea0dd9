"""The file that ``deltawire init`` writes fits the model, the task and the machine."""

import json
import os
import tomllib

import pytest

from deltawire.config import check_config
from deltawire.errors import InputError
from deltawire.launch.checks import check_positions, check_start
from deltawire.launch.new_config import Document, Wishes, new_config, size, write_new
from deltawire.plan.run_memory import memory_of

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path):
    """A directory with the configuration of a model of 8 B parameters, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


@pytest.fixture
def large(tmp_path):
    """The same of a model of 32 B parameters."""
    folder = tmp_path / "large"
    folder.mkdir()
    sizes = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
    (folder / "config.json").write_text(
        json.dumps({**QWEN3_8B, **sizes, "num_attention_heads": 64})
    )
    return folder


@pytest.fixture
def rows(tmp_path):
    """Rows of questions and answers."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "1+1", "solution": "2"}\n' * 3)
    return path


def written(wishes, tmp_path):
    """The configuration in the file, after the checks of ``deltawire run --dry-run``."""
    path = tmp_path / "first.toml"
    config = write_new(wishes, path)
    assert config == check_config(tomllib.loads(path.read_text()), source="first.toml")
    check_start(config)
    return config


def test_the_default_is_the_demo_in_small(tmp_path):
    config = written(Wishes(), tmp_path)
    assert config.model.build is not None
    assert (config.task.dataset, config.rollout.max_tokens) == ("spell_backward", 8)
    assert config.warm_start.max_steps


def test_nothing_is_overwritten(tmp_path):
    path = tmp_path / "first.toml"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        write_new(Wishes(), path)
    assert path.read_text() == "mine"


def test_a_model_that_fits_is_trained_whole(tmp_path, model):
    config = written(Wishes(model=str(model), on="8xh200"), tmp_path)
    assert (config.train.ranks, config.train.adapter.kind) == (8, "none")
    assert (config.train.compute, config.train.device) == ("bfloat16", "cuda")


def test_a_model_that_does_not_fit_gets_an_adapter(tmp_path, large):
    config = written(Wishes(model=str(large), on="1xh200"), tmp_path)
    assert (config.train.ranks, config.train.adapter.kind) == (1, "lora")
    assert config.train.optimizer.learning_rate == 2e-5


def test_a_model_that_fits_nowhere_is_refused_with_what_would_do(tmp_path, large):
    with pytest.raises(InputError) as caught:
        written(Wishes(model=str(large), on="1xh200", mode="full"), tmp_path)
    assert caught.value.hint
    assert not (tmp_path / "first.toml").exists()


def test_a_chat_template_makes_messages_of_rows(tmp_path, model, rows):
    wishes = Wishes(model=str(model), on="8xh200", task=f"dataset:{rows}")
    assert written(wishes, tmp_path).task.prompt == "{problem}\n"
    (tmp_path / "first.toml").unlink()
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    task = written(wishes, tmp_path).task
    assert [message.content for message in task.messages] == ["{problem}"]
    assert task.data is not None
    assert task.data.answer == "solution"


def test_an_own_reward_says_what_it_needs(tmp_path, rows, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "mine")
    config = written(Wishes(task=f"dataset:{rows}", reward="mine:reward"), tmp_path)
    assert config.task.reward == "mine:reward"
    assert (
        "export PYTHONPATH=. DELTAWIRE_TRUSTED_MODULES=mine"
        in (tmp_path / "first.toml").read_text()
    )


@pytest.mark.parametrize(("count", "held"), [(2, 1), (50, 10), (5000, 100)])
def test_rows_are_left_to_train_on(tmp_path, count, held):
    path = tmp_path / "few.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n' * count)
    assert written(Wishes(task=f"dataset:{path}"), tmp_path).task.heldout == held


@pytest.mark.parametrize(
    ("answer", "tokens"), [("42", 8), ("a sentence of 24 bytes, é", 34), ("x" * 300, 64)]
)
def test_answers_may_be_as_long_as_the_known_ones(tmp_path, model, answer, tokens):
    path = tmp_path / "answers.jsonl"
    rows = [{"question": "?", "answer": one} for one in ("1", answer)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert written(Wishes(task=f"dataset:{path}"), tmp_path).rollout.max_tokens == tokens
    (tmp_path / "first.toml").unlink()
    large_model = Wishes(task=f"dataset:{path}", model=str(model), on="8xh200")
    assert written(large_model, tmp_path).rollout.max_tokens == 512


def test_answers_of_a_generator_are_drawn_to_see_their_length(tmp_path):
    config = written(Wishes(task="reasoning_gym:leg_counting"), tmp_path)
    assert config.rollout.max_tokens == 8


def test_a_single_row_cannot_be_divided(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n')
    with pytest.raises(InputError, match="has 1 rows"):
        new_config(Wishes(task=f"dataset:{path}"), where=tmp_path / "first.toml")


@pytest.mark.parametrize("task", ["workspace", "verifiers:mine", "reasoning_gym:leg_counting"])
def test_each_kind_of_task_passes_the_checks(tmp_path, task, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "mine")  # As the comment in the file says.
    written(Wishes(task=task, name="a run / of mine"), tmp_path)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(task="nothing"), "reasoning_gym:DATASET"),
        (Wishes(task="dataset"), "needs a path"),
        (Wishes(task="workspace", reward="a:b"), "own reward"),
        (Wishes(model="missing"), "not a directory"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(wishes, words, tmp_path):
    with pytest.raises(InputError, match=words):
        new_config(wishes, where=tmp_path / "first.toml")


def test_rows_without_answers_name_their_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "weight": 2}\n')
    with pytest.raises(InputError, match="no column of answers: it has question, weight"):
        new_config(Wishes(task=f"dataset:{path}"), where=tmp_path / "first.toml")


def test_any_value_is_read_back_from_a_document():
    values = {"a": 'quote " back \\ line\n tab\t del\x7f ü', "b": [1, {"c": True}], "d": 1e-6}
    document = Document("first line\n" + "long " * 60)
    for name, value in values.items():
        document.key(name, value, "comment")
    assert tomllib.loads(document.text()) == values
    assert max(map(len, document.text().splitlines())) <= 120


@pytest.mark.parametrize("wish", [{}, {"max_tokens": 8}])
def test_a_dataset_that_reasoning_gym_does_not_have_is_refused(model, tmp_path, wish):
    for one in ({"model": str(model)}, {}):
        with pytest.raises(InputError, match="no dataset 'spell_backwards'; did you mean spell_"):
            write_new(
                Wishes(task="reasoning_gym:spell_backwards", **one, **wish), tmp_path / "first.toml"
            )
    assert not (tmp_path / "first.toml").exists()


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


@pytest.mark.parametrize(("free", "kind"), [(64, "none"), (16, "none"), (9, "lora")])
def test_a_run_on_processors_fits_into_the_memory_that_is_free(tmp_path, monkeypatch, free, kind):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    monkeypatch.setattr(size, "available_host_bytes", lambda: free << 30)
    config = written(Wishes(model=str(tmp_path), on="cpu"), tmp_path)
    assert config.train.adapter.kind == kind
    assert config.train.compute == "float32"
    assert config.threads == max(1, len(os.sched_getaffinity(0)) // 3)
    assert memory_of(config).total <= 0.9 * (free << 30)
    text = (tmp_path / "first.toml").read_text()
    for key in ("threads =", "max_tokens_per_batch =", "compute =", "slots ="):
        assert key in text
    assert "Predicted, in GiB: 1 x trainer" in " ".join(text.replace("#", " ").split())


def test_less_memory_means_smaller_batches(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    chosen = []
    for free in (64, 12, 10):
        monkeypatch.setattr(size, "available_host_bytes", lambda free=free: free << 30)
        (tmp_path / "first.toml").unlink(missing_ok=True)
        config = written(Wishes(model=str(tmp_path), on="cpu", mode="full"), tmp_path)
        chosen.append(memory_of(config).total)
        assert chosen[-1] <= 0.9 * (free << 30)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


@pytest.mark.parametrize(
    ("positions", "stated", "tokens", "context"),
    [(512, 0, 256, 512), (1000, 0, 500, 1000), (40960, 0, 512, 1024), (512, 100, 100, 512)],
)
def test_sequences_are_no_longer_than_the_positions_of_the_model(
    tmp_path, model, positions, stated, tokens, context
):
    path = model / "config.json"
    settings = json.loads(path.read_text()) | {"max_position_embeddings": positions}
    path.write_text(json.dumps(settings))
    config = written(Wishes(model=str(model), on="8xh200", max_tokens=stated), tmp_path)
    check_positions(config)
    assert (config.rollout.max_tokens, config.rollout.context) == (tokens, context)
