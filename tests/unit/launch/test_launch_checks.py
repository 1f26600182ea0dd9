"""A run that cannot start says so at once, in a dry run too."""

import json
import re

import pytest

from deltawire.cli.main import main
from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.launch.checks import check_prompts, positions_of
from deltawire.plan import run_memory
from deltawire.runtime import memory

TOML = """
name = "r"
[model]
path = "{path}"
[task]
environment = "{environment}"
"""


def dry_run(tmp_path, capsys, path, environment="reasoning_gym"):
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(path=path, environment=environment))
    code = main(["run", str(config), "--dry-run"])
    return code, capsys.readouterr().err


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_an_unknown_exporter(tmp_path, capsys, model):
    config = tmp_path / "run.toml"
    text = TOML.format(path=model, environment="reasoning_gym")
    config.write_text(f'{text}[train]\nexporter = "f61"\n')
    assert main(["run", str(config), "--dry-run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "there is no exporter 'f61'" in told
    assert "bf16" in told


def test_all_is_there(tmp_path, capsys, model):
    assert dry_run(tmp_path, capsys, model)[0] == 0


def test_a_model_that_is_not_there(tmp_path, capsys):
    code, line = dry_run(tmp_path, capsys, tmp_path / "none")
    assert code == 2
    assert "none is not a directory" in line


def test_a_directory_without_a_model(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, line = dry_run(tmp_path, capsys, tmp_path / "empty")
    assert code == 2
    assert "has no config.json" in line


def test_an_unknown_environment_is_refused(tmp_path, capsys, model):
    code, line = dry_run(tmp_path, capsys, model, "reasoning_gum")
    assert code == 2
    assert "did you mean reasoning_gym?" in line


def test_a_module_that_is_not_trusted_is_not_imported(tmp_path, capsys, model, monkeypatch):
    (tmp_path / "wicked.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    code, line = dry_run(tmp_path, capsys, model, "wicked:Tasks")
    assert code == 2
    assert "does not trust" in line


def test_modules_that_an_environment_imports_for_its_options_must_be_trusted(
    tmp_path, capsys, model, monkeypatch
):
    options = '{ taskset = "wicked-tasks", env = { harness = { id = "odd/wicked_harness@1" } } }'
    environment = f'verifiers"\noptions = {options}\nprompt = "'
    code, line = dry_run(tmp_path, capsys, model, environment)
    assert code == 2
    assert "wicked_harness, which this machine does not trust" in line
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "wicked_harness")
    assert "module wicked_tasks" in dry_run(tmp_path, capsys, model, environment)[1]
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "wicked_harness,wicked_tasks")
    assert dry_run(tmp_path, capsys, model, environment)[0] == 0


def test_a_run_with_a_wrong_model_ends_before_any_process_starts(tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(path=tmp_path / "none", environment="reasoning_gym"))
    assert main(["run", str(config), "--out", str(tmp_path / "out"), "--plain"]) == 2
    assert "none is not a directory" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("logs/*"))


@pytest.mark.parametrize(("held", "code"), [(2, 0), (3, 2)])
def test_rows_must_be_left_to_train_on(tmp_path, capsys, model, held, code):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1", "answer": "2"}\n' * 3)
    config = tmp_path / "run.toml"
    config.write_text(
        f'''
name = "r"
[model]
path = "{model}"
[task]
environment = "dataset"
prompt = "{{question}}"
heldout = {held}
[task.data]
path = "{rows}"
answer = "answer"
'''
    )
    assert main(["run", str(config), "--dry-run"]) == code
    if code:
        assert "has 3 rows, and 3 are held out" in capsys.readouterr().err


LONG = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 0),
        (LONG, 4096),
        ({"text_config": LONG}, 4096),
        ({**LONG, "rope_scaling": None}, 4096),
        ({**LONG, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (
            {
                **LONG,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096
                },
            },
            16384,
        ),
        (
            {
                "max_position_embeddings": 16384,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096
                },
            },
            16384,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192
                },
            },
            131072,
        ),
    ],
)  # fmt: skip
def test_positions_are_the_original_ones_times_the_factor(settings, positions):
    assert positions_of(settings) == positions


