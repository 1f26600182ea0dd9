"""Models built from an architecture have exactly the requested shape."""

import pytest
import torch

from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.train.build import build_model

SIZES = {"hidden_size": 32, "layers": 2, "head_size": 16, "feed_forward_size": 24, "context": 64}


def test_experts_are_built_and_routed():
    model = build_model(
        BuildConfig(family="qwen3_moe", experts=4, experts_per_token=2, **SIZES), seed=0
    )
    assert model.config.num_experts == 4
    assert model.config.num_experts_per_tok == 2
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["model.layers.0.mlp.gate.weight"] == (4, 32)
    assert sum("experts" in name for name in shapes) >= 2 * 2
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 264)


def test_the_vocabulary_may_be_larger_than_the_bytes():
    model = build_model(BuildConfig(vocabulary=300, **SIZES), seed=0)
    assert model.get_input_embeddings().weight.shape == (300, 32)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(InputError, match="experts_per_token 5 exceeds experts 4"):
        build_model(
            BuildConfig(family="qwen3_moe", experts=4, experts_per_token=5, **SIZES), seed=0
        )
