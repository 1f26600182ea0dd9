"""One trainer rank: makes training steps on seeded groups, and writes what rank 0 saw.

Run as a script with a JSON object: ``model`` (dense or moe), ``first`` and ``last`` step, ``train``
(keys of the section), ``out`` (rank 0 writes ``out.json`` and ``out.npz`` there), and ``bucket`` to
load a checkpoint of step ``first`` from, if there is one, and save that of step ``last``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from deltawire.config import parse_config
from deltawire.rl.trainer.resume import seed_step
from deltawire.store import open_bucket
from deltawire.train.build import build_model
from deltawire.train.checkpoint import CheckpointWriter, load_checkpoint
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel import open_mesh
from deltawire.train.step import train_step
from deltawire.wire.ledger import Ledger
from deltawire.wire.rollouts import Group, Trajectory

CHOSEN, LAYERS = 2, 2


def config_of(task):
    return parse_config(
        {
            "name": "ranks",
            "model": {
                "build": {
                    "family": "qwen3_moe" if task["model"] == "moe" else "qwen3",
                    "hidden_size": 32, "layers": LAYERS, "head_size": 16,
                    "feed_forward_size": 48, "experts": 8, "experts_per_token": CHOSEN,
                }
            },
            "parity": {"routes": "replay" if task["model"] == "moe" else "off"},
            "train": {
                "ranks": int(os.environ.get("WORLD_SIZE", "1")),
                "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 0},
                **task.get("train", {}),
            },
        },
        source="test",
    )  # fmt: skip


def groups_of(step, *, moe, count=5):
    """Groups of different sizes, with the experts that a sampler would have recorded."""
    rng = np.random.default_rng(step)

    def trajectory(prompt):
        length = int(rng.integers(1, 12))
        routes = b""
        if moe:
            from deltawire.parity.routes import pack_routes

            chosen = np.argsort(rng.random((prompt + length - 1, LAYERS, 8)), axis=2)[..., :CHOSEN]
            routes = pack_routes(chosen.astype(np.int32), experts=8)
        return Trajectory(
            rng.integers(0, 256, length).astype(np.int32),
            (-5 - rng.random(length)).astype(np.float32),
            np.zeros(length, np.int32),
            np.ones(length, np.uint8),
            float(rng.integers(0, 2)),
            "stop",
            routes=routes,
        )

    found = []
    for number in range(count):
        prompt = int(rng.integers(2, 10))
        members = [trajectory(prompt) for _ in range(4)]
        tokens = rng.integers(0, 256, prompt).astype(np.int32)
        found.append(Group("w", "n", f"t{number}", 1.0, tokens, members))
    return found


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(task):
    torch.set_num_threads(1)
    config = config_of(task)
    model = build_model(config.model.build, seed=3).train()
    mesh = open_mesh(config.train, torch.device("cpu"), sharded=task.get("sharded", False))
    masters = MasterWeights(model, config.train, mesh=mesh)
    gradients, losses, norms, version = {}, [], [], task.get("first", 0)
    bucket = open_bucket(task["bucket"]) if task.get("bucket") else None
    if bucket is not None and version:
        state = masters.state()
        assert load_checkpoint(bucket, state, newest=version, mesh=mesh).version == version
        masters.restore(state)
    own_step = masters.step

    def step():
        if not gradients:
            for name, parameter in model.named_parameters():
                gradients[name] = whole(parameter.grad).numpy()
        return own_step()

    masters.step = step
    for number in range(version, task["last"]):
        seed_step(config, number + 1)
        groups = groups_of(number, moe=task["model"] == "moe", count=task.get("groups", 5))
        result = train_step(masters, groups, config)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    digest = masters.digest().hex()
    if bucket is not None:
        writer = CheckpointWriter(bucket, mesh)
        writer.save(masters.state(), Ledger(), version=task["last"], digest=digest)
        writer.close()
    if mesh.leads:
        Path(f"{task['out']}.json").write_text(
            json.dumps(
                {
                    "losses": losses, "norms": norms, "digest": digest,
                    "members": result.members, "tokens": result.tokens,
                    "reward": result.reward_mean, "k3": result.parity.drift.k3,
                }
            )
        )  # fmt: skip
        np.savez(f"{task['out']}.npz", **gradients)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_ranks(script, arguments, ranks):
    """Processes of one group, as a launcher starts them."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def run_steps(out, ranks, **task):
    """Runs ``ranks`` processes of this script; returns rank 0's record and first gradients."""
    started = start_ranks(__file__, [json.dumps({**task, "out": str(out)})], ranks)
    try:
        outputs = [one.communicate(timeout=200)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0] * ranks, "\n".join(outputs)[-4000:]
    return json.loads(Path(f"{out}.json").read_text()), dict(np.load(f"{out}.npz"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
