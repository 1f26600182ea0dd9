"""The resolver prices each way to compute a reference, and chooses one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import serve_as
from deltawire.launch.shapes import model_of
from deltawire.plan.accelerators import shipped_accelerators
from deltawire.plan.catalogue import catalogue
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import predict_memory
from deltawire.plan.profile import Profile, ReferencePrice
from deltawire.plan.references import forward_only, price_references
from deltawire.plan.resolver import Accelerators, resolve_training_profile
from deltawire.plan.step_time import estimate_step
from deltawire.plan.tables import needs_rows, profile_lines
from deltawire.train.build import build_model

H200 = shipped_accelerators()["h200"]


def resolve(name: str, count: int = 1, **wish: Any) -> Profile:
    return resolve_training_profile(
        catalogue()[name].describe(),
        accelerators=Accelerators(H200, count),
        **{"mode": "full", "context": 8192, **wish},
    )


def priced(profile: Profile) -> dict[str, ReferencePrice]:
    return {price.mode: price for price in profile.references}


def test_an_adapter_is_switched_off_and_costs_a_forward_pass_only() -> None:
    profile = resolve("qwen3-8b", mode="lora")
    choice = profile.references[0]
    assert (choice.mode, choice.fits) == ("adapter_off", True)
    assert (choice.device_bytes, choice.host_bytes, choice.accelerators) == (0, 0, 0)
    model, layout = catalogue()["qwen3-8b"].describe(), profile.as_layout()
    forward = estimate_step(model, forward_only(layout), H200).seconds
    assert choice.estimated_seconds_per_step == pytest.approx(forward, rel=1e-3)
    assert forward < profile.estimated_seconds_per_step


def test_full_training_keeps_a_sleeping_copy_if_there_is_room() -> None:
    one = resolve("qwen3-8b", optimizer="muon", checkpointing="full")
    assert "adapter_off" not in priced(one), "there is no adapter to switch off"
    assert one.references[0].mode == "sleeping"
    assert priced(one)["sleeping"].host_bytes == 2 * one.parameters
    several = resolve("qwen3-8b", count=4)
    assert several.references[0].mode == "sleeping"
    assert priced(several)["sleeping"].host_bytes == 0
    shard = 4 * several.parameters / 4
    assert priced(several)["sleeping"].device_bytes >= shard


def test_a_process_is_chosen_where_no_copy_fits() -> None:
    profile = resolve("qwen3-30b-a3b", count=8, context=32768)
    sleeping, process = priced(profile)["sleeping"], priced(profile)["process"]
    assert not sleeping.fits
    assert "GiB of device memory" in sleeping.note
    assert profile.peak_with_allowance + sleeping.device_bytes > profile.usable_bytes
    assert profile.references[0] == process
    assert process.accelerators >= 1


def test_a_process_that_keeps_up_makes_nobody_wait_and_a_slow_one_does() -> None:
    model = catalogue()["qwen3-8b"].describe()
    policy = TrainingLayout(data=8, context=8192, accumulate=True)
    small = TrainingLayout(mode="reference", context=8192, checkpointing="none")
    large = dataclasses.replace(small, data=4)
    waits = [
        next(
            price.estimated_seconds_per_step
            for price in price_references(model, policy, H200, own)
            if price.mode == "process"
        )
        for own in (small, large)
    ]
    assert waits[0] > 0
    assert waits[1] == 0


def test_a_reference_pass_below_the_policys_peak_adds_nothing_and_above_it_the_difference() -> None:
    """A long context under full checkpointing: the policy's activations are more than a forward
    pass takes. A policy whose states leave the device has a lower peak than that pass."""
    model = catalogue()["qwen3-8b"].describe()
    for offload in ("none", "all"):
        layout = TrainingLayout(
            data=8, context=16384, offload=offload, checkpointing="offloaded", accumulate=True
        )
        price = next(p for p in price_references(model, layout, H200) if p.mode == "sleeping")
        shard = 4 * model.parameters / 8
        peak = predict_memory(model, layout).with_allowance
        assert shard <= price.device_bytes < shard + peak


def test_a_sleeping_copy_has_the_bytes_that_are_priced() -> None:
    sizes = BuildConfig(hidden_size=64, layers=3, head_size=16, feed_forward_size=96)
    run = parse_config(
        {"name": "x", "model": {"build": {"hidden_size": 64, "layers": 3, "head_size": 16,
         "feed_forward_size": 96}}}, source="test",
    )  # fmt: skip
    model = model_of(run)
    layout = TrainingLayout(context=128, accumulate=True)
    price = next(p for p in price_references(model, layout, H200) if p.mode == "sleeping")
    frozen = serve_as(build_model(sizes, seed=0), "bfloat16")
    assert price.host_bytes == sum(p.nbytes for p in frozen.parameters())


def test_a_reference_has_no_reference() -> None:
    assert resolve("qwen3-8b", mode="reference").references == []


def test_the_tables_show_the_choice_and_every_price() -> None:
    lines = "\n".join(profile_lines(resolve("qwen3-8b", mode="lora")))
    for word in ("adapter_off", "sleeping", "process", "chosen: the policy without its adapter"):
        assert word in lines
    rows = needs_rows(catalogue()["qwen3-8b"].describe(), "none", 8192)
    assert {row["reference"] for row in rows if row["mode"] == "lora"} == {"adapter off"}
    assert {row["reference"] for row in rows if row["mode"] == "reference"} == {""}
