"""A training that ends in the middle, by an exception or a signal: ``URL WAY``, one rank or more.

With TRL if it is one process; under torchrun a loop that calls the callback as the trainer does, on
rows of a model that FSDP2 has sharded.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny_trainers import sft, tiny_model, tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback, TrainerState

from deltawire.trl import Publish

STEPS = 2


def end(way: str) -> None:
    if way == "error":
        raise ValueError("the program's own")
    if way == "exit":
        sys.exit(3)
    number = signal.SIGINT if way == "interrupted" else signal.SIGTERM
    os.kill(os.getpid(), number)


class End(TrainerCallback):
    def __init__(self, way: str) -> None:
        self.way = way

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            end(self.way)


def ranks(url: str, way: str) -> None:
    dist.init_process_group("gloo")
    model = tiny_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = TrainerState(global_step=0)
    publish = Publish(url, sharded=True)
    given = {"model": model, "processing_class": tokenizer()}
    publish.on_train_begin(None, state, None, **given)
    for step in range(1, STEPS + 1):
        state.global_step = step
        publish.on_step_end(None, state, None, **given)
    end(way)


if __name__ == "__main__":
    url, way = sys.argv[1:]
    if "WORLD_SIZE" in os.environ:
        ranks(url, way)
    else:
        folder = Path(tempfile.mkdtemp(prefix="deltawire-tests-"))
        sft(folder, Publish(url), End(way), max_steps=5).train()
