"""The tensors of a module, as checkpoints name them; published, followed and loaded again."""

import copy

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import deltawire
from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.export.models import load_model, save_model
from deltawire.placement.live import LiveWeights
from deltawire.store import open_bucket
from deltawire.sync import Checkout, load_mirror, read_run
from deltawire.train.build import build_model, byte_tokenizer

SIZES = {"hidden_size": 32, "layers": 2, "head_size": 16, "feed_forward_size": 48, "context": 64}


@pytest.fixture
def model():
    return build_model(BuildConfig(**SIZES), seed=3)


def test_a_tied_model_is_published_under_the_names_of_checkpoints(model, tmp_path):
    """Its `state_dict()` has both names; readers load what `pull` writes, and engines the run."""
    save_model(model, byte_tokenizer(), tmp_path / "model")
    bf16 = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    tied = bf16["lm_head.weight"] = bf16["model.embed_tokens.weight"]
    for tensors in (deltawire.tensors_of(model), bf16):
        url = str(tmp_path / f"run{len(tensors)}")
        publisher = deltawire.open_publisher(url, tensors, directory=tmp_path / "model")
        publisher.close()
        bucket = open_bucket(url)
        run = read_run(bucket)
        names = {spec.name for spec in run.tensors}
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names
        with Checkout(bucket, run, tmp_path / f"out{len(tensors)}") as checkout:
            checkout.bring_to(0)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{len(tensors)}")
        assert torch.equal(loaded.lm_head.weight.to(torch.bfloat16), tied)
        assert (tmp_path / f"out{len(tensors)}" / "tokenizer.json").is_file()


def test_a_run_under_the_other_name_is_served_too(model):
    state = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    state["model.embed_tokens.weight"] = state["lm_head.weight"]
    reordered = {name: state[name] for name in sorted(state)}
    bucket = open_bucket("memory://")
    publisher = deltawire.open_publisher(bucket, reordered)
    assert publisher.run.aliases == {"model.embed_tokens.weight": "lm_head.weight"}
    publisher.close()
    # The run's choice is kept by whoever continues it, in whatever order the tensors come.
    again = deltawire.open_publisher(bucket, state)
    again.close()
    run = read_run(bucket)
    weights = LiveWeights(model, run.tensors, aliases=run.aliases)
    weights.load(load_mirror(bucket, run))
    assert weights.attest() == load_mirror(bucket, run).digest


def test_masters_in_float32_are_rounded_once(model):
    assert {t.dtype for t in deltawire.tensors_of(model).values()} == {torch.bfloat16}
    assert {t.dtype for t in deltawire.tensors_of(model, None).values()} == {torch.float32}
    with pytest.raises(InputError, match="no dtype"):
        deltawire.tensors_of(model, "bf17")


def test_experts_have_the_names_of_checkpoints(tmp_path):
    sizes = BuildConfig(family="qwen3_moe", experts=4, **SIZES)
    model = build_model(sizes, seed=1)
    tensors = deltawire.tensors_of(model)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in tensors
    save_model(model, byte_tokenizer(), tmp_path / "model")
    publisher = deltawire.open_publisher(
        str(tmp_path / "run"), tensors, directory=tmp_path / "model"
    )
    publisher.close()
    with Checkout(publisher.bucket, publisher.run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
    loaded = load_model(tmp_path / "out")
    rounded = {name: p.to(torch.bfloat16).float() for name, p in model.named_parameters()}
    assert all(torch.equal(p, rounded[name]) for name, p in loaded.named_parameters())


def test_an_adapter_is_added_to_a_copy_of_its_base(model):
    plain = deltawire.tensors_of(model, None)
    base = copy.deepcopy(model.state_dict())
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=8)
    )
    same = deltawire.tensors_of(wrapped, None)
    assert same.keys() == plain.keys()
    assert all(torch.equal(same[name], plain[name]) for name in plain)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    found = deltawire.tensors_of(wrapped, None)
    moved = {name for name in plain if not torch.equal(found[name], plain[name])}
    assert moved == {name for name in plain if "q_proj" in name or "down_proj" in name}
    merged = copy.deepcopy(wrapped).merge_and_unload().state_dict()
    for name in moved:
        torch.testing.assert_close(found[name], merged[name])
    inside = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in wrapped.get_base_model().state_dict().items()
        if ".lora_" not in name
    }
    assert all(torch.equal(inside[name], base[name]) for name in base), "the base has changed"


