"""Modules of seven families, fifty random versions each, patched by their checkpoints' names."""

import numpy as np
import pytest
import torch
import transformers
from library_loader import checkpoint_table, live_tensors, module_loader
from loaders import same_bits
from versions import checkpoint, first_version, next_version

from deltawire.errors import InputError
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import probe

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
FAMILIES = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        **EXPERTS,
    },
}


def build(family, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def bits_of(model):
    return {
        name: tensor.detach().contiguous().view(torch.uint8).clone()
        for name, tensor in live_tensors(model).items()
    }


@pytest.mark.parametrize(("serving", "versions"), [(torch.bfloat16, 50), (torch.float32, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_versions_equal_loading_each_afresh(family, serving, versions):
    model, fresh = build(family, serving), build(family, serving)
    specs = checkpoint_table(model)
    if serving == torch.float32:
        specs = checkpoint_table(model, "BF16")
    before = bits_of(model)
    placement = probe(module_loader(model), specs, live_tensors(model))
    assert same_bits(before, bits_of(model))
    assert not placement.unplaced
    buffers = {name for name, _ in model.named_buffers()}
    assert placement.uncovered.keys() <= buffers
    weights = PlacedWeights(placement, live_tensors(model))
    rng = np.random.default_rng(1)
    mirror = first_version(specs, rng)
    module_loader(model)(checkpoint(mirror, specs))
    weights.adopt(mirror)
    assert weights.share == mirror.digest
    for _ in range(versions):
        newer, patches = next_version(mirror, specs, rng, density=0.02)
        weights.swap(weights.prepare(patches, mirror, newer.version, digest=newer.digest))
        mirror = newer
    assert weights.attest() == mirror.digest
    module_loader(fresh)(checkpoint(mirror, specs))
    assert same_bits(bits_of(model), bits_of(fresh))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_go_through_the_loader_unchanged(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    specs = {spec.name: spec.shape for spec in checkpoint_table(model)}
    assert specs == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert all(torch.equal(saved[n], t) for n, t in checkpoint_tensors(model).items())
    other = build(family)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.fill_(7)
    module_loader(other)(saved.items())
    assert same_bits(bits_of(model), bits_of(other))


def test_tensors_without_a_place_are_refused():
    model = build("Llama")
    with pytest.raises(InputError, match=r"no tensor model\.nowhere"):
        module_loader(model)([("model.nowhere", torch.zeros(2))])
    with pytest.raises(InputError, match=r"norm.weight is \(3,\), the module's is \(16,\)"):
        module_loader(model)([("model.norm.weight", torch.zeros(3))])
