"""The resolver's choices, messages and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltawire.errors import InputError
from deltawire.plan.accelerators import (
    accelerator_named,
    decode_accelerators,
    read_accelerators,
    shipped_accelerators,
)
from deltawire.plan.catalogue import catalogue, find_model, published_shapes, shipped_profiles
from deltawire.plan.layout import MODES, TrainingLayout, check_layout
from deltawire.plan.memory import predict_memory
from deltawire.plan.profile import Profile, decode_profile, encode_profile, read_profile
from deltawire.plan.published import compare_row
from deltawire.plan.resolver import (
    Accelerators,
    Wish,
    _layouts,
    resolve_shape,
    resolve_training_profile,
    unsupported_parts,
)
from deltawire.plan.tables import LACKING, catalogue_rows, needs_rows, smallest_profile


def resolve(name: str = "qwen3-30b-a3b", kind: str = "h200", count: int = 8, **wish: Any) -> Any:
    defaults = {"mode": "full", "context": 8192}
    return resolve_training_profile(
        catalogue()[name].describe(),
        accelerators=Accelerators(shipped_accelerators()[kind], count),
        **{**defaults, **wish},
    )


def test_a_profile_fits_and_its_bytes_add_up() -> None:
    profile = resolve()
    assert sum(profile.bytes_per_rank.values()) == pytest.approx(profile.peak_bytes, abs=8)
    assert profile.peak_bytes < profile.peak_with_allowance <= profile.usable_bytes
    again = predict_memory(catalogue()["qwen3-30b-a3b"].describe(), profile.as_layout())
    assert round(again.total) == profile.peak_bytes
    assert profile.as_layout().ranks == 8


def test_more_memory_is_never_estimated_to_be_slower() -> None:
    speeds = [
        resolve(kind=kind, mode="lora").estimated_tokens_per_second for kind in ("h100", "h200")
    ]
    assert speeds[0] <= speeds[1]  # the same chip with less and with more memory


def test_the_binding_constraint_and_both_alternatives_are_reported() -> None:
    profile = resolve(context=32768)
    assert profile.binding.startswith("device memory: ")
    assert profile.cheaper.accelerators == 4
    assert profile.faster.accelerators == 16
    assert profile.faster.estimated_tokens_per_second > profile.estimated_tokens_per_second


def test_any_number_of_accelerators_can_be_planned_for() -> None:
    assert resolve(count=7).layout.data == 7
    assert resolve(count=12, mode="lora").as_layout().ranks == 12


def test_features_that_the_trainer_lacks_are_reported() -> None:
    profile = resolve(mode="reference", packing="int4")
    assert set(profile.unsupported) == set(unsupported_parts(profile.as_layout()))
    assert "packing int4" in profile.unsupported


def test_only_layouts_that_start_are_planned_where_that_is_asked_for() -> None:
    for mode in ("full", "lora"):
        profile = resolve("qwen3-8b", count=1, kind="b300", mode=mode, startable=True)
        assert profile.unsupported == []
    with pytest.raises(InputError, match="no layout of qwen3-30b-a3b that the trainer can start"):
        resolve(mode="reference", packing="int4", startable=True)


def resolves_first(name: str) -> tuple[Profile, Profile]:
    """A named shape, and the fastest layout of it, which may be none that starts."""
    shape = resolve_shape(name)
    found = resolve(
        shape.model, count=shape.accelerators, kind=shape.accelerator, mode=shape.mode,
        packing=shape.layout.packing, context=shape.layout.context,
    )  # fmt: skip
    return shape, found


def test_a_layout_that_cannot_start_is_no_default() -> None:
    """The fastest one of these divides the context, which the trainer cannot."""
    for name in ("gpt-oss-120b-lora-8xh200", "qwen3-32b-full-64xh100"):
        shape, fastest = resolves_first(name)
        assert fastest.unsupported
        assert shape.unsupported == []
    shape, fastest = resolves_first("kimi-k2p5-reference-4xb200")
    assert shape == fastest
    assert shape.unsupported == ["packing int4"], "no other one fits"


def test_rows_prefer_what_starts_and_mark_what_does_not() -> None:
    """The fastest one on four H100 has masters and gradients on the host."""
    rows = needs_rows(catalogue()["qwen3-32b"].describe(), "none", None)
    row = next(one for one in rows if (one["mode"], one["accelerators"]) == ("full", "4 x h100"))
    assert (row[LACKING], "offload all" in row["layout"]) == ("", False)
    for row in (*rows, *catalogue_rows()):
        reference = "-reference-" in row.get("shape", "")
        lacks = "packing" in row["layout"] and reference
        assert bool(row[LACKING]) == lacks, row
        assert not re.search("context parallel|pipeline|offload all", row["layout"])


def test_a_named_shape_is_the_same_every_time() -> None:
    shape = resolve_shape("qwen3-30b-a3b-lora-8xh200")
    assert shape == resolve_shape("qwen3-30b-a3b-lora-32k-8xh200")
    assert shape.layout.context == 32768
    assert resolve_shape("kimi-k2p5-reference-8xb300").layout.packing == "int4"


@pytest.mark.parametrize("name", ["qwen3-8b-full-1xh100", "gpt-oss-120b-lora-4xh200"])
def test_profiles_survive_their_own_encoding(name: str, tmp_path: Path) -> None:
    profile = resolve_shape(name)
    (tmp_path / "profile.json").write_bytes(encode_profile(profile))
    assert read_profile(tmp_path / "profile.json") == profile


def test_pinned_profiles_are_what_the_resolver_computes() -> None:
    """After a change of the memory model, run scripts/pin_shapes.py and look at the difference."""
    pinned = {(profile.model, profile.mode): profile for profile in shipped_profiles()}
    assert set(pinned) == {(name, mode) for name in catalogue() for mode in MODES}
    for name in ("qwen3-8b", "gpt-oss-120b"):
        entry = catalogue()[name]
        for mode in MODES:
            found = smallest_profile(entry.describe(), mode, entry.native_packing, "b200")
            assert found == pinned[name, mode]


def test_the_documentations_table_is_what_the_command_prints() -> None:
    text = (Path(__file__).parents[3] / "docs" / "SHAPES.md").read_text()
    assert all(f"| {row.shape} | {row.mode} |" in text for row in published_shapes())
    for row in published_shapes():
        if row.shape in {"qwen3p5-27b-64k-lora", "deepseek-v4-pro-0813-256k-lora"}:
            assert compare_row(row).line in text


def test_a_model_that_cannot_fit_gets_the_reason_and_the_smallest_hardware() -> None:
    with pytest.raises(InputError) as raised:
        resolve("qwen3-235b-a22b", kind="h100", count=1)
    text = str(raised.value)
    assert "does not fit 1 x h100" in text
    assert "needed" in text
    assert "smallest that would suffice: " in text
    assert " x b300" in text


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"count": 0}, "0 accelerators"),
        ({"context": 0}, "context of 0"),
        ({"context": 1 << 20}, "has a context of 40960"),
        ({"mode": "lora", "lora_rank": 0}, "LoRA rank of 0"),
        ({"packing": "int4"}, "full training has none"),
        ({"mode": "lora", "offload": "all"}, "offload is for full training"),
        ({"mode": "reference", "checkpointing": "full"}, "nothing to checkpoint"),
        ({"name": "qwen3-8b", "mode": "lora", "packing": "int4"}, "no experts to pack"),
    ],
)
def test_wrong_wishes_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(**wish)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-8b", "names no training shape"),
        ("qwen3-8b-full-8xtpu", "names no training shape"),
        ("qwen3-8b-full-8xh200; rm", "names no training shape"),
        ("unknown-1b-full-8xh200", "no model of the catalogue"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_shape(name)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="the catalogue has deepseek-v4-flash-0731"):
        find_model("qwen9-1b")


def test_accelerators_can_be_added_and_replaced(tmp_path: Path) -> None:
    entry = json.loads(
        (Path(__file__).parents[3] / "src/deltawire/plan/accelerators.json").read_text()
    )[0]
    (tmp_path / "mine.json").write_text(json.dumps([{**entry, "name": "mine", "memory_gib": 500}]))
    table = read_accelerators(tmp_path / "mine.json")
    assert accelerator_named("mine", table).memory_gib == 500
    assert set(shipped_accelerators()) < set(table)
    with pytest.raises(InputError, match=r"no accelerator is called 'x9000'; known: .*mine"):
        accelerator_named("x9000", table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gib": -1}, "not a table of accelerators"),
        ({"memory_gib": 1e300}, "not a table of accelerators"),
        ({"name": "../../etc"}, "not a table of accelerators"),
        ({"source": ""}, "not a table of accelerators"),
        ({"surprise": 1}, "not a table of accelerators"),
    ],
)
def test_hostile_accelerators_are_refused(change: dict[str, Any], message: str) -> None:
    file = Path(__file__).parents[3] / "src/deltawire/plan/accelerators.json"
    entry = {**json.loads(file.read_text())[0], **change}
    with pytest.raises(InputError, match=message):
        decode_accelerators(json.dumps([entry]).encode(), where="mine.json")


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"[" * 50_000, b" " * (2 << 20)])
def test_tables_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(InputError, match=r"mine\.json"):
        decode_accelerators(raw, where="mine.json")


def test_profiles_of_another_version_and_hostile_ones_are_refused() -> None:
    raw = encode_profile(resolve_shape("qwen3-8b-reference-1xh100"))
    with pytest.raises(InputError, match="a profile of version 1"):
        decode_profile(raw.replace(b'"version": 2', b'"version": 1'), where="x")
    for wrong in (raw.replace(b'"data": 1', b'"data": 0'), b"", b"[]", raw[:-20], b"[" * 50_000):
        with pytest.raises(InputError, match="training profile"):
            decode_profile(wrong, where="x")


def test_tensor_parallelism_that_divides_no_key_value_head_is_refused_by_name() -> None:
    model = catalogue()["qwen3-30b-a3b"].describe()
    assert (model.layers[0].attention.heads, model.layers[0].attention.key_value_heads) == (32, 4)
    with pytest.raises(InputError, match=r"tensor 8 does not divide .* 4 key/value heads"):
        check_layout(model, TrainingLayout(tensor=8))
    check_layout(model, TrainingLayout(tensor=4))
    wish = Wish(mode="full", context=4096, packing="none", lora_rank=0)
    found = {
        one.tensor for one in _layouts(model, wish, Accelerators(shipped_accelerators()["h200"], 8))
    }
    assert found == {1, 2, 4}
