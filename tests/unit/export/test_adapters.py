"""LoRA layers: names, what is trained, what is refused, and the model without them."""

import json

import pytest
import torch
from sampled import sampled_groups

from deltawire.config import AdapterConfig, BuildConfig, OptimizerConfig, RunConfig, TrainConfig
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, adapted, adapter_off, wrapped_layers
from deltawire.export.peft_directory import adapter_files
from deltawire.export.source import open_source
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step

LORA = AdapterConfig(kind="lora", rank=4, alpha=8.0)


def filled(model, seed=1):
    """Give the adapter's B values: at the start it is 0, and the adapter says nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture
def lora(tiny):
    return adapted(tiny, LORA, seed=3)


def test_the_base_keeps_its_names_and_the_adapter_has_pefts(tiny):
    before = {spec.name: spec for spec in open_source("bf16", tiny).specs()}
    specs = {spec.name: spec for spec in open_source("bf16", adapted(tiny, LORA, seed=0)).specs()}
    assert {name: specs[name] for name in before} == before
    added = specs.keys() - before.keys()
    assert len(added) == 2 * 2 * 7
    assert specs[f"{PREFIX}model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert all(name.startswith(PREFIX) for name in added)


def test_only_the_adapter_is_trained(lora):
    source = open_source("bf16", lora)
    masters = MasterWeights(lora, TrainConfig(), source=source)
    assert source.trained().keys() == {s.name for s in source.specs() if s.name.startswith(PREFIX)}
    states = [name for name in masters.state() if name != "steps"]
    assert len(states) == 4 * 28, "a master and three states for each tensor of the adapter"
    assert all(".lora_" in name for name in states)
    representable = [torch.equal(p, p.bfloat16().float()) for p in lora.parameters()]
    assert all(representable), "the frozen part is rounded to what is published too"


def test_the_seed_decides_the_adapter(sharp, tiny):
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48)
    first, same, other = (
        open_source("bf16", adapted(build_model(sizes, seed=0), LORA, seed=seed)).tensors()
        for seed in (0, 0, 1)
    )
    name = f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    adapted(tiny, LORA, seed=0)
    assert torch.equal(torch.rand(3), expected), "nobody else's random numbers move"


def test_a_fresh_adapter_changes_nothing(tiny):
    ids = torch.arange(12)[None]
    before = tiny(input_ids=ids).logits
    assert torch.equal(adapted(tiny, LORA, seed=0)(input_ids=ids).logits, before)


def test_without_its_adapter_a_model_is_the_base_to_the_bit(tiny):
    ids = torch.arange(12)[None]
    base = tiny(input_ids=ids).logits.detach()
    model = filled(adapted(tiny, LORA, seed=0))
    with_adapter = model(input_ids=ids).logits
    assert not torch.allclose(with_adapter, base, atol=1e-3)
    with adapter_off(model), torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, base)
    assert torch.equal(model(input_ids=ids).logits, with_adapter)
    with_adapter.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_the_sampler_computes_what_the_trainer_does(lora):
    """Neither merges: the gap is that of any model."""
    masters = MasterWeights(filled(lora), TrainConfig(optimizer=OptimizerConfig()))
    config = RunConfig(name="x", train=TrainConfig())
    masters.steps = 4
    result = train_step(masters, sampled_groups(lora.eval(), 1.0), config)
    assert result.parity.numeric.tokens == result.tokens
    assert abs(result.parity.numeric.k1) < 1e-6
    assert result.parity.numeric.largest_gap < 1e-4


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "lm_head"], "is tied"),
        (["qproj"], "no linear layer 'qproj'"),
        (["proj"], "no linear layer 'proj'"),
    ],
)
def test_targets_that_are_no_layer_are_refused(tiny, targets, said):
    with pytest.raises(InputError, match=said):
        adapted(tiny, AdapterConfig(kind="lora", targets=targets), seed=0)


def experts():
    return build_model(
        BuildConfig(family="qwen3_moe", hidden_size=32, layers=2, head_size=16, experts=4), seed=0
    )


@pytest.mark.parametrize("target", ["gate_proj", "up_proj"])
def test_parts_of_fused_experts_are_refused_by_name(target):
    with pytest.raises(InputError, match="a part of fused experts"):
        adapted(experts(), AdapterConfig(kind="lora", targets=["q_proj", target]), seed=0)


def test_all_linear_leaves_experts_and_routers_as_they_are():
    names = {n for n, p in adapted(experts(), LORA, seed=0).named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"], ["layers.0.self_attn.q_proj"]])
def test_the_written_configuration_names_the_same_layers(tiny, targets):
    """PEFT takes a name for every layer that ends so."""
    config = AdapterConfig(kind="lora", targets=targets)
    model = adapted(tiny, config, seed=0)
    files = adapter_files(model, config, open_source("bf16", model).specs(), base="here")
    written = json.loads(files["adapter_config.json"])["target_modules"]
    layers = wrapped_layers(model)
    if targets == ["layers.0.self_attn.q_proj"]:
        assert written == ["model.layers.0.self_attn.q_proj"] == layers
    else:
        assert {name.rpartition(".")[2] for name in layers} == set(written)