def test_what_no_engine_could_load_is_refused_with_the_reason(model, tmp_path):
    url = str(tmp_path / "run")
    with pytest.raises(InputError, match="is a module"):
        deltawire.open_publisher(url, model)
    with pytest.raises(InputError, match="is a list"):
        deltawire.open_publisher(url, [1])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(InputError, match="PEFT"):
        deltawire.open_publisher(url, dict(wrapped.named_parameters()))
    with pytest.raises(InputError, match=r"config\.json"):
        deltawire.open_publisher(url, {"a": np.zeros(3, np.float32)}, directory=tmp_path)


def test_another_models_run_names_the_first_difference(tmp_path):
    url = str(tmp_path / "run")
    deltawire.open_publisher(url, {"b": np.zeros(3, np.float32)}).close()
    for other, text in (
        ({"b": np.zeros(4, np.float32)}, r"'b' is F32 \[3\], this one's is F32 \[4\]"),
        ({"b": np.zeros(3, np.float32), "a": np.zeros(1, np.float32)}, "no tensor 'a'"),
        ({"c": np.zeros(3, np.float32)}, "'b' is missing"),
    ):
        with pytest.raises(InputError, match=text):
            deltawire.open_publisher(url, other)


def test_trained_copies_and_adapters_of_embeddings_are_published(model):
    """PEFT keeps the original of a module that it trains as a copy: readers want the copy."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    plain = deltawire.tensors_of(model, None)
    settings = peft.LoraConfig(r=2, target_modules=["embed_tokens"], modules_to_save=["norm"])
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_embedding" in name or ("modules_to_save" in name and name.endswith("weight")):
                parameter.normal_()
    found = deltawire.tensors_of(wrapped, None)
    assert found.keys() == plain.keys()
    moved = {name for name in plain if not torch.equal(found[name], plain[name])}
    norms = {name for name in plain if "norm" in name}  # PEFT takes the last letters of names.
    assert moved == {"model.embed_tokens.weight"} | norms
    copied = wrapped.get_base_model().model.norm.modules_to_save["default"].weight
    assert torch.equal(found["model.norm.weight"], copied)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["embed_tokens"]},
     {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}],
)  # fmt: skip
def test_an_adapter_of_one_use_of_a_tied_weight_is_refused(model, settings):
    """The model computes its head without it; readers would tie the sum to the head."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
    with pytest.raises(InputError, match="is tied to"):
        deltawire.tensors_of(wrapped)


def test_a_merged_adapter_is_added_once(model):
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    apart = deltawire.tensors_of(wrapped, None)
    wrapped.merge_adapter()
    merged = deltawire.tensors_of(wrapped, None)
    for name in apart:
        torch.testing.assert_close(merged[name], apart[name])


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_more_than_a_sum_are_refused(model, settings):
    for layer in model.model.layers:  # A bias of an adapter needs one in its layer.
        layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(()).expand(32).clone())
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], **settings)
    )
    with pytest.raises(InputError, match=r"q_proj has an adapter that cannot be added"):
        deltawire.tensors_of(wrapped)


def test_a_quantized_base_is_refused(model):
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    layer = wrapped.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    codes = torch.zeros(layer.weight.shape, dtype=torch.uint8)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(InputError, match="is quantized"):
        deltawire.tensors_of(wrapped)


def test_a_rank_that_only_takes_part_keeps_nothing(model):
    assert deltawire.tensors_of(model, keep=False) == {}
