"""The logits of a dump's long rows: made in parts, and refused by size before a model runs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from deltawire.errors import InputError
from deltawire.launch import dump as command
from deltawire.parity import dump as judging
from deltawire.parity.dump import DumpModel, examine
from deltawire.parity.dump_rows import DumpRow

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def family(name):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    # Gemma caps logits after the head; so low a cap changes them.
    config = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.05)
    return Gemma2ForCausalLM(config).eval()


def row(count=40, before=3):
    ids = np.random.default_rng(0).integers(0, 60, before + count).tolist()
    tokens, held = ids[before:], np.full(count, -4.1)
    return DumpRow(7, "row", ids[:before], tokens, held, np.ones(count, np.bool_), None)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_row_s_logits_are_made_in_parts_after_one_pass(name, monkeypatch):
    monkeypatch.setattr(judging, "TOGETHER", 7)
    model, one, ran, widths = family(name), row(), [], []
    ids = torch.tensor([[*one.prompt, *one.tokens[:-1]]])
    with torch.no_grad():
        whole = model(input_ids=ids).logits[0, 2:].numpy()
    model.get_decoder().layers[0].register_forward_hook(lambda *_: ran.append(1))
    model.lm_head.register_forward_hook(lambda *given: widths.append(given[2].shape[1]))
    scored = command.scoring(SimpleNamespace(model=model, tokenizer=None), "m", torch.device("cpu"))
    logits = scored.logits(one.prompt, one.tokens)
    parts = [logits[slice(at, at + 7)] for at in range(0, 40, 7)]
    assert np.allclose(np.concatenate(parts), whole, atol=1e-6)
    assert examine([one], scored).tokens == 40
    assert len(ran) == 2, "once for each row"
    assert max(widths) == 7
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape[1] == ids.shape[1], "the model is as it was"


def test_a_model_that_cannot_skip_logits_gives_all():
    class Old(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = family("llama")

        def forward(self, input_ids):
            return self.inner(input_ids=input_ids)

    ids = torch.tensor([row().prompt])
    assert command.read_row(Old(), ids, 1).shape == (2, 60)


def test_rows_beyond_memory_are_refused_before_the_model_runs():
    model = DumpModel("m", lambda *_: 1 / 0, 60, room=42)
    with pytest.raises(InputError, match="row 7 has 43 tokens; memory is enough for 42"):
        examine([row()], model)
    with pytest.raises(ZeroDivisionError):
        examine([row(39)], model)


def test_a_long_row_of_a_large_vocabulary_needs_no_logits_of_all_tokens():
    config = SimpleNamespace(vocab_size=151_936, hidden_size=1024, intermediate_size=3072)
    assert command.most_tokens(config, 16 << 30, in_parts=True) > 131_072
    assert command.most_tokens(config, 16 << 30, in_parts=False) < 16_384
    assert command.most_tokens(config, 1 << 20, in_parts=True) == 0
    # Less than the logits of 128 tokens take is enough for a short row.
    assert 12 <= command.most_tokens(config, 400 << 20, in_parts=True) < 128
