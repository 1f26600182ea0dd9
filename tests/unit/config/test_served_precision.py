"""A run says which precision its sampler serves, and judges parity accordingly."""

from __future__ import annotations

import pytest
import torch

from deltawire.config import parse_config
from deltawire.config.served import ROUNDED_K3, judged_parity, served_precision
from deltawire.parity.gate import ParityMeter

LORA = {"kind": "lora", "packed": "int8-row"}
MERGED = {"train": {"exporter": "merged", "adapter": LORA}}


def config_of(**sections):
    raw = {"name": "run", "model": {"build": {"family": "qwen3_moe"}}, **sections}
    return parse_config(raw, source="s")


@pytest.mark.parametrize(
    ("sections", "differs", "words"),
    [
        ({}, False, "hold the same bits and compute in float32"),
        ({"train": {"adapter": LORA}}, False, "hold the same bits"),
        (
            {"rollout": {"precision": "bfloat16"}},
            True,
            "the sampler computes in bfloat16, the trainer in float32",
        ),
        (MERGED, True, "the sampler's weights are merged in int8-row, rounded once more"),
        (
            {"train": {"exporter": "fp8-block"}},
            True,
            "the sampler's weights are fp8-block, rounded once more",
        ),
    ],
)
def test_what_the_sampler_serves_is_said(sections, differs, words):
    found = served_precision(config_of(**sections))
    assert found.differs == differs
    assert words in found.words


def test_the_limit_is_that_of_the_served_precision_unless_it_is_set():
    assert judged_parity(config_of()).warn.k3 == 1e-3
    assert judged_parity(config_of(rollout={"precision": "bfloat16"})).warn.k3 == 1e-3
    assert judged_parity(config_of(**MERGED)).warn.k3 == ROUNDED_K3
    assert judged_parity(config_of(train={"exporter": "mxfp4"})).warn.k3 == 1e-3
    assert served_precision(config_of(**MERGED)).warn_k3 == ROUNDED_K3
    strict = config_of(**MERGED, parity={"warn": {"k3": 2e-3}})
    assert judged_parity(strict) == strict.parity


def warned(config, gap):
    meter = ParityMeter(judged_parity(config), 0)
    sampler_NC, mask_NC = torch.full((1, 64), -1.0), torch.ones(1, 64)
    versions_NC = torch.zeros(1, 64, dtype=torch.int64)
    meter.measure(sampler_NC + gap, sampler_NC, mask_NC, versions_NC)
    return [crossing.name for crossing in meter.result().warnings]


def test_a_batch_between_the_limits_warns_only_where_the_weights_are_the_same():
    """k3 of a gap g is about g² / 2: 5e-3 for 0.1."""
    assert warned(config_of(), 0.1) == ["k3"]
    assert warned(config_of(**MERGED), 0.1) == []
    assert warned(config_of(**MERGED), 0.2) == ["k3"]
