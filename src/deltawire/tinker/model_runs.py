"""The runs of a server's models: their configuration, and their start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltawire.config import AdapterConfig, ModelConfig, RunConfig, TrainConfig
from deltawire.errors import InputError
from deltawire.store import Bucket
from deltawire.sync import newest_version
from deltawire.tinker.requests import LoraConfig
from deltawire.tinker.state import ModelRecord
from deltawire.train.client.session import new_run

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """State that all models of a server share. ``directory`` is the base model; every
    ``checkpoint_every`` optimizer steps the state is stored, so that a restart repeats fewer.
    ``ranks`` processes compute for a model: one is the server itself, several are started for
    each. ``frozen_head`` leaves the unembedding layer frozen, whatever a client asks for.
    ``stable_reinforce`` is the loss that takes the place of the one with that name."""

    directory: Path
    checkpoint_every: int = 16
    ranks: int = 1
    frozen_head: bool = False
    stable_reinforce: str = ""


def config_of(record: ModelRecord, options: ModelOptions) -> RunConfig:
    """Returns the configuration of a model's run."""
    adapter, seed = AdapterConfig(), 0
    if record.lora is not None:
        targets = lora_targets(options, record.lora)
        adapter = AdapterConfig(kind="lora", rank=record.lora.rank, targets=targets)
        seed = (record.lora.seed or 0) % (1 << 31)
    base = RunConfig(name="tinker", model=ModelConfig(path=str(options.directory)), seed=seed)
    train = TrainConfig(adapter=adapter, ranks=options.ranks)
    return msgspec.structs.replace(base, train=train)


def lora_targets(options: ModelOptions, lora: LoraConfig) -> list[str]:
    """Returns the last names of the linear layers that an adapter wraps, and the head's name.

    Raises `InputError` if nothing is left to train, and for a head that is tied to the embedding.
    """
    from deltawire.export.adapter import linear_targets
    from deltawire.export.models import empty_model

    model = empty_model(options.directory)
    lasts = {one.rpartition(".")[2] for one in linear_targets(model, ["all-linear"])}
    chosen = {one for one in lasts if (lora.train_attn if one in _ATTENTION else lora.train_mlp)}
    if lora.train_unembed and not options.frozen_head:
        head = model.get_output_embeddings()
        if head is None or head.weight is model.get_input_embeddings().weight:
            raise InputError(
                "this model ties its unembedding layer to its embedding, so that layer can have no "
                "adapter: merging it would change the embedding too",
                hint="set train_unembed=False; or start the server with --parameters full, or with "
                "--frozen-head, which leaves that layer frozen",
            )
        chosen |= {name for name, module in model.named_modules() if module is head}
    if not chosen:
        raise InputError(
            "this LoRA adapter has no layer to train",
            hint="set train_attn, train_mlp or train_unembed",
        )
    return sorted(chosen)


def start_run(bucket: Bucket, record: ModelRecord, options: ModelOptions) -> None:
    """Starts a model's run, if there is none in the bucket."""
    if newest_version(bucket) is None:
        new_run(bucket, options.directory, config_of(record, options))
