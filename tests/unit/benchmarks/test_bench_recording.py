"""Recorded pairs: real steps, resumable, and what the names say."""

import numpy as np
import pytest

from benchmarks import recording
from benchmarks.pairs import load_pair
from benchmarks.recording import Setting, pair_path, record
from deltawire.config import parse_config
from deltawire.envs import Turn, questions
from deltawire.errors import InputError
from deltawire.rl.trainer import warm_start as warming


def config_of(family):
    return parse_config(
        {
            "name": "tiny",
            "model": {
                "build": {
                    "family": family,
                    "hidden_size": 32,
                    "layers": 2,
                    "head_size": 16,
                    "feed_forward_size": 24,
                    "experts": 4,
                    "vocabulary": 300,
                    "context": 128,
                }
            },
            "task": {"dataset": "spell_backward", "heldout": 10},
            "warm_start": {"max_steps": 2, "batch": 4, "check_every": 2},
            "rollout": {"group_size": 4, "max_tokens": 4, "slots": 8, "context": 100},
            "train": {"groups_per_step": 2, "schedule": {"warmup_steps": 1}},
        },
        source="test",
    )


@pytest.fixture(autouse=True)
def _rewards(monkeypatch):
    """Models this small spell nothing; reward something that untrained ones do now and then."""

    async def step(self, action):
        return Turn("", reward=float(len(action.text) % 2), done=True)

    monkeypatch.setattr(questions.QuestionEpisode, "step", step)
    monkeypatch.setattr(warming, "_processors", lambda: 1)


def quiet(line):
    pass


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "rl"), ("qwen3_moe", "rl"), ("qwen3", "sft")]
)
def test_pairs_of_every_kind_are_recorded(tmp_path, family, kind):
    config, setting = config_of(family), Setting(kind, 1e-3, (1, 2), settle=1)
    recorded = record(config, setting, tmp_path, quiet)
    assert [pair.path.name for pair in recorded] == [f"tiny-{kind}-lr1e-3-k{k}.npz" for k in (1, 2)]
    pairs = [load_pair(pair.path) for pair in recorded]
    for pair, told in zip(pairs, recorded, strict=True):
        assert pair.changed / pair.elements == pytest.approx(told.density)
        assert pair.changed > 0
    for name, tensor in pairs[0].tensors.items():
        assert np.array_equal(tensor.old, pairs[1].tensors[name].old), "strides share their base"
    experts = any("experts" in name for name in pairs[0].tensors)
    assert experts == (family == "qwen3_moe")
    assert record(config, setting, tmp_path, quiet) == []


def test_an_interrupted_setting_continues_to_the_same_bits(tmp_path, monkeypatch):
    config, setting = config_of("qwen3"), Setting("rl", 1e-3, (1, 3), settle=2)
    record(config, setting, tmp_path / "whole", quiet)

    def interrupt(line):
        if "step 4 of 5" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "SAVE_EVERY", 2)
    with pytest.raises(KeyboardInterrupt):
        record(config, setting, tmp_path / "parts", interrupt)
    done = record(config, setting, tmp_path / "parts", quiet)
    assert [pair.path.name for pair in done] == ["tiny-rl-lr1e-3-k3.npz"]
    for stride in setting.strides:
        whole, parts = (
            load_pair(pair_path(config, setting, tmp_path / way, stride)).tensors
            for way in ("whole", "parts")
        )
        for name, tensor in whole.items():
            assert np.array_equal(tensor.old, parts[name].old)
            assert np.array_equal(tensor.new, parts[name].new)


def test_a_damaged_state_is_reported(tmp_path):
    config, setting = config_of("qwen3"), Setting("rl", 1e-3, (1,), settle=0)
    record(config, setting, tmp_path, quiet)
    pair_path(config, setting, tmp_path, 1).unlink()
    (tmp_path / "work" / "tiny" / "rl-lr1e-3-settle0.safetensors").write_bytes(b"damage")
    with pytest.raises(InputError, match="damaged"):
        record(config, setting, tmp_path, quiet)


def test_a_stride_before_the_state_starts_over(tmp_path):
    """The state of a later step must not pass for the base of an earlier pair."""
    config = config_of("qwen3")
    record(config, Setting("rl", 1e-3, (3,), settle=1), tmp_path, quiet)
    (pair,) = record(config, Setting("rl", 1e-3, (1, 3), settle=1), tmp_path, quiet)
    assert pair.path.name == "tiny-rl-lr1e-3-k1.npz"
    assert pair.density > 0


@pytest.mark.parametrize(
    ("rate", "name"), [(5e-7, "lr5e-7"), (1e-4, "lr1e-4"), (2.5e-6, "lr2.5e-6"), (0.01, "lr1e-2")]
)
def test_settings_are_named_by_their_rate(rate, name):
    assert Setting("rl", rate, (1,), 0).name == f"rl-{name}"
