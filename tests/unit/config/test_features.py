"""Settings that not every release has: stated when used, left out when not, and read back."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import get_type_hints

import msgspec
import pytest

from deltawire.config import (
    changed_settings,
    check_config,
    flatten,
    load_config,
    parse_config,
    require_same,
    run_config,
    with_settings,
)
from deltawire.config.features import (
    FEATURES,
    REMOVED,
    RENAMED,
    Feature,
    features_of,
    former_key_hint,
    stored_settings,
    without_features,
)
from deltawire.config.sections import RunConfig
from deltawire.errors import InputError

NEW = {
    "rollout.scaffold": Feature("0.2", ("worker", "evaluator")),
    "rollout.thinking.answer_tokens": Feature("0.2", ("worker",)),
    "rollout.engine=vllm": Feature("0.2", ("worker",)),
    "train.optimizer.groups.weight_decay": Feature("0.2"),
    "retain.versions": Feature("0.2"),
    "shape": Feature("0.2"),
}
LONG = {"max_tokens": 300, "context": 1024}
DEEP = 500


def config_of(**values):
    return parse_config({"name": "r", **values}, source="test")


@pytest.mark.parametrize(
    ("values", "used"),
    [
        ({}, []),
        ({"rollout": {"scaffold": "plan_then_solve", "max_steps": 2}}, ["rollout.scaffold"]),
        ({"rollout": {"scaffold": "plain"}}, []),
        ({"rollout": {"engine": "vllm"}}, ["rollout.engine=vllm"]),
        ({"rollout": {"engine": "transformers"}}, []),
        ({"rollout": {**LONG, "thinking": {"budgets": [8]}}}, []),
        (
            {"rollout": {**LONG, "thinking": {"budgets": [8], "answer_tokens": 7}}},
            ["rollout.thinking.answer_tokens"],
        ),
        ({"train": {"optimizer": {"groups": [{"names": "weight", "learning_rate": 1e-3}]}}}, []),
        (
            {
                "train": {
                    "optimizer": {
                        "groups": [
                            {"names": "bias", "learning_rate": 1e-3},
                            {"names": "weight", "weight_decay": 0.5},
                        ]
                    }
                }
            },
            ["train.optimizer.groups.weight_decay"],
        ),
        ({"retain": {"versions": 3}}, ["retain.versions"]),
    ],
)
def test_features_are_stated_if_used_and_read_back_exactly(values, used):
    config = config_of(**values)
    assert features_of(config, NEW) == used
    stored = stored_settings(config, NEW)
    assert run_config(json.loads(json.dumps(stored)), url="r") == config
    for name in ("rollout.scaffold", "rollout.thinking.answer_tokens", "retain.versions"):
        table, _, key = name.rpartition(".")
        holder = stored
        for part in table.split("."):
            holder = holder.get(part) or {}
        assert (key in holder) == (name in used)


def test_settings_of_every_release_are_stated_at_their_defaults():
    """A default may change: a run keeps the value that it began with."""
    stored = stored_settings(config_of(live={"user_cap": 0.05}, rollout={"group_size": 24}), NEW)
    assert stored["live"]["user_cap"] == 0.05
    assert stored["train"]["groups_per_step"] == RunConfig(name="r").train.groups_per_step
    assert run_config(stored, url="r").live.user_cap == 0.05
    assert stored_settings(config_of(), {}) == msgspec.to_builtins(config_of())


def test_a_shape_is_left_out_unless_the_run_has_one():
    config = msgspec.structs.replace(config_of(), shape={"name": "x", "layout": {"ranks": 2}})
    assert features_of(config, NEW) == ["shape"]
    assert run_config(stored_settings(config, NEW), url="r") == config


def every_key(kind, prefix="", above=()):
    """The dotted keys of a section and of all sections in it, but for one inside itself."""
    found = set()
    for name, hint in get_type_hints(kind).items():
        found.add(f"{prefix}{name}")
        options = [hint, *getattr(hint, "__args__", ())]
        options += [inner for one in options for inner in getattr(one, "__args__", ())]
        for one in options:
            if isinstance(one, type) and issubclass(one, msgspec.Struct) and one not in above:
                found |= every_key(one, f"{prefix}{name}.", (*above, one))
    return found


def test_features_and_renamed_keys_are_settings():
    keys = every_key(RunConfig)
    assert {name.partition("=")[0] for name in FEATURES} <= keys
    assert set(RENAMED.values()) <= keys
    assert not (RENAMED.keys() | REMOVED.keys()) & keys


@pytest.mark.parametrize("key", sorted(RENAMED.keys() | REMOVED.keys()))
def test_a_key_of_before_has_a_hint(key):
    raw = {"name": "r"}
    table = raw
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = 1
    if tables[-1] == "adapters":
        raw["train"] = {"adapters": [raw["train"]["adapters"]]}
    with pytest.raises(InputError, match=f"unknown key {key}") as caught:
        check_config(raw, source="mine.toml")
    assert caught.value.hint == former_key_hint(key)
    assert RENAMED.get(key, REMOVED.get(key)) in caught.value.hint


def test_an_unknown_key_of_a_run_is_a_newer_builds():
    with pytest.raises(InputError, match=r"unknown key rollout\.tempo") as caught:
        run_config({"name": "r", "rollout": {"tempo": 1}}, url="r", created_by="0.7.0")
    assert "created by 0.7.0, and this is 0.1" in caught.value.hint
    assert "UPGRADING" in caught.value.hint
    with pytest.raises(InputError) as caught:
        parse_config({"name": "r", "rollout": {"tempo": 1}}, source="mine.toml")
    assert "UPGRADING" not in caught.value.hint


def nested(depth, kind):
    value = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


@pytest.mark.parametrize("kind", ["list", "table"])
@pytest.mark.parametrize(
    "key", ["name", "shape", "rollout", "task.options", "rollout.scaffold", "train.adapters", "new"]
)
def test_a_deep_setting_is_read_or_refused_in_words(tmp_path, key, kind):
    """No depth that a file or a run can have ends in a RecursionError."""
    raw = {"name": "r"}
    table = raw
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = nested(DEEP, kind)
    path = tmp_path / "deep.json"
    path.write_text(json.dumps(raw))
    plain = parse_config({"name": "r"}, source="test")
    known = {**NEW, key: Feature("0.2"), f"{'a.' * DEEP}a": Feature("0.2")}

    def read(action):
        try:
            config = action()
        except InputError:
            return
        assert flatten(config)["name"] == "r"
        features_of(config, known)
        stored_settings(config, known)
        changed_settings(config, plain)
        with_settings(config, {"train.versions": 7}, source="test")
        with suppress(InputError):
            require_same(config, plain, url="r")

    read(lambda: load_config(path))
    read(lambda: parse_config(raw, source="test"))
    read(lambda: run_config(raw, url="r", created_by="0.7.0"))
    read(lambda: with_settings(plain, {"train.versions": nested(DEEP, kind)}, source="test"))
    without_features(raw, known)
