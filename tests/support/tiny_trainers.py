"""A tiny tied model, a tokenizer and rows for the trainers of TRL, made here and not downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import tqdm
from datasets import Dataset
from transformers import TrainerCallback

import deltawire
from deltawire.config import BuildConfig
from deltawire.train.build import build_model, byte_tokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # It warns of unstable names at import.
# The thread that watches over progress bars would outlive a test.
tqdm.tqdm.monitor_interval = 0

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "logging_steps": 1000,
    "disable_tqdm": True,
    "seed": 1,
}


def tiny_model(seed: int = 3) -> Any:
    return build_model(
        BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=96),
        seed=seed,
    )


def tokenizer() -> Any:
    return byte_tokenizer()


def rows() -> Dataset:
    return Dataset.from_dict({"text": [f"number {n} and {n * n}" for n in range(16)]})


class Recorder(TrainerCallback):
    """Keeps what a checkpoint would hold, in bf16, at the start and after each step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, torch.Tensor]] = {}

    def _keep(self, state: Any, model: Any) -> None:
        self.at[state.global_step] = {n: t.clone() for n, t in deltawire.tensors_of(model).items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(state, kwargs["model"])


def sft(folder: Path, *callbacks: Any, model: Any = None, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    peft_config = settings.pop("peft_config", None)
    options = {"max_steps": 3, "learning_rate": 1e-2, **SETTINGS, **settings}
    return SFTTrainer(
        tiny_model() if model is None else model,
        args=SFTConfig(output_dir=str(folder), **options),
        train_dataset=rows(),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
