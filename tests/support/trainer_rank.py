"""One rank of two, over gloo, publishing its model: of a Hugging Face trainer with replicas, and of
a model sharded with FSDP2, gathered and by rows.

Accelerate shards only on accelerators, so the sharded steps are a loop of this file, which calls
the callback as the trainer does.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_trainers import Recorder, tiny_model, tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerState, TrainingArguments

from deltawire import codec
from deltawire.errors import InputError
from deltawire.trl import Publish


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(number, number + 12)
        return {"input_ids": tokens, "labels": tokens}


def replicas(folder: Path, *callbacks: Any) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        logging_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    Trainer(
        tiny_model(), args=arguments, train_dataset=Rows(), processing_class=tokenizer(),
        callbacks=list(callbacks),
    ).train()  # fmt: skip


def shards(*callbacks: Any) -> None:
    model = tiny_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = TrainerState(global_step=0)
    given = {"model": model, "processing_class": tokenizer()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for one in callbacks:
        one.on_train_begin(None, state, None, **given)
    for step in (1, 2):
        tokens = torch.arange(12)[None] + 12 * step + dist.get_rank()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step
        for one in callbacks:
            one.on_step_end(None, state, None, **given)
    for one in callbacks:
        one.on_train_end(None, state, None, **given)


def digests(recorder: Recorder) -> list[str]:
    return [
        codec.digest_model(
            {name: codec.bits_of(tensor, "BF16") for name, tensor in recorder.at[step].items()}
        ).hex()
        for step in sorted(recorder.at)
    ]


class Keeper(Recorder):
    """A recorder without an end to training."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def main(folder: Path) -> None:
    told = {}
    recorder = Recorder()
    replicas(folder, Publish(str(folder / "replicas")), recorder)
    told["replicas"] = digests(recorder)
    recorder = Keeper()
    rows = str(folder / "rows")
    shards(Publish(str(folder / "gathered")), Publish(rows, sharded=True), recorder)
    told["gathered"] = told["rows"] = digests(recorder)
    shards(Publish(rows, sharded=True, every=2))  # from the first weights again
    refused = ""
    try:
        shards(Publish(rows, sharded=True, dtype="float32"))
    except InputError as error:
        refused = str(error)
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps(told))
    (folder / f"refused-{dist.get_rank()}").write_text(refused)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main(Path(sys.argv[1]))
