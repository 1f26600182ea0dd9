"""``trl_blocked_ratio`` and ``trl_equal``: `deltawire.trl.Publish` in TRL's SFTTrainer.

The floor is measured in the same steps: the trainer's float32 parameters cast to new bf16 tensors,
and these copied into memory that was touched before, which is the least that any publisher which
lets the trainer go on must do.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import deltawire
from benchmarks.training.keys import Measured, Options
from deltawire import codec
from deltawire.config import BuildConfig
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.trl.callback import Publish

SIZES: dict[str, Any] = {
    "hidden_size": 512, "layers": 8, "head_size": 64, "feed_forward_size": 1536, "context": 128
}  # fmt: skip
"""About 29M parameters, 117 MB in float32."""
WARM_UP = 2
"""Steps whose pauses are not counted: the first touch of memory."""


class _Timed(Publish):
    """`Publish`, with the pause of each step, the version before being committed already."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.pauses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(1.0)  # A step of a real model takes longer than the commit of the one before.
        started = time.perf_counter()
        super().on_step_end(args, state, control, **kwargs)
        self.pauses.append(time.perf_counter() - started)


class _Floor(TrainerCallback):
    """Times the cast and the copy, and keeps the digest of what each version must hold."""

    def __init__(self) -> None:
        self.floors: list[float] = []
        self.digests: list[str] = []
        self._target: list[Any] = []

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._keep(kwargs["model"])

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        time.sleep(1.0)
        started = time.perf_counter()
        cast = [p.detach().to(torch.bfloat16) for p in model.parameters()]
        bits = [tensor.view(torch.int16).numpy() for tensor in cast]
        spent = time.perf_counter() - started
        if not self._target:
            self._target = [np.ones_like(one) for one in bits]
        started = time.perf_counter()
        for target, source in zip(self._target, bits, strict=True):
            np.copyto(target, source)
        self.floors.append(spent + time.perf_counter() - started)
        self._keep(model)

    def _keep(self, model: Any) -> None:
        tensors = deltawire.tensors_of(model)
        bits = {name: codec.bits_of(tensor, "BF16") for name, tensor in tensors.items()}
        self.digests.append(codec.digest_model(bits).hex())


def measure(options: Options) -> Measured:
    """Trains in full and with a LoRA; compares every version, and the pauses of the first."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # On shared cores, threads that wait for each other vary tenfold.
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        place = Path(folder)
        timed = _Timed(str(place / "full"))
        floor = _Floor()
        _trainer(place, timed, floor, steps=WARM_UP + options.repeats, seed=options.seed).train()
        equal = _held(place / "full") == floor.digests
        lora_equal, base_kept = _lora(place, options)
    ratios = [a / b for a, b in zip(timed.pauses, floor.floors, strict=True)][WARM_UP:]
    details = {
        "pause_s": median(timed.pauses[WARM_UP:]),
        "floor_s": median(floor.floors[WARM_UP:]),
        "ratios": ratios,
        "ratio_of_minima": min(timed.pauses[WARM_UP:]) / min(floor.floors[WARM_UP:]),
        "versions": len(floor.digests),
        "full_equal": equal,
        "lora_equal": lora_equal,
        "lora_base_kept": base_kept,
    }
    values = {
        "trl_blocked_ratio": round(median(ratios), 3),
        "trl_equal": equal and lora_equal and base_kept,
    }
    return Measured(values, details)


def _lora(place: Path, options: Options) -> tuple[bool, bool]:
    """Trains an adapter, and checks that versions hold base and adapter, the base with its bits."""
    from peft import LoraConfig

    recorder = _Floor()
    config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"])
    publish = Publish(str(place / "lora"))
    trainer = _trainer(place, publish, recorder, steps=3, seed=options.seed, peft_config=config)
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    kept = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return _held(place / "lora") == recorder.digests, kept


def _trainer(place: Path, *callbacks: Any, steps: int, seed: int, **options: Any) -> Any:
    settings = SFTConfig(
        output_dir=str(place / "out"),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    text = [f"number {n} and its square {n * n}" for n in range(64)]
    return SFTTrainer(
        build_model(BuildConfig(**SIZES), seed=seed),
        args=settings,
        train_dataset=Dataset.from_dict({"text": text}),
        processing_class=byte_tokenizer(),
        callbacks=list(callbacks),
        **options,
    )


def _held(folder: Path) -> list[str]:
    """Loads every version again; returns the digests of what was loaded."""
    bucket = open_bucket(str(folder))
    run = read_run(bucket)
    newest = newest_version(bucket)
    assert newest is not None
    mirrors = (load_mirror(bucket, run, at=version) for version in range(newest + 1))
    return [codec.digest_model(one.tensors).hex() for one in mirrors]
