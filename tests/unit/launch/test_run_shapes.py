"""A training shape becomes settings; what contradicts it, or cannot be done, is one clear error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltawire.cli.main import main
from deltawire.config import parse_config, read_values
from deltawire.errors import InputError
from deltawire.launch.shapes import find_profile, model_of, settings_of, shaped_config
from deltawire.packed_formats import PACKED
from deltawire.plan.accelerators import shipped_accelerators
from deltawire.plan.layout import Packing
from deltawire.plan.profile import Profile, encode_profile
from deltawire.plan.resolver import Accelerators, resolve_shape, resolve_training_profile
from deltawire.train.build import build_model

TOML = """
name = "shaped"
[model.build]
hidden_size = 32
layers = 2
head_size = 16
feed_forward_size = 64
context = 128
[rollout]
context = 96
"""
EXPERTS = """[model.build]
family = "qwen3_moe"
experts = 4
experts_per_token = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def values_of(config: Path, **changes: Any) -> dict[str, Any]:
    values = read_values(config)
    for key, value in changes.items():
        *tables, last = key.split("__")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return values


def profile_of(config: Path, *, mode: str = "full", context: int = 128, **wish: Any) -> Profile:
    return resolve_training_profile(
        model_of(parse_config(read_values(config), source="test")),
        mode=mode,
        accelerators=Accelerators(shipped_accelerators()["cpu"], 1),
        context=context,
        startable=True,
        **wish,
    )


def test_the_plan_describes_the_model_that_is_built(config: Path) -> None:
    run = parse_config(read_values(config), source="test")
    assert run.model.build is not None
    built = build_model(run.model.build, seed=0)
    assert model_of(run).parameters == sum(p.numel() for p in built.parameters())


def test_every_setting_of_a_shape_reaches_the_configuration(config: Path) -> None:
    profile = profile_of(
        config, mode="lora", lora_rank=4, checkpointing="selective", optimizer="muon"
    )
    run = shaped_config(values_of(config), profile, source="run.toml")
    train, layout = run.train, profile.layout
    assert (train.adapter.kind, train.adapter.rank) == ("lora", 4)
    assert train.max_tokens_per_batch == layout.context * layout.sequences
    assert (train.activation_checkpointing, train.optimizer.kind) == ("selective", "muon")
    assert (train.compute, train.packing, train.ranks) == ("bfloat16", "auto", 1)
    assert (train.offload, train.device) == ("none", "cpu")
    assert msgspec.convert(run.shape, Profile) == profile
    again = parse_config(msgspec.to_builtins(run), source="run.json")
    assert again == run, "run.json holds the shape and what follows from it"


def test_offload_of_moments_follows_and_of_everything_is_refused(config: Path) -> None:
    run = shaped_config(
        values_of(config), profile_of(config, offload="optimizer"), source="run.toml"
    )
    assert run.train.offload == "optimizer"
    layout = msgspec.structs.replace(profile_of(config).layout, offload="all")
    with pytest.raises(InputError, match="cannot do offload all so far"):
        settings_of(msgspec.structs.replace(profile_of(config), layout=layout))


@pytest.mark.parametrize("packing", ["none", "int4", "mxfp4", "fp8"])
def test_a_shape_packs_the_experts_as_it_planned(tmp_path: Path, packing: Packing) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML.replace("[model.build]", EXPERTS))
    profile = profile_of(path, mode="lora", packing=packing)
    assert profile.unsupported == []
    adapter = shaped_config(values_of(path), profile, source="run.toml").train.adapter
    assert (adapter.kind, planned(adapter.packed)) == ("lora", packing)
    values = values_of(path, train__adapter={"kind": "lora", "packed": "nvfp4"})
    with pytest.raises(InputError, match=r"contradicts the shape .*train\.adapter\.packed"):
        shaped_config(values, profile, source="run.toml")


def planned(packed: str) -> str:
    return "none" if packed == "none" else PACKED[packed].planned_as


