"""``deltawire bench rounding``: what published masters keep back, and dithered ones serve."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.rounding import adam_moves
from deltawire.cli.main import main


@pytest.fixture
def model(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(128, 256, generator=generator) * 0.05).to(torch.bfloat16)
    save_file({"a.weight": weight, "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_dithered_masters_serve_what_published_ones_keep(model, capsys):
    command = ["bench", "rounding", "--model", str(model), "--rates", "1e-6", "--steps", "1", "5"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * 2 * 5
    found = {(row["step"], row["masters"], row["format"]): row for row in rows}
    assert found[1, "published", "bf16"]["served"] < 0.2
    assert 0.7 < found[1, "dithered", "bf16"]["served"] < 1.3
    assert found[1, "published", "bf16"]["changed"] < found[1, "dithered", "bf16"]["changed"] < 0.1
    assert found[1, "dithered", "bf16"]["moved"] == pytest.approx(1e-6, rel=0.02)
    assert 0 < found[1, "dithered", "bf16"]["cosine"] < found[5, "dithered", "bf16"]["cosine"] < 1
    assert found[5, "dithered", "int4-g32"]["changed"] < found[5, "dithered", "bf16"]["changed"]
    finer = found[1, "dithered", "f16"]
    assert 0.9 < finer["served"] < 1.1
    assert finer["cosine"] > 2 * found[1, "dithered", "bf16"]["cosine"], "steps are 8 times finer"
    assert finer["changed"] > found[1, "dithered", "bf16"]["changed"]
    assert main(command) == 0
    assert "dithered" in capsys.readouterr().out


def test_a_move_is_that_of_adam():
    shape, steps = (7, 5), (1, 3)
    found = adam_moves(shape, steps, torch.Generator().manual_seed(3))
    weight = torch.zeros(shape, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 4):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        if step in steps:
            torch.testing.assert_close(found[step], weight.detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "at least 1"),
        (["--rates", "2"], "between 0 and 1"),
        (["--model", "/nowhere"], "has no bf16 matrix"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    assert main(["bench", "rounding", *arguments]) == 2
    assert message in capsys.readouterr().err
