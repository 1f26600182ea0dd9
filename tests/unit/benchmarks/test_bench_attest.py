"""The frame of ``deltawire bench attest``."""

import importlib

from benchmarks.attest.keys import KEYS, PACKAGE
from deltawire.cli.main import build_parser


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_the_command_takes_keys():
    arguments = build_parser().parse_args(["bench", "attest", "--keys", "bugs_named"])
    assert (arguments.benchmark, arguments.keys) == ("attest", "bugs_named")
