"""An adapter gets a slot that fits, and what vLLM cannot serve of one is refused by name."""

import pytest

from deltawire.engines.vllm.adapter_names import layer_of, slot_flags, vocabulary_of
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


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
    assert layer_of(f"{EMBEDDING}.lora_embedding_B") == "model.embed_tokens"


def embedding(rank, tokens):
    return [
        spec(f"{EMBEDDING}.lora_embedding_A", rank, tokens),
        spec(f"{EMBEDDING}.lora_embedding_B", 32, rank),
    ]


def head(rank, tokens):
    return [
        spec("base_model.model.lm_head.lora_A.weight", rank, 32),
        spec("base_model.model.lm_head.lora_B.weight", tokens, rank),
    ]


def test_an_embedding_and_a_head_get_slots_of_their_ranks():
    flags = slot_flags([*BASE, *embedding(2, 500), *head(9, 500)])
    assert flags[flags.index("--max-lora-rank") + 1] == "16"
    assert flags[flags.index("--lora-target-modules") + 1 :] == ["embed_tokens", "lm_head"]
    flags = slot_flags([*BASE, *embedding(12, 500)])
    assert flags[flags.index("--max-lora-rank") + 1] == "16"


def test_factors_of_a_vocabulary_are_known():
    assert [vocabulary_of(one) for one in embedding(2, 500)] == [500, None]
    assert [vocabulary_of(one) for one in head(2, 500)] == [None, 500]
    assert [vocabulary_of(one) for one in adapter(2)] == [None, None]


EXPERTS = "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_A"
REFUSED = {
    "experts": (spec(EXPERTS, 8, 4, 32), "does not serve an adapter of experts"),
    "absorbed": (
        spec(f"{LAYER.replace('q_proj', 'kv_b_proj')}.lora_A.weight", 4, 32),
        "multiplies kv_b_proj into other weights",
    ),
    "head": (head(4, 258_049)[1], "of at most 258048 tokens, not 258049"),
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
