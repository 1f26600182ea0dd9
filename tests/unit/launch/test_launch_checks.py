"""A run that cannot start says so at once, in a dry run too."""

import pytest

from deltawire.cli.main import main

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
