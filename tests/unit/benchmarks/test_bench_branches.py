"""The frame of ``deltawire bench branches``."""

import importlib

from benchmarks.branches.keys import KEYS, PACKAGE
from deltawire.cli.main import build_parser


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_the_command_takes_keys():
    arguments = build_parser().parse_args(["bench", "branches", "--keys", "bisect_wrong"])
    assert (arguments.benchmark, arguments.keys) == ("branches", "bisect_wrong")