@pytest.mark.parametrize(
    ("field", "size", "name"),
    [
        ("pipeline", 2, "pipeline 2"),
        ("context_parallel", 2, "context parallel 2"),
        ("lora_experts", True, "LoRA on experts"),
    ],
)
def test_what_the_trainer_lacks_is_refused_by_name(
    config: Path, field: str, size: Any, name: str
) -> None:
    profile = profile_of(config, mode="lora")
    layout = msgspec.structs.replace(profile.layout, **{field: size})
    with pytest.raises(InputError, match=f"the trainer cannot do .*{name}"):
        settings_of(msgspec.structs.replace(profile, layout=layout, unsupported=[]))


def test_all_contradictions_are_named_in_one_error(config: Path) -> None:
    values = values_of(
        config, train__compute="float32", train__optimizer__kind="muon", train__packing="auto"
    )
    with pytest.raises(InputError) as caught:
        shaped_config(values, profile_of(config), source="run.toml")
    said = str(caught.value)
    assert "train.compute is 'float32', not 'bfloat16'" in said
    assert "train.optimizer.kind is 'muon', not 'adamw'" in said
    assert "train.packing" not in said, "it agrees"


def test_a_shape_of_another_model_is_refused(config: Path) -> None:
    profile = profile_of(config)
    for change in ({"model__build__layers": 3}, {"model__build__hidden_size": 64}):
        with pytest.raises(InputError, match=r"is for another model: shaped with 2\d,\d+ param"):
            shaped_config(values_of(config, **change), profile, source="run.toml")


def test_sequences_longer_than_the_shape_are_refused(config: Path) -> None:
    with pytest.raises(InputError, match=r"rollout.context is 96, and the shape .* of 64 tokens"):
        shaped_config(values_of(config), profile_of(config, context=64), source="run.toml")


def test_a_reference_shape_trains_nothing(config: Path) -> None:
    with pytest.raises(InputError, match="is a reference's, not a trainer's"):
        settings_of(profile_of(config, mode="reference"))


def test_the_reference_follows_from_its_price(config: Path) -> None:
    penalty = {"train__loss__kl": "k2"}
    full, lora = profile_of(config), profile_of(config, mode="lora")
    chosen = shaped_config(values_of(config, **penalty), full, source="run.toml")
    assert chosen.reference.mode == "sleeping"
    chosen = shaped_config(values_of(config, **penalty), lora, source="run.toml")
    assert chosen.reference.mode == "adapter_off"
    asked = values_of(config, **penalty, reference__mode="process")
    assert shaped_config(asked, full, source="run.toml").reference.mode == "process"
    crowded = copy.deepcopy(full.references)
    crowded = [msgspec.structs.replace(price, fits=False) for price in crowded]
    with pytest.raises(InputError, match=r"reference\.mode process does not fit"):
        shaped_config(asked, msgspec.structs.replace(full, references=crowded), source="run.toml")
    assert shaped_config(values_of(config), full, source="run.toml").reference.mode == "auto"


def test_a_named_shape_is_found_and_nonsense_is_not(tmp_path: Path) -> None:
    assert find_profile("qwen3-8b-lora-8k-1xh200") == resolve_shape("qwen3-8b-lora-8k-1xh200")
    with pytest.raises(InputError, match="neither a file nor the name of a shape"):
        find_profile(str(tmp_path / "none"))


def test_the_commands_hand_a_shape_from_one_to_the_other(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``deltawire run --shape`` takes what ``deltawire shapes --json`` prints."""
    asked = ["--on", "1xcpu", "--context", "128", "--startable", "--json"]
    assert main(["shapes", str(config), *asked]) == 0
    file = tmp_path / "shape.json"
    file.write_text(capsys.readouterr().out)
    assert main(["run", str(config), "--shape", str(file), "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["train.max_tokens_per_batch"] >= 128
    assert printed["shape"]["device"] == "cpu"
    assert main(["run", str(config), "--shape", str(file), "--dry-run"]) == 0
    assert printed["shape"]["name"] in capsys.readouterr().out


def test_a_shape_in_the_file_itself_is_refused(config: Path) -> None:
    profile = msgspec.json.decode(encode_profile(profile_of(config)))
    with pytest.raises(InputError, match="shape is not a key of a file"):
        shaped_config(values_of(config, shape=profile), profile_of(config), source="run.toml")
