"""The frame of ``deltawire bench scale``."""

import importlib

from benchmarks.scale.keys import KEYS, PACKAGE
from benchmarks.training.keys import choose_keys
from deltawire.cli.main import build_parser


def test_every_key_names_a_module_with_a_measurement():
    for name, key in KEYS.items():
        module = importlib.import_module(f"{PACKAGE}.{key.module}")
        assert callable(module.measure), name


def test_the_command_takes_keys():
    assert choose_keys("fetch_s_2000_blobs", KEYS) == ["fetch_s_2000_blobs"]
    arguments = build_parser().parse_args(
        ["bench", "scale", "--json", "--keys", "fetch_s_2000_blobs"]
    )
    assert (arguments.benchmark, arguments.keys, arguments.json) == (
        "scale",
        "fetch_s_2000_blobs",
        True,
    )


def test_small_measurements_are_of_what_they_say():
    """The modules run on a few ranks, blobs and versions, and check what they measure."""
    commit, fetch, live_users, versions, workers = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("commit", "fetch", "live_users", "versions", "workers")
    )
    found = commit.commit(3)
    assert found["pieces"] == 3 * commit.TENSORS
    assert found["seconds"] > 0.1  # At least five requests, one after another.
    assert fetch.fetch(5)["requests"]["get"] >= 5
    assert live_users.forget_one(3)["by_verb"]["get"] >= 3 + 1, "manifests, and the lineage"
    assert versions.show_status(3)["seconds"] > 0.02
    polls = workers.poll(3)
    assert polls["consumed"] >= 1
    assert polls["start"]["requests"]["put"] == 3 + 1, "a secret for each, and trainer.json"
    assert workers.show_status(3)["stored"]["requests"] == {"get": 2}
