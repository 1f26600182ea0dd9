"""The frame of ``deltawire bench train``: keys, floors, and a process for each measurement."""

import importlib
import json

import numpy as np
import pytest

from benchmarks.training import head_peak
from benchmarks.training.keys import (
    KEYS,
    Key,
    Options,
    choose_keys,
    measure_in_processes,
    report,
    rows,
)
from benchmarks.training.workload import log_normal
from deltawire.errors import InputError


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"benchmarks.training.{key.module}")
        assert callable(module.measure), name


def test_floors():
    assert Key("m", ">=", 8, "").met(8.0)
    guessed = Key("m", ">=", 8, "", placeholder=True)
    assert not guessed.met(8.0)
    assert guessed.bound == ">= 8 (not measured yet)"
    assert not Key("m", ">=", 8, "").met(7.9)
    assert Key("m", "<=", 0.1, "").met(0.1)
    assert not Key("m", "is", True, "").met(False)
    assert Key("m", "is", True, "").bound == "true"


def test_unknown_keys_are_refused_by_name():
    assert choose_keys("all") == list(KEYS)
    with pytest.raises(InputError, match="there is no 'speed'") as refused:
        choose_keys("memory_error_max,speed")
    assert "memory_error_max" in refused.value.hint


@pytest.mark.drills  # `tests/unit/plan` compares the same figure for more cases.
def test_a_measurement_runs_in_its_own_process_and_is_reported_against_its_floor(capfd):
    options = Options(cases=1, seed=3)
    values, details = measure_in_processes(["memory_error_max"], options)
    found = json.loads(json.dumps(report(values, details, options)))
    assert found["floors"] == {"memory_error_max": "<= 0.1"}
    (case,) = found["details"]["memory_error"]["cases"]
    assert found["memory_error_max"] == abs(case["error"])
    assert found["met"]["memory_error_max"] == (abs(case["error"]) <= 0.1)
    assert rows(values)[0][:3] == ("memory_error_max", f"{abs(case['error']):.4g}", "<= 0.1")
    assert case["case"] in capfd.readouterr().err


def test_lengths_are_log_normal_and_seeded():
    lengths = log_normal(20_000, 7)
    assert lengths == log_normal(20_000, 7)
    assert np.median(lengths) == pytest.approx(256, rel=0.05)
    assert np.percentile(lengths, 95) == pytest.approx(1024, rel=0.05)
    assert max(lengths) == 2048


def test_a_chunked_head_peaks_lower_than_a_plain_one(monkeypatch):
    """Every tensor is counted and none is allocated."""
    monkeypatch.setattr(head_peak, "TOKENS", 2048)
    monkeypatch.setattr(head_peak, "HIDDEN", 64)
    plain, chunked = (head_peak.tracked(step) for step in (head_peak.plain, head_peak.chunked))
    logits = 2048 * head_peak.VOCABULARY * 4
    assert plain > 2 * logits
    assert chunked < logits


@pytest.mark.drills
@pytest.mark.long
def test_a_chunked_head_of_the_fixed_case_takes_an_eighth():
    values, _ = measure_in_processes(["head_peak_ratio"], Options())
    assert values["head_peak_ratio"] >= 8
