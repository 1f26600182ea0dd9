"""``deltawire shapes`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltawire.cli.main import main
from deltawire.launch import machine_rows
from deltawire.plan.profile import read_profile

PREDICTED = "Memory is predicted and times are estimates."


def test_without_a_model_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shapes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("shape")
    assert sum("kimi-k3" in line for line in lines) == 3
    assert PREDICTED in lines[-1]


def test_a_named_shape_shows_memory_by_part_and_what_binds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["shapes", "qwen3-30b-a3b-lora-8xh200"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "activations", "binding", "next cheaper", "estimate", PREDICTED):
        assert word in out


def test_a_profile_is_written_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "profile.json"
    arguments = ["shapes", str(tmp_path), "--on", "2xh100", "--context", "2048", "--json"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"] == tmp_path.name
    assert read_profile(out).accelerators == 2


def test_a_model_without_hardware_lists_the_smallest_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["shapes", "qwen3-8b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["mode"] for row in rows} == {"full", "lora", "reference"}
    assert all(row["accelerators"] != "none" for row in rows)


def small_model(folder: Path) -> str:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(("gib", "fits"), [(64, True), (1, False)])
def test_this_machine_comes_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gib: int,
    fits: bool,
) -> None:
    monkeypatch.setattr(machine_rows, "available_host_bytes", lambda: gib << 30)
    monkeypatch.setattr(machine_rows, "GPU_DEVICE", tmp_path / "none")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert main(["shapes", small_model(tmp_path), "--json"]) == 0
    full, lora, *others = json.loads(capsys.readouterr().out)
    assert [full["mode"], lora["mode"]] == ["full", "lora"]
    assert full["accelerators"] == lora["accelerators"] == "this machine, 2 cores"
    assert float(full["GiB each"]) > float(lora["GiB each"]) > 1
    assert full["layout"].startswith("one process in float32") == fits
    assert full["layout"].endswith(f"batches of 2,048 tokens; {gib}.0 GiB are free")
    assert full.keys() == others[0].keys()


def test_a_gpu_of_this_machine_is_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_rows, "GPU_DEVICE", tmp_path)
    monkeypatch.setattr(machine_rows, "this_machine", lambda: "1xh100")
    assert main(["shapes", small_model(tmp_path), "--json"]) == 0
    full, lora, *_ = json.loads(capsys.readouterr().out)
    assert full["accelerators"] == lora["accelerators"] == "this machine, 1xh100"
    assert int(full["GiB each"]) < 80
    assert full["layout"]


@pytest.mark.drills
@pytest.mark.long
def test_a_model_that_does_not_fit_this_gpu_is_listed_without_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_rows, "GPU_DEVICE", tmp_path)
    monkeypatch.setattr(machine_rows, "this_machine", lambda: "1xh100")
    assert main(["shapes", "qwen3-235b-a22b", "--json"]) == 0
    full = json.loads(capsys.readouterr().out)[0]
    assert (full["GiB each"], "does not fit 1 x h100" in full["layout"]) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "neither a model of the catalogue nor a file"),
        (["qwen3-8b", "--on", "h200"], "names no accelerators"),
        (["qwen3-8b", "--on", "8xtpu"], "no accelerator is called 'tpu'"),
        (["qwen3-8b", "--out", "x.json"], "--out writes one profile"),
        (["qwen3-8b-full-8xh200", "--on", "8xh200"], "leave --on out"),
        (["qwen3-235b-a22b", "--on", "1xh100"], "does not fit 1 x h100"),
        (["qwen3-8b", "--on", "1xh200", "--accelerators", "/none.json"], "cannot read /none.json"),
    ],
)
def test_wrong_input_ends_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shapes", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
