"""Wrong input ends in one line that says what, where and what to do, and harms nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from deltawire.cli.main import main
from deltawire.config import load_config
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, encode_run
from deltawire.wire.status import TrainerStatus

TINY = """
name = "tiny"
[model.build]
hidden_size = 32
layers = 1
head_size = 16
feed_forward_size = 64
"""


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; returns its one line on standard error."""
    code = main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert code not in (0, 1), lines
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0] == lines[-1]
    return errors[0]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_missing_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = fail(capsys, "run", str(tmp_path / "none.toml"))
    assert "none.toml" in line
    assert "No such file" in line


def test_misspelt_key(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    config.write_text(TINY + "[train.optimizer]\nlearning_rat = 1.0\n")
    line = fail(capsys, "run", str(config))
    assert "unknown key train.optimizer.learning_rat" in line
    assert "did you mean train.optimizer.learning_rate?" in line


def test_wrong_value(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    config.write_text(TINY + "[train]\nversions = -3\n")
    line = fail(capsys, "run", str(config))
    assert "train.versions" in line


def test_unknown_scheme(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    line = fail(capsys, "run", str(config), "--out", out, "--bucket", "ftp://host/run")
    assert "ftp://" in line


def test_bucket_that_is_a_file(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("here")
    line = fail(
        capsys, "run", str(config), "--out", str(tmp_path / "o"), "--bucket", str(tmp_path / "file")
    )
    assert "file" in line
    assert (tmp_path / "file").read_text() == "here"


def test_bucket_that_cannot_be_reached(
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    line = fail(capsys, "run", str(config), "--out", str(tmp_path / "o"), "--bucket", "s3://b/run")
    assert "s3://b/run" in line
    assert re.match(r"error: cannot \w+: check the endpoint and the network: ", line)


def test_worker_without_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = fail(capsys, "worker", str(tmp_path / "nowhere"))
    assert "there is no bucket" in line


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 80])
def test_worker_with_a_hostile_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    arguments = ("worker", str(tmp_path), "--id", name or "-")
    assert "--id" in fail(capsys, *arguments)


@pytest.mark.parametrize("name", ["trainer", "evaluator", "supervisor", "warm-start"])
def test_a_worker_takes_no_other_processes_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """The one that has it would find itself replaced, and end the run."""
    bucket = open_bucket(str(tmp_path))
    line = fail(capsys, "worker", bucket.url, "--id", name)
    assert "the name of another process" in line
    assert bucket.list("") == []


def test_unknown_dataset_leaves_an_empty_bucket(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    config.write_text(TINY + '[task]\ndataset = "spell_backwards"\n')
    out = tmp_path / "out"
    line = fail(capsys, "run", str(config), "--out", str(out), "--plain")
    assert "no dataset 'spell_backwards'" in line
    assert "did you mean spell_backward?" in line
    assert open_bucket(str(out / "bucket")).list("weights/") == []


def test_model_directory_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = tmp_path / "c.toml"
    few = "[rollout]\nworkers = 1\n[evaluate]\nevery = 0\n"
    config.write_text(f'name = "x"\n[model]\npath = "{model}"\n{few}')
    line = fail(capsys, "run", str(config), "--out", str(tmp_path / "out"), "--plain")
    assert "has no weights" in line
    assert str(model) in line


def test_an_engine_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTAWIRE_VLLM_PYTHON", str(tmp_path / "no" / "python"))
    line = fail(capsys, "run", str(config), "--engine", "vllm", "--out", str(tmp_path / "out"))
    assert "make engines" in line
    assert not (tmp_path / "out").exists()
    config.write_text(TINY + "[rollout]\ntop_p = 0.9\ntemperature = 0.7\n")
    line = fail(capsys, "run", str(config), "--engine", "vllm")
    assert "--engine vllm: rollout.engine" in line


def test_a_run_with_another_configuration(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    theirs = msgspec.structs.replace(load_config(config), seed=5)
    bucket.put("run.json", _run_json(msgspec.to_builtins(theirs)))
    before = {key: bucket.get(key, limit=1 << 20) for key in bucket.list("")}
    line = fail(capsys, "run", str(config), "--out", str(tmp_path / "out"), "--plain")
    assert "started with another seed" in line
    assert {key: bucket.get(key, limit=1 << 20) for key in before} == before


def test_a_damaged_run_json(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    bucket.put("run.json", b'{"format": 1, "name"')
    line = fail(capsys, "run", str(config), "--out", str(tmp_path / "out"), "--plain")
    assert "not a valid run" in line
    assert "run.json" in line
    assert bucket.get("run.json", limit=100) == b'{"format": 1, "name"'


@pytest.mark.parametrize("command", ["fsck", "log", "status", "report", "replay", "probes"])
def test_a_folder_without_a_run_is_no_damaged_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    line = fail(capsys, command, str(tmp_path))
    assert "there is no run" in line
    assert "; " in line  # and what to do


@pytest.mark.parametrize("command", ["fsck", "status", "publish"])
def test_a_bucket_without_a_name_is_not_the_folder_one_is_in(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("publish", "--watch", ".", "--to", "") if command == "publish" else (command, "")
    assert "the bucket's name is empty" in fail(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["report", "replay", "worker", "evaluator", "trainer"])
def test_the_loops_commands_on_a_run_that_holds_only_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    open_bucket(str(tmp_path)).put("run.json", _run_json({}))
    assert "this run holds only weights" in fail(capsys, command, str(tmp_path))


def test_a_choice_that_is_none_names_those_there_are(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(TINY + '[train.loss]\nsurrogate = "poo"\n')
    assert "did you mean ppo?" in fail(capsys, "run", str(config), "--dry-run")
    config.write_text(TINY + '[[train.loss.corrections]]\nlevel = "poo"\n')
    assert "one of token, sequence, geometric" in fail(capsys, "run", str(config), "--dry-run")
    config.write_text(TINY.replace("tiny", "a b"))
    assert "letters, digits" in fail(capsys, "run", str(config), "--dry-run")
    config.write_text("")
    assert 'such as name = "mine"' in fail(capsys, "run", str(config), "--dry-run")


def test_a_configuration_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert "larger than 1 MiB" in fail(capsys, "run", "/dev/zero", "--dry-run")


def test_a_warm_start_does_not_replace_a_foreign_directory(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "out" / "model"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    assert "exists already" in fail(capsys, "warm-start", str(config), "--out", str(mine))
    line = fail(capsys, "run", str(config), "--out", str(mine.parent), "--plain")
    assert "was not created by a warm start" in line
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_report_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    bucket = open_bucket(str(tmp_path / "b"), create=True)
    bucket.put("run.json", _run_json(msgspec.to_builtins(load_config(config))))
    status = TrainerStatus(
        phase="finished", version=0, digest="0" * 32, epoch=0, credits={}, at=0.0
    )
    bucket.put(keys.TRAINER, encode_json(status))
    line = fail(capsys, "report", str(tmp_path / "b"), "--out", str(config))
    assert "choose --out" in line


@pytest.mark.parametrize("url", ["localhost:8000", "http://[", "http://", "http://h:99999"])
def test_a_replica_that_is_no_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str
) -> None:
    assert url in fail(capsys, "gateway", str(tmp_path), "--replica", url)
    line = fail(capsys, "gateway", str(tmp_path), "--replica", "http://h", "--port", "70000")
    assert "70000 is not a port" in line


def test_what_is_no_public_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    open_bucket(str(tmp_path)).put("run.json", _run_json({}))
    for command in ("fsck", "log"):
        line = fail(capsys, command, str(tmp_path), "--public-key", "abc")
        assert "keygen prints" in line


def _run_json(config: dict[str, object]) -> bytes:
    run = Run(id="ab" * 16, name="tiny", created_at=0.0, tensors=[], digest="0" * 32, config=config)
    return encode_run(run)
