"""Runs one process of a run on a real model, and states the most memory that it held.

``python -m benchmarks.training.process_memory CASE FOLDER`` is such a process: it does what a
trainer, a worker or an evaluator of that run does, on random tokens, and prints what it held after
each step. The run's bucket is in FOLDER: a trainer makes it, and samplers read what it published.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from deltawire.config import RunConfig, run_config
from deltawire.runtime.memory import held_bytes, release_heap

if TYPE_CHECKING:
    from deltawire.engines.transformers.engine import TransformersEngine


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One process to measure: ``tokens`` is ``train.max_tokens_per_batch``."""

    model: str
    role: Literal["trainer", "worker", "evaluator"] = "trainer"
    mode: str = "full"
    tokens: int = 2048
    sequences: int = 16
    length: int = 128
    """Tokens of each sequence: those of its prompt, the others drawn."""
    prompt: int = 32
    steps: int = 2
    checkpointing: str = "none"
    slots: int = 32
    ranks: int = 1

    @property
    def name(self) -> str:
        """The case in words."""
        if self.role == "trainer":
            of = f" of {self.ranks} ranks" if self.ranks > 1 else ""
            return f"trainer {self.mode} {self.tokens}{of}"
        return f"{self.role} {self.mode} {self.slots} x {self.length}"

    def config(self) -> RunConfig:
        """The run that the process belongs to."""
        values: dict[str, Any] = {
            "name": "memory",
            "threads": 1,
            "model": {"path": self.model},
            "rollout": {
                "group_size": 8,
                "max_tokens": self.length - self.prompt,
                "context": self.length,
                "slots": self.slots,
            },
            "train": {
                "max_tokens_per_batch": self.tokens,
                "groups_per_step": max(1, self.sequences // 8),
                "activation_checkpointing": self.checkpointing,
                "optimizer": {"learning_rate": 1e-5},
                "schedule": {"warmup_steps": 0},
                "versions": 100,
                "checkpoint_every": 1000,
                "ranks": self.ranks,
            },
            "evaluate": {"slots": self.slots},
        }
        if self.mode == "lora":
            values["train"]["adapter"] = {"kind": "lora", "rank": 16}
        return run_config(values, url="")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a process held: at its peak, when it was ready, and after each step."""

    peak: int
    ready: int
    steps: list[int]


def groups_of(case: Case, step: int) -> list[Any]:
    """Returns groups of random tokens whose completions end anywhere in their last quarter."""
    from deltawire.wire.rollouts import Group, Trajectory

    rng = np.random.default_rng(step)
    most = case.length - case.prompt

    def trajectory(place: int) -> Trajectory:
        count = int(rng.integers(most * 3 // 4, most + 1))
        return Trajectory(
            rng.integers(0, 40_000, count).astype(np.int32),
            np.full(count, -9.0, np.float32),
            np.zeros(count, np.int32),
            np.ones(count, np.uint8),
            float(place % 2),
            "stop",
        )

    return [
        Group("w0", "n", f"t{n}", 1.0, rng.integers(0, 40_000, case.prompt).astype(np.int32),
              [trajectory(place) for place in range(8)])
        for n in range(max(1, case.sequences // 8))
    ]  # fmt: skip


def run_trainer(case: Case, folder: str) -> Held:
    """Starts the run, then trains and publishes a few versions."""
    from deltawire.rl.trainer.bootstrap import start_run
    from deltawire.rl.trainer.group_steps import GroupSteps
    from deltawire.rl.trainer.model import open_policy_model
    from deltawire.rl.trainer.orders import Start
    from deltawire.rl.trainer.rank import Rank
    from deltawire.store import open_bucket
    from deltawire.sync import read_run
    from deltawire.train.parallel.ranks import broadcast, join_ranks, world_of
    from deltawire.train.step import train_step

    bucket, config = open_bucket(folder, create=True), case.config()
    join_ranks()
    if not world_of()[0]:
        start_run(bucket, config, Path(case.model))
    if case.ranks > 1:
        broadcast()  # The others wait until version 0 exists.
    run = read_run(bucket)
    gc.collect()  # As `deltawire.rl.trainer.entry.run_trainer` does.
    release_heap()
    model = open_policy_model(bucket, run, config)
    steps = GroupSteps(bucket, run, config)
    start = Start(run=run.id, config=config, version=0, epoch=1, session="s" * 16, public_key="")
    rank = Rank(bucket, run, start, model, steps)
    del model
    ready, held = held_bytes(peak=False), []
    for step in range(case.steps):
        train_step(rank.masters, groups_of(case, step), config)
        release_heap()
        rank.publish(step + 1)
        held.append(held_bytes(peak=False))
    rank.publisher.flush()
    peak = held_bytes()
    rank.close()
    return Held(peak=peak, ready=ready, steps=held)


def run_sampler(case: Case, folder: str) -> Held:
    """Opens the run at version 0, fills all slots, swaps to each newer version, and samples again.

    A worker's prompts are shared by a group; of an evaluator's each is another one.
    """
    from deltawire.engines.base import Sampling
    from deltawire.rl.rollout.policy_server import follow, serve_policy, swap
    from deltawire.runtime.process import Process, open_run
    from deltawire.store import open_bucket

    process = Process(open_bucket(folder), case.role, case.role, supervised=False)
    run, _ = open_run(process.bucket)
    served, steps = serve_policy(
        process, run, case.config(), engine="transformers", seed=0, slots=case.slots, at=0
    )
    engine, held = cast("TransformersEngine", served.engine), []
    follower = follow(steps, served)
    ready = held_bytes(peak=False)
    group = 8 if case.role == "worker" else 1
    follower.start()
    for step in range(case.steps + 1):
        rng = np.random.default_rng(step)
        for _ in range(case.slots // group):
            prompt = rng.integers(0, 40_000, case.prompt).tolist()
            for _ in range(group):
                engine.submit(prompt, Sampling(case.length - case.prompt), lambda _: None)
        while engine.active:
            engine.step()
        held.append(held_bytes(peak=False))
        while step < case.steps and served.live.version == step:
            swap(served, follower, process)
            time.sleep(0.01)
    follower.close()
    return Held(peak=held_bytes(), ready=ready, steps=held)


def main() -> None:
    """Runs the case of the first argument in the folder of the second."""
    case = msgspec.json.decode(sys.argv[1], type=Case)
    run = run_trainer if case.role == "trainer" else run_sampler
    found = run(case, sys.argv[2])
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
