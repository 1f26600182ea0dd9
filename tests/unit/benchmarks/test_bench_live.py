"""The frame of ``deltawire bench live``."""

import importlib

from benchmarks.live.keys import KEYS, PACKAGE
from benchmarks.training.keys import choose_keys
from deltawire.cli.main import build_parser


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_the_command_takes_keys():
    assert choose_keys("captures_lost", KEYS) == ["captures_lost"]
    arguments = build_parser().parse_args(["bench", "live", "--json", "--keys", "captures_lost"])
    assert (arguments.benchmark, arguments.keys, arguments.json) == ("live", "captures_lost", True)
