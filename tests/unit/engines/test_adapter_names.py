"""An adapter gets a slot that fits, and what vLLM cannot serve of one is refused by name."""

import pytest

from deltawire.engines.vllm.adapter_names import layer_of, slot_flags
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def spec(name, *shape):
    return TensorSpec(name, shape, "BF16")


BASE = [spec("model.layers.0.self_attn.q_proj.weight", 64, 32)]


def adapter(rank, layer=LAYER):
    return [spec(f"{layer}.lora_A.weight", rank, 32), spec(f"{layer}.lora_B.weight", 64, rank)]


def test_a_run_without_an_adapter_asks_for_no_slot():
    assert slot_flags(BASE) == []


@pytest.mark.parametrize(("rank", "slot"), [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (512, "512")])
def test_the_slot_has_the_least_rank_of_vllm_that_fits(rank, slot):
    other = adapter(1, "base_model.model.model.layers.1.mlp.down_proj")
    flags = slot_flags([*BASE, *adapter(rank), *other])
    assert flags[flags.index("--max-lora-rank") + 1] == slot
    assert flags[flags.index("--lora-target-modules") + 1 :] == ["down_proj", "q_proj"]


def test_a_layer_has_the_name_that_it_has_in_the_base():
    assert layer_of(f"{LAYER}.lora_A.weight") == "model.layers.0.self_attn.q_proj"


EXPERTS = "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_A"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
REFUSED = {
    "experts": (spec(EXPERTS, 8, 4, 32), "does not serve an adapter of experts"),
    "embedding": (spec(EMBEDDING, 4, 100), "does not serve an adapter of an embedding"),
    "head": (spec("base_model.model.lm_head.lora_A.weight", 4, 32), "adapter of the head"),
    "trained copy": (spec("base_model.model.score.weight", 4, 32), "trained whole"),
    "packed": (spec("model.layers.0.mlp.experts.down_proj.codes", 4, 32), "packed weight"),
    "rank": (adapter(513)[0], "rank 513 is above the engine's, 512"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_vllm_does_not_serve_is_refused_by_the_tensors_name(what):
    found, why = REFUSED[what]
    with pytest.raises(InputError, match=why) as caught:
        slot_flags([*BASE, *adapter(4), found])
    assert found.name in str(caught.value)
    assert caught.value.hint
