"""Laws that the memory model must keep, over random layouts of several models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.plan.catalogue import catalogue
from deltawire.plan.configuration import decode_config
from deltawire.plan.layout import POLICIES, TrainingLayout
from deltawire.plan.memory import all_phases, predict_memory

MODELS = {
    name: catalogue()[name].describe()
    for name in ("qwen3-8b", "qwen3-30b-a3b", "kimi-k2p5", "qwen3p5-35b-a3b", "glm-5p2")
}
POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw: Any) -> TrainingLayout:
    mode = draw(st.sampled_from(["full", "lora", "reference"]))
    return TrainingLayout(
        mode=mode,
        data=draw(POWERS),
        tensor=draw(st.sampled_from([1, 2])),
        context_parallel=draw(st.sampled_from([1, 2])),
        pipeline=draw(st.sampled_from([1, 2, 4])),
        context=draw(st.sampled_from([256, 2048, 32768])),
        sequences=draw(st.integers(1, 3)),
        accumulate=draw(st.booleans()),
        checkpointing=draw(st.sampled_from(POLICIES)),
        offload=draw(st.sampled_from(["none", "optimizer", "all"])) if mode == "full" else "none",
        lora_rank=8 if mode == "lora" else 0,
    )


def peak(name: str, layout: TrainingLayout) -> float:
    return predict_memory(MODELS[name], layout).total


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), layout=layouts())
def test_parts_are_not_negative_and_add_up(name: str, layout: TrainingLayout) -> None:
    for phase in all_phases(MODELS[name], layout):
        assert all(size >= 0 for size in phase.parts().values())
        assert phase.total == pytest.approx(sum(phase.parts().values()))
        assert phase.total <= phase.with_allowance <= 1.05 * phase.total + 1


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), layout=layouts())
def test_less_work_never_takes_more(name: str, layout: TrainingLayout) -> None:
    now = peak(name, layout)
    fewer = dataclasses.replace(layout, context=layout.context // 2)
    assert peak(name, fewer) <= now
    if layout.sequences > 1:
        assert peak(name, dataclasses.replace(layout, sequences=layout.sequences - 1)) <= now
    assert peak(name, dataclasses.replace(layout, accumulate=False)) <= now


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), layout=layouts())
def test_more_recompute_and_more_offload_never_take_more(name: str, layout: TrainingLayout) -> None:
    by_policy = [
        peak(name, dataclasses.replace(layout, checkpointing=policy))
        for policy in ("full", "offloaded")
    ]
    assert by_policy == sorted(by_policy, reverse=True)
    if layout.mode == "full":
        by_offload = [
            peak(name, dataclasses.replace(layout, offload=level)) for level in ("none", "all")
        ]
        assert by_offload == sorted(by_offload, reverse=True)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), layout=layouts())
def test_states_shrink_in_proportion_to_the_ranks_that_share_them(
    name: str, layout: TrainingLayout
) -> None:
    wide = dataclasses.replace(layout, data=2 * layout.data)
    here, there = (
        next(p for p in all_phases(MODELS[name], one) if p.phase in {"step", "forward"})
        for one in (layout, wide)
    )
    assert there.parameters == pytest.approx(here.parameters / 2)
    assert there.optimizer == pytest.approx(here.optimizer / 2)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), layout=layouts(), copies=st.integers(2, 8))
def test_replication_changes_nothing_on_a_rank(
    name: str, layout: TrainingLayout, copies: int
) -> None:
    assert peak(name, dataclasses.replace(layout, replicate=copies)) == peak(name, layout)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_configuration_or_one_error(raw: bytes) -> None:
    try:
        decode_config(raw, where="config.json")
    except InputError as error:
        assert "config.json" in str(error)  # noqa: PT017