@pytest.mark.parametrize(("factor", "code"), [(None, 2), (2.0, 0)])
def test_a_context_above_the_models_positions_is_refused(tmp_path, capsys, model, factor, code):
    settings = {"max_position_embeddings": 128}
    if factor:
        settings["rope_scaling"] = {"type": "linear", "factor": factor}
    (model / "config.json").write_text(json.dumps(settings))
    found, line = dry_run(tmp_path, capsys, model)
    assert found == code
    if code:
        assert "rollout.context is 256, and" in line
        assert "has 128 positions; set rollout.context to 128 or less" in line


class Rows:
    def __init__(self, lengths):
        self.lengths = lengths

    def draw(self, stream, number):
        return type("Task", (), {"identity": f"row/{number}", "data": number})

    def prompt(self, task):
        return "x" * self.lengths[task.data % len(self.lengths)]

    def heldout(self):
        return []


class Letters:
    def prompt(self, said):
        return list(said)


def test_a_prompt_that_fills_the_context_is_found_before_the_run():
    check_prompts(Rows([5, 99]), Letters(), context=100)
    with pytest.raises(
        InputError, match=r"row/2 has 100 tokens, and rollout.context is 100"
    ) as told:
        check_prompts(Rows([5, 99, 100]), Letters(), context=100)
    assert "set rollout.context above 100" in told.value.hint


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "task", "words"),
    [
        (True, 'prompt = "{question}"', "has a chat template, which makes task.prompt one message"),
        (False, 'messages = [{ role = "user", content = "{question}" }]', "has no chat template"),
        (True, 'messages = [{ role = "user", content = "{question}" }]', ""),
        (False, 'prompt = "{question}"', ""),
    ],
)
def test_a_dry_run_warns_of_a_template_that_is_missing_or_not_chosen(
    tmp_path, capsys, model, template, task, words
):
    if template:
        (model / "chat_template.jinja").write_text(TEMPLATE)
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(path=model, environment="reasoning_gym") + task + "\n")
    assert main(["run", str(config), "--dry-run"]) == 0
    out = capsys.readouterr().out
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(words)
    assert words in "".join(warnings)


def shown(text):
    return [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 3]


def test_a_dry_run_shows_what_differs_first_and_all_of_it_if_asked(tmp_path, capsys, model):
    config = tmp_path / "run.toml"
    config.write_text(
        TOML.format(path=model, environment="reasoning_gym") + "[train]\nversions = 7\n"
    )
    assert main(["run", str(config), "--dry-run"]) == 0
    out = capsys.readouterr().out
    few = shown(out)
    assert {"model.path", "train.versions"} <= set(few)
    assert "train.groups_per_step" not in few
    hidden = int(re.search(r"(\d+) settings have their defaults", out)[1])
    assert main(["run", str(config), "--dry-run", "--all"]) == 0
    whole = [key for key in shown(capsys.readouterr().out) if key]
    few = [key for key in few if key]
    assert whole[: len(few)] == few
    assert len(whole) == len(few) + hidden
    assert "train.groups_per_step" in whole


def test_a_dry_run_warns_if_the_memory_is_not_there(tmp_path, capsys, model, monkeypatch):
    sizes = BuildConfig(hidden_size=512, head_size=64, vocabulary=32_000).architecture()
    (model / "config.json").write_text(json.dumps(sizes))
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(path=model, environment="reasoning_gym"))
    for free, words in (
        (64 << 30, "64.0 GiB are free"),
        (1 << 28, "warning: only 0.2 GiB are free"),
    ):
        monkeypatch.setattr(memory, "available_host_bytes", lambda free=free: free)
        assert main(["run", str(config), "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert words in out
        assert "1 x trainer: " in out
    assert run_memory.GIB == memory.GIB
