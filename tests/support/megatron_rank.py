"""A tensor-parallel rank of Megatron on a CPU, whose weights Megatron Bridge names and gathers.

The bridge and what it calls are Megatron's own code. The modules hold parameters with Megatron's
names and shapes and compute nothing. Replaced are ``transformer_engine``, which needs accelerators
to be imported, and the number of the current accelerator. Prints what differs from the checkpoint:
first nothing, then the tensor of which rank 0 holds another element.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python megatron_rank.py CHECKPOINT
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from pathlib import Path

import megatron.core  # noqa: F401 - it looks for transformer_engine itself
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from deltawire.attest import digests

HIDDEN, INNER, HEADS, GROUPS, WORDS, LAYERS = 32, 48, 4, 2, 64, 2


class Pretended(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``transformer_engine`` as modules that have every name."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def missing(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name[0].islower():
                return self.create_module(types.SimpleNamespace(name=name))
            return type(name, (object,), {})

        module.__getattr__ = missing
        return module

    def exec_module(self, module):
        pass


def named_module(kind, config, **shapes):
    """A module of a class of this name, by which the bridge tells how it is divided."""
    module = type(kind, (nn.Module,), {})()
    module.config = config
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    return module


def build(ranks):
    """The model on each of so many ranks."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=INNER, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=HIDDEN // HEADS, tensor_model_parallel_size=ranks,
        gated_linear_unit=True, add_qkv_bias=True, add_bias_linear=False, normalization="RMSNorm",
        params_dtype=torch.bfloat16, bf16=True,
    )  # fmt: skip
    config.share_embeddings_and_output_weights, config.vocab_size = False, WORDS
    fused = "TELayerNormColumnParallelLinear"
    attended = HIDDEN + 2 * GROUPS * (HIDDEN // HEADS)

    def layer():
        found = nn.Module()
        found.self_attention, found.mlp = nn.Module(), nn.Module()
        rows = attended // ranks
        found.self_attention.linear_qkv = named_module(
            fused, config, weight=(rows, HIDDEN), bias=(rows,), layer_norm_weight=(HIDDEN,)
        )
        found.self_attention.linear_proj = named_module(
            "TERowParallelLinear", config, weight=(HIDDEN, HIDDEN // ranks)
        )
        found.mlp.linear_fc1 = named_module(
            fused, config, weight=(2 * INNER // ranks, HIDDEN), layer_norm_weight=(HIDDEN,)
        )
        found.mlp.linear_fc2 = named_module(
            "TERowParallelLinear", config, weight=(HIDDEN, INNER // ranks)
        )
        return found

    class Model(GPTModel):
        def __init__(self):
            nn.Module.__init__(self)
            self.config, self.share_embeddings_and_output_weights = config, False
            words = {"weight": (WORDS // ranks, HIDDEN)}
            self.embedding, self.decoder = nn.Module(), nn.Module()
            self.embedding.word_embeddings = named_module("VocabParallelEmbedding", config, **words)
            self.decoder.layers = nn.ModuleList([layer() for _ in range(LAYERS)])
            self.decoder.final_layernorm = named_module("RMSNorm", config, weight=(HIDDEN,))
            self.output_layer = named_module("ColumnParallelLinear", config, **words)

    return Model()


def main(checkpoint):
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"
    sys.meta_path.insert(0, Pretended())
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    model = build(ranks)
    bridge.load_hf_weights([model])
    whole = load_file(Path(checkpoint) / "model.safetensors")
    with torch.no_grad():
        # gloo scatters parts that are not contiguous wrongly, where accelerators' libraries do not.
        for number, layer in enumerate(model.decoder.layers):
            place = f"model.layers.{number}"
            for module, name in (
                (layer.self_attention.linear_proj, f"{place}.self_attn.o_proj.weight"),
                (layer.mlp.linear_fc2, f"{place}.mlp.down_proj.weight"),
            ):
                module.weight.copy_(whole[name].chunk(ranks, 1)[rank])
    wanted = digests(checkpoint).by_name

    def differing():
        found = digests([model], bridge=bridge)
        assert found.by_name.keys() == wanted.keys()
        assert not found.copies_disagree
        return [name for name, one in found.by_name.items() if one != wanted[name]]

    sys.stdout.write(f"first {differing()}\n")
    if rank == 0:
        with torch.no_grad():
            model.decoder.layers[1].mlp.linear_fc2.weight[0, 0] += 1
    sys.stdout.write(f"then {differing()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
