"""Models of the families that are served most, tiny, and runs of them with random versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from deltawire.sync import open_publisher, read_safetensors
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.publish.safetensors_files import safetensors_table
from deltawire.wire.run import ModelFile, TensorSpec

VOCABULARY = 500
"""vLLM pads it, to 512."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}


def config_of(family: str):
    """The configuration of a tiny model of ``family``."""
    import transformers as t

    if family == "qwen3":
        return t.Qwen3Config(**COMMON, head_dim=32, intermediate_size=128, tie_word_embeddings=True)
    if family == "llama":
        return t.LlamaConfig(
            **{**COMMON, "hidden_size": 128}, head_dim=32, intermediate_size=192,
            tie_word_embeddings=False,
        )  # fmt: skip
    if family == "qwen3_moe":
        return t.Qwen3MoeConfig(
            **COMMON, **EXPERTS, head_dim=32, intermediate_size=128, moe_intermediate_size=64,
            norm_topk_prob=True, tie_word_embeddings=False,
        )  # fmt: skip
    if family == "mixtral":
        return t.MixtralConfig(
            **{**COMMON, "hidden_size": 128}, head_dim=32, intermediate_size=64,
            num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
            tie_word_embeddings=False,
        )  # fmt: skip
    if family == "olmoe":
        return t.OlmoeConfig(
            **{**COMMON, "hidden_size": 128, "num_key_value_heads": 4}, **EXPERTS,
            intermediate_size=64, tie_word_embeddings=False,
        )  # fmt: skip
    if family == "gpt_oss":
        return t.GptOssConfig(
            **{**COMMON, "hidden_size": 128}, head_dim=32, intermediate_size=64,
            num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
            layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False,
        )  # fmt: skip
    if family == "deepseek_v3":
        return t.DeepseekV3Config(
            **{**COMMON, "hidden_size": 128, "num_key_value_heads": 4, "num_hidden_layers": 3},
            intermediate_size=128, moe_intermediate_size=64, n_routed_experts=8,
            num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
            first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=64,
            qk_rope_head_dim=64, v_head_dim=64, topk_method="noaux_tc", scoring_func="sigmoid",
            tie_word_embeddings=False,
        )  # fmt: skip
    raise AssertionError(family)


FAMILIES = ["qwen3", "llama", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]


def build(family: str, folder: Path, *, seed: int = 0, scale: float = 0.08) -> Path:
    """Write a random model of ``family`` in bf16, as Hugging Face does, with names as released."""
    import transformers as t

    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config_of(family)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def next_bits(tensors: dict[str, np.ndarray], rng: np.random.Generator, share: float = 0.02):
    """Another version of a bf16 model: a share of its weights moved by a few ULPs, exponents of
    ordinary size, signs now and then."""
    changed = {}
    for name, bits in tensors.items():
        flat = bits.reshape(-1).copy()
        chosen = rng.random(flat.size) < share
        if flat.dtype == np.uint16:
            low = rng.integers(0, 64, int(chosen.sum()), dtype=np.uint16)
            flips = rng.integers(0, 2, low.size, dtype=np.uint16) << np.uint16(15)
            flat[chosen] ^= low ^ np.where(rng.random(low.size) < 0.05, flips, 0).astype(np.uint16)
        changed[name] = flat.reshape(bits.shape)
    return changed


LAYERS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "embed_tokens", "lm_head",
)  # fmt: skip
SETTINGS = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 6.0, "rank_pattern": {"o_proj": 8},
    "target_modules": list(LAYERS), "bias": "none", "task_type": "CAUSAL_LM",
}  # fmt: skip
"""An adapter whose scale is no power of two, 1.5, and of o_proj 0.75."""


def draw_adapter(specs, *, seed: int = 0, scale: float = 0.15) -> dict[str, np.ndarray]:
    """Bits of a bf16 adapter of the embedding, the head and every linear layer outside of experts,
    as PEFT names them. A head that is tied to the embedding has one of its own."""
    torch.manual_seed(seed)
    found = {}
    shapes = {spec.name.removesuffix(".weight"): spec.shape for spec in specs}
    shapes.setdefault("lm_head", shapes["model.embed_tokens"])
    for layer, shape in shapes.items():
        last = layer.rpartition(".")[2]
        if last not in LAYERS or ".experts." in layer or len(shape) != 2:
            continue
        rank = SETTINGS["rank_pattern"].get(last, SETTINGS["r"])
        outputs, inputs = reversed(shape) if last == "embed_tokens" else shape
        for factor, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = (torch.randn(size) * scale).bfloat16()
            end = f"embedding_{factor}" if last == "embed_tokens" else f"{factor}.weight"
            found[f"base_model.model.{layer}.lora_{end}"] = (
                drawn.view(torch.int16).numpy().view(np.uint16)
            )
    return found


class Trainer:
    """The publishing side of a test: version N depends only on the seed, and can be written
    as a checkpoint. With ``adapter``, versions after 0 change a LoRA adapter only."""

    def __init__(
        self, bucket, model: Path, *, seed: int = 0, share: float = 0.02, adapter: bool = False,
        **options,
    ):  # fmt: skip
        self.model = model
        self.specs = safetensors_table(model)
        self.tensors = {name: np.array(bits) for name, bits in read_safetensors(model).items()}
        self.trained = set(self.tensors)
        if adapter:
            drawn = draw_adapter(self.specs)
            self.specs = [
                *self.specs, *(TensorSpec(name, bits.shape, "BF16") for name, bits in drawn.items())
            ]  # fmt: skip
            self.tensors |= drawn
            self.trained = set(drawn)
            stored = put_blob(bucket, json.dumps(SETTINGS).encode())
            options["model_files"] = [
                ModelFile(name="adapter_config.json", blob=stored.hash, bytes=stored.bytes)
            ]
        self.rng = np.random.default_rng(seed)
        self.share = share
        self.publisher = open_publisher(
            bucket, self.tensors, specs=self.specs, chunk=4096, **options
        )

    @property
    def version(self) -> int:
        """The version published last."""
        return self.publisher.version

    def publish(self, count: int = 1) -> int:
        """Publish so many random versions; the number of the last."""
        for _ in range(count):
            held = {name: self.tensors[name] for name in self.tensors if name in self.trained}
            self.tensors = {**self.tensors, **next_bits(held, self.rng, self.share)}
            self.publisher.publish(self.tensors)
            self.publisher.flush()
        return self.version

    def write(self, folder: Path) -> Path:
        """The current version as a checkpoint; an adapter in a folder in it, as PEFT writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.model.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                (folder / file.name).write_bytes(file.read_bytes())
        adapter = [spec for spec in self.specs if ".lora_" in spec.name]
        base = [spec for spec in self.specs if ".lora_" not in spec.name]
        self._save(base, folder / "model.safetensors")
        if adapter:
            (folder / "adapter").mkdir(exist_ok=True)
            self._save(adapter, folder / "adapter" / "adapter_model.safetensors")
            (folder / "adapter" / "adapter_config.json").write_text(json.dumps(SETTINGS))
        return folder

    def _save(self, specs, file: Path) -> None:
        dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
        save_file(
            {
                spec.name: torch.from_numpy(
                    self.tensors[spec.name].view(f"i{self.tensors[spec.name].itemsize}")
                ).view(dtypes[spec.dtype])
                for spec in specs
            },
            file,
            metadata={"format": "pt"},
        )

    def close(self) -> None:
        """Stop publishing."""
        self.publisher.close()


def describe(folder: Path) -> str:
    """For messages of tests."""
    return json.loads((folder / "config.json").read_text())["architectures"][0]
