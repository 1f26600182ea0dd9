"""The wire's benchmark measures what it says, and its figures that are no times hold anywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.synthetic import SyntheticSteps
from deltawire.cli.main import main
from deltawire.errors import InputError

FLOORS = {"region_share_first_50": 0.03, "region_share_next_50": 0.01, "objects_at_lag_60": 12}


@pytest.mark.drills
@pytest.mark.long
def test_the_figures_that_are_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "0.002", "--region-size", "0.004", "--repeats", "1"]
    assert main(["bench", "sync", *sizes, "--rivals", "sparse-int32,xor-zstd1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key, floor in FLOORS.items():
        assert 0 < found[key] <= floor, key
    assert found["trainer_blocked_vs_memcpy"] > 0
    assert found["end_to_end_speedup_vs_full"] > 0
    assert {rival["name"] for rival in found["rivals"]} == {
        "full-safetensors",
        "sparse-int32",
        "xor-zstd1",
    }
    assert found["delta_bytes"] < min(rival["bytes"] for rival in found["rivals"])


def test_wrong_sizes_are_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--size", "0"], ["--repeats", "0"], ["--rivals", "unknown"], ["--density", "2"]):
        assert main(["bench", "sync", "--size", "0.001", *flags]) == 2, flags
        assert "error:" in capsys.readouterr().err


def test_steps_change_the_share_that_is_asked_for_and_repeat() -> None:
    steps, again = (SyntheticSteps(1 << 18, 0.01, rows=16, seed=3) for _ in range(2))
    assert len(steps.tensors) == 4
    before = {name: bits.copy() for name, bits in steps.tensors.items()}
    for _ in range(3):
        steps.advance()
        again.advance()
        shares = [np.mean(bits != before[name]) for name, bits in steps.tensors.items()]
        assert 0.005 < np.mean(shares) < 0.015
        before = {name: bits.copy() for name, bits in steps.tensors.items()}
    assert all(np.array_equal(bits, again.tensors[name]) for name, bits in steps.tensors.items())
    with pytest.raises(InputError):
        SyntheticSteps(0, 0.01)
