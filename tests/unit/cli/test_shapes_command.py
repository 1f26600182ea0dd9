"""``deltawire shapes`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltawire.cli.main import main
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
