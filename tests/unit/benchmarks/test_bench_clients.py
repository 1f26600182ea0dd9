"""The frame of ``deltawire bench clients``."""

import importlib

import pytest

from benchmarks.clients.keys import KEYS, PACKAGE
from benchmarks.training.keys import Options, choose_keys, report, rows
from deltawire.cli.bench import benchmark_commands
from deltawire.cli.main import build_parser
from deltawire.errors import InputError

pytest.importorskip("trl")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_keys_are_chosen_and_reported_with_their_floors():
    assert choose_keys("all", KEYS) == list(KEYS)
    with pytest.raises(InputError, match="there is no 'memory_error_max'"):
        choose_keys("memory_error_max", KEYS)
    values = {"trl_blocked_ratio": 1.6, "trl_equal": True}
    told = report(values, {}, Options(), keys=KEYS)
    assert told["met"] == {"trl_blocked_ratio": False, "trl_equal": True}
    assert [row[:4] for row in rows(values, keys=KEYS)] == [
        ("trl_blocked_ratio", "1.6", "<= 1.5", "NO"),
        ("trl_equal", "true", "true", "yes"),
    ]


def test_the_command_takes_keys():
    assert callable(benchmark_commands().run)
    arguments = build_parser().parse_args(["bench", "clients", "--json", "--keys", "trl_equal"])
    assert (arguments.benchmark, arguments.keys, arguments.json) == ("clients", "trl_equal", True)
