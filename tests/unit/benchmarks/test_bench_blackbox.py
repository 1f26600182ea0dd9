"""The passes in bf16 of ``deltawire bench attest`` against torch's own kernels."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.attest import scores
from benchmarks.attest.scores import PASSES, float32_products, in_parts, score


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_rounded_as_torch_s_kernel_rounds_it(bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(576, 1536, bias=bias).bfloat16()
    given = torch.randn(64, 576).bfloat16()
    exact = torch.nn.functional.linear(
        given.double(), layer.weight.double(), layer.bias.double() if bias else None
    ).bfloat16()
    with torch.no_grad():
        slow = layer(given)
        with float32_products(layer):
            fast = layer(given)
        assert torch.equal(layer(given), slow), "the layer computes as before"
    for found in (slow, fast):
        assert (found != exact).float().mean() < 1e-3
    # Without the rounding, or with another one, most elements would differ.
    assert (fast.float() != layer.float()(given.float())).float().mean() > 0.9


def test_the_noise_of_a_pass_is_that_of_torch_s_kernels():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().float().eval()
    tokens = np.random.default_rng(0).integers(0, 512, (16, 33))
    exact = PASSES["exact"](model, tokens)
    fast = np.abs(PASSES["eager"](model, tokens) - exact).mean()
    slow = np.abs(score(model, tokens, 16) - exact).mean()
    assert slow > 0.01
    assert fast == pytest.approx(slow, rel=0.1)


def test_an_interrupted_pass_goes_on_where_it_was_stored(tmp_path):
    tokens, asked = np.arange(40 * 3).reshape(40, 3), []

    def run(part):
        asked.append(len(part))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return part[:, 1:].astype(np.float64)

    path = tmp_path / "eager-0.001.npy"
    with pytest.raises(KeyboardInterrupt):
        in_parts(path, run, tokens)
    assert np.array_equal(in_parts(path, run, tokens), tokens[:, 1:])
    assert asked == [16, 16, 8, 8]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Stored scores of stand-ins for a model and its pass; returns them, and how often it ran."""
    ran = []

    def run(model, tokens):
        ran.append(len(tokens))
        return tokens[:, 1:].astype(np.float64)

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"a")
    monkeypatch.delenv(scores.VLLM, raising=False)
    monkeypatch.setattr(scores, "MODEL", tmp_path)
    monkeypatch.setattr(scores, "PASSES", {"exact": run})
    monkeypatch.setattr(scores, "version", lambda rate: (None, rate))

    def passes():
        del ran[:]
        found = scores.stored_scores(tmp_path / "out", [1e-5])
        assert list(found) == ["0", "1e-05"]
        assert found["1e-05"]["changed"] == 1e-5
        return len(ran)

    return passes


@pytest.mark.parametrize("what", ["model", "kernels", "threads", "text"])
def test_stored_scores_are_those_of_this_model_and_these_kernels(
    counted, tmp_path, monkeypatch, what
):
    assert (counted(), counted()) == (12, 0)
    if what == "model":
        (tmp_path / "model.safetensors").write_bytes(b"b")
    elif what == "kernels":
        monkeypatch.setattr(scores, "arithmetic_of", lambda device: "other kernels")
    elif what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    else:
        monkeypatch.setattr(scores, "__file__", str(tmp_path / "config.json"))
    assert (counted(), counted()) == (12, 0)


def test_scores_of_vllm_are_those_of_its_release(tmp_path):
    python = tmp_path / "python"
    found = set()
    for release in ("0.32.0", "0.33.0"):
        python.write_text(f"#!/bin/sh\necho {release}\n")
        python.chmod(0o700)
        found |= {scores.vllm_key(key, str(python)) for key in ("one", "two", "one")}
    assert len(found) == 4
