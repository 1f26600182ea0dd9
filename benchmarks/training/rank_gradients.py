"""How far the gradient of two ranks is from that of one, over the whole model.

A dense model and a mixture of experts, whose routes are replayed, take steps on the same groups in
float32, on one process and on two over gloo. The value is the larger relative L2 distance of the
first step's gradients; the details have the largest difference of a loss over ten steps.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from benchmarks.ports import free_port
from benchmarks.training.keys import Measured, Options
from benchmarks.training.seeded_groups import Routing, uneven_groups
from deltawire.config import RunConfig, parse_config
from deltawire.rl.trainer.resume import seed_step
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel.ranks import join_ranks
from deltawire.train.rank_agent import rank_environment
from deltawire.train.step import train_step
from deltawire.wire.rollouts import Group

STEPS, LAYERS, EXPERTS, CHOSEN = 10, 2, 8, 2
Gradients = dict[str, NDArray[np.float32]]


def config_of(family: str) -> RunConfig:
    """The model of a family, and AdamW."""
    build = {
        "family": family, "hidden_size": 64, "layers": LAYERS, "head_size": 16,
        "feed_forward_size": 96, "experts": EXPERTS, "experts_per_token": CHOSEN,
    }  # fmt: skip
    return parse_config(
        {
            "name": "ranks",
            "model": {"build": build},
            "parity": {"routes": "replay" if family == "qwen3_moe" else "off"},
            "train": {
                "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 0},
                "max_tokens_per_batch": 64,
            },
        },
        source="benchmark",
    )  # fmt: skip


def groups_of(step: int, family: str, seed: int) -> list[Group]:
    """Groups of several lengths, with the experts that a sampler would have recorded."""
    routing = Routing(LAYERS, EXPERTS, CHOSEN) if family == "qwen3_moe" else None
    return uneven_groups((seed, step), prompt=12, tokens=24, routing=routing)


def train(family: str, seed: int) -> tuple[Gradients, list[float]]:
    """This rank's steps: the first gradient, whole, and all losses."""
    torch.set_num_threads(1)
    config = config_of(family)
    assert config.model.build is not None
    masters = MasterWeights(build_model(config.model.build, seed=3).train(), config.train)
    first: Gradients = {}
    update = masters.step

    def step() -> float:
        if not first:
            for name, parameter in masters.model.named_parameters():
                gradient: Any = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                first[name] = whole.detach().clone().numpy()
        return update()

    masters.step = step  # type: ignore[method-assign, assignment]
    losses = []
    for number in range(STEPS):
        seed_step(config, number + 1)
        losses.append(train_step(masters, groups_of(number, family, seed), config).loss)
    return first, losses


def on_ranks(ranks: int, family: str, seed: int, out: Path) -> tuple[Gradients, list[float]]:
    """Trains on forks of this process, which has run nothing of torch yet."""
    port, children = free_port(), []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                if ranks > 1:
                    os.environ.update(
                        rank_environment(
                            rank, ranks, local_rank=rank, address="127.0.0.1", port=port
                        )
                    )
                    join_ranks()
                gradients, losses = train(family, seed)
                if rank == 0:
                    np.savez(out, **gradients, **{"losses/": np.array(losses)})  # type: ignore[arg-type]
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * ranks, codes
    with np.load(out) as saved:
        found = dict(saved)
    return found, found.pop("losses/").tolist()


def distance(left: Gradients, right: Gradients) -> float:
    """The relative L2 distance over all parameters."""
    assert left.keys() == right.keys()
    apart = sum(float(np.sum((left[k].astype(np.float64) - right[k]) ** 2)) for k in left)
    norm = sum(float(np.sum(left[k].astype(np.float64) ** 2)) for k in left)
    return float(np.sqrt(apart / norm))


def measure(options: Options) -> Measured:
    """Compares one process with two, dense and with experts, and two with two again."""
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as name:
        for family in ("qwen3", "qwen3_moe"):
            out = Path(name) / f"{family}.npz"
            one, two, again = (on_ranks(n, family, options.seed, out) for n in (1, 2, 2))
            details[family] = {
                "gradient": distance(one[0], two[0]),
                "loss_max": max(abs(a - b) for a, b in zip(one[1], two[1], strict=True)),
                "repeats_to_the_bit": distance(two[0], again[0]) == 0 and two[1] == again[1],
            }
    return Measured({"ranks_equal": max(one["gradient"] for one in details.values())}, details)
