"""A head with an adapter, or a trained copy of it, in chunks: values and gradients."""

import pytest
import torch
import transformers

from deltawire.config import AdapterConfig
from deltawire.export.adapter import adapted, adapter_off
from deltawire.train.head import head_of, head_terms

IDS = torch.arange(12)[None] % 9


def model_with(**settings):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=40,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    made = adapted(model, AdapterConfig(kind="lora", rank=3, alpha=5.0, **settings), seed=0)
    for name, parameter in made.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            parameter.data.normal_(0, 0.3)
    return made.eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["lm_head", "embed_tokens"]},
        {"targets": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_chunks_give_the_terms_of_the_whole_head(settings):
    model = model_with(**settings)
    targets = torch.arange(12) % 40
    logits = model(input_ids=IDS).logits[0]
    wanted = torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 1, 12)
    (wanted * weights).sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {name: one.grad.clone() for name, one in trained.items()}
    model.zero_grad()

    hidden = model.model(input_ids=IDS).last_hidden_state[0]
    head = head_of(model)
    terms = head_terms(
        hidden,
        head.linear.weight,
        targets,
        bias_V=head.linear.bias,
        adapter=head.adapter(hidden),
        transform=head.transform,
        chunk=5,
    )
    (terms.logprobs * weights).sum().backward()
    torch.testing.assert_close(terms.logprobs, wanted)
    assert any("lm_head" in name for name in trained)
    for name, one in trained.items():
        torch.testing.assert_close(one.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
        assert bool(one.grad.any()), name


def test_without_its_adapter_the_head_is_the_bases():
    model = model_with(targets=["lm_head"])
    assert head_of(model).lora is model.lm_head
    with adapter_off(model):
        head = head_of(model)
        assert head.lora is None
        assert head.linear is model.lm_head.base_layer
    copied = model_with(targets=["q_proj"], modules_to_save=["lm_head"])
    assert head_of(copied).linear is copied.lm_head.modules_to_save["default"]
    with adapter_off(copied):
        assert head_of(copied).linear is copied.lm_head.original_module
