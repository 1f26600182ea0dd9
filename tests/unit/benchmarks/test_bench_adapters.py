"""The frame of ``deltawire bench adapters``, and its small measurements."""

import importlib

import pytest

from benchmarks.adapters import base_faults, packed_step
from benchmarks.adapters.keys import KEYS, PACKAGE
from benchmarks.training.keys import Options, choose_keys, report, rows
from deltawire.cli.main import build_parser
from deltawire.errors import InputError


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_a_figure_that_was_not_measured_is_null_and_not_met():
    assert choose_keys("all", KEYS) == list(KEYS)
    values = {"adapter_swap_ms": None, "gradient_equal": True}
    told = report(values, {}, Options(), keys=KEYS)
    assert told["met"] == {"adapter_swap_ms": False, "gradient_equal": True}
    assert [row[:4] for row in rows(values, keys=KEYS)] == [
        ("adapter_swap_ms", "null", "<= 1e+09", "NO"),
        ("gradient_equal", "true", "true", "yes"),
    ]


def test_the_command_takes_keys():
    arguments = build_parser().parse_args(["bench", "adapters", "--json", "--keys", "all"])
    assert (arguments.benchmark, arguments.keys, arguments.json) == ("adapters", "all", True)


def test_each_fault_in_the_base_is_found():
    assert base_faults.measure(Options()).values == {"base_mismatch_found": True}


def test_a_fault_that_is_not_planted_counts_as_not_found(monkeypatch):
    monkeypatch.setattr(base_faults, "_flip", lambda model, name: None)
    assert base_faults.measure(Options()).values == {"base_mismatch_found": False}


def test_the_timed_layers_compute_the_same_and_other_weights_do_not():
    plain, packed = packed_step.layers("int4-g32", 4, 64, 32, 2, seed=0)
    data = packed_step.inputs(4, 64, 2, 9, seed=0)
    (_, one), (_, other) = packed_step.step(plain, *data), packed_step.step(packed, *data)
    assert packed_step.same(one, other)
    assert packed_step.memory_ratio(plain, packed) == pytest.approx(16 / 4.5)
    assert packed_step.ratio_at_size("int4-g32") == pytest.approx(16 / 4.5)
    assert packed_step.ratio_at_size("nvfp4") > 3.5
    packed.down_proj.codes[0, 0, 0] ^= 1
    assert not packed_step.same(one, packed_step.step(packed, *data)[1])
    with pytest.raises(InputError, match="there is no"):
        choose_keys("trl_equal", KEYS)
