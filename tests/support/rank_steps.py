"""One trainer rank: makes training steps on seeded groups, and writes what rank 0 saw.

Run as a script with a JSON list of tasks, which are run one after another, and the number of ranks,
which are forks of the script. A task has ``model`` (a key of `MODELS`), ``first`` and ``last``
step, ``train`` (keys of the section), ``out`` (rank 0 writes ``out.json`` and ``out.npz`` there),
``edited`` if the groups have given rewards and better answers and the loss a reference, and
``bucket`` to load a checkpoint of step ``first`` from, if there is one, or to save that of step
``last``; ``publish`` is a bucket to publish the result in, and to load it from again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import torch
from packed_stacks import quantize_stack
from torch.distributed.tensor import DTensor

from benchmarks.ports import free_port
from benchmarks.runner import ROOT
from benchmarks.training.seeded_groups import Routing, uneven_groups
from deltawire import codec
from deltawire.config import parse_config
from deltawire.export.adapter import adapted
from deltawire.export.shards import local_part
from deltawire.export.source import open_source, wanted_of
from deltawire.quantization.experts import STACKS, find_experts
from deltawire.quantization.linear import PackedLinear
from deltawire.rl.trainer.resume import seed_step
from deltawire.store import open_bucket
from deltawire.sync import ShardPublisher, create_run, load_mirror, read_run
from deltawire.sync.follow.mirror import Mirror
from deltawire.train.checkpoint import CheckpointWriter, load_checkpoint
from deltawire.train.masters import COMPUTE_DTYPES, MasterWeights
from deltawire.train.parallel import open_mesh, shard_model
from deltawire.train.reference import FrozenCopy
from deltawire.train.step import train_step
from deltawire.train.stopping import StepAbandonedError, never
from deltawire.wire.ledger import Ledger
from deltawire.wire.rollouts import BetterAnswer
from deltawire.wire.run import Run

CHOSEN, LAYERS, EXPERTS = 2, 2, 8
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
MODELS = {
    "dense": ("qwen3", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "llama": ("llama", {"tie_word_embeddings": False, "vocab_size": 265}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {}),
}
"""Tied and untied, a vocabulary that does not divide, shared and single key/value heads, plain and
transposed experts."""
SPARSE = {"moe", "olmoe", "gpt_oss"}
REWARDS = (1.0, -0.5, 0.25)


def model_of(task):
    family, sizes = MODELS[task["model"]]
    model = families.build(
        family, seed=task.get("seed", 3), **{**SIZES, **sizes, **task.get("sizes", {})}
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # As wide as models are that start training.
                parameter.mul_(task.get("scale", 0.1))
    return model.train()


def config_of(task):
    return parse_config(
        {
            "name": "ranks",
            "model": {"build": {"family": "qwen3"}},
            "parity": {"routes": "replay" if task["model"] in SPARSE else "off"},
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
    routing = Routing(LAYERS, EXPERTS, CHOSEN) if moe else None
    return uneven_groups(step, count=count, prompt=10, tokens=12, routing=routing)


def edited(groups):
    """The same groups with rewards of both signs, and a better answer to two of three answers."""
    rng = np.random.default_rng(7)

    def better(place):
        tokens = rng.integers(0, 256, int(rng.integers(1, 12))).astype(np.int32)
        return BetterAnswer(tokens, [0.25, 1.0][place % 2]) if place % 3 else None

    return [
        replace(
            group,
            trajectories=[
                replace(t, episode=n, reward=REWARDS[(number + n) % 3], better=better(number + n))
                for n, t in enumerate(group.trajectories)
            ],
        )
        for number, group in enumerate(groups)
    ]


def reference_of(task, config, mesh):
    """A frozen model of other published weights, sharded over the ranks as a trainer's is."""
    model = model_of({**task, "seed": 4}).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    if mesh.ranks > 1:
        compute = COMPUTE_DTYPES[config.train.compute]
        shard_model(
            model, mesh, compute=compute, published=open_source("bf16", model).compute_dtype
        )
    return FrozenCopy(model, config.train)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_task(task):
    """Makes a task's steps; returns a record of them and the first step's gradients, by name."""
    config = config_of(task)
    model = model_of(task)
    adapt(model, config.train.adapter)
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
                if parameter.requires_grad:
                    gradients[name] = whole(parameter.grad).numpy()
        return own_step()

    masters.step = step
    result = None
    reference = reference_of(task, config, mesh) if task.get("edited") else None
    for number in range(version, task["last"]):
        seed_step(config, number + 1)
        count = task.get("groups", 5)
        groups = groups_of(number, moe=task["model"] in SPARSE, count=count)
        if task.get("edited"):
            groups = edited(groups)
        try:
            result = train_step(
                masters, groups, config, reference=reference, stopping=stopping_of(task, mesh)
            )
        except StepAbandonedError:
            return {"abandoned": number, "digest": masters.digest().hex()}, {}
        losses.append(result.loss)
        norms.append(result.grad_norm)
    digest = masters.digest().hex()
    if bucket is not None and not version:
        writer = CheckpointWriter(bucket, mesh)
        writer.save(masters.state(), Ledger(), version=task["last"], digest=digest)
        writer.close()
    record = {
        "packed": packed_bytes(masters),
        "losses": losses,
        "norms": norms,
        "digest": digest,
        "stored": stored(masters),
    }
    if task.get("publish"):
        publish(masters, task["publish"])
        record["loaded"] = load(masters, task["publish"])
        record["masters"] = digests_of(masters)
        record["served"] = served_after_a_change(masters)
    if result is not None:
        record |= {
            "members": [list(one) for one in result.members], "tokens": result.tokens,
            "reward": result.reward_mean, "k3": result.parity.drift.k3, "entropy": result.entropy,
        }  # fmt: skip
    return record, gradients


def stopping_of(task, mesh):
    """Asks one rank to stop after its first micro-batch, if the task names one."""
    if "stopping_rank" not in task:
        return never
    asked = iter(range(1000))
    return lambda: next(asked) >= 1 and mesh.rank == task["stopping_rank"]


@torch.no_grad()
def adapt(model, adapter):
    """Adds the adapter, with both factors drawn, over weights that keep their values if packed."""
    stacks = {
        name: {one: getattr(experts, one).detach() for one in STACKS if hasattr(experts, one)}
        for name, experts in find_experts(model).items()
    }
    weights = dict(model.named_parameters())
    adapted(model, adapter, seed=1)
    if adapter.packed == "none":
        return
    for name, experts in find_experts(model).items():
        for one, stack in stacks[name].items():
            quantize_stack(experts, getattr(experts, one), stack)
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            layer.weight.set(layer.weight.form.quantize(weights[f"{name}.weight"].detach()))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.05, generator=generator)


def packed_bytes(masters):
    """Bytes of packed weights on the fullest rank."""
    packed = [one for one in masters.model.parameters() if not one.is_floating_point()]
    own = sum(local_part(one).nbytes for one in packed)
    return max(int(one) for one in masters.mesh.gather(str(own).encode()))


def stored(masters):
    """Elements of masters and optimizer states that the fullest rank holds."""
    own = sum(local_part(one).numel() for one in masters.state().values())
    return max(int(one) for one in masters.mesh.gather(str(own).encode()))


def publish(masters, location):
    """Publishes the weights as version 0, each rank its part."""
    mesh, source = masters.mesh, masters.source
    shards = masters.shards()
    dtypes = {spec.name: spec.dtype for spec in source.specs()}
    bits = {name: codec.bits_of(one.bits, dtypes[name]).copy() for name, one in shards.items()}
    starts = {name: one.start for name, one in shards.items() if one.start}
    bucket = open_bucket(location, create=True)
    table = Run(
        id="ab" * 16, name="ranks", created_at=0.0, tensors=source.specs(),
        digest=masters.digest().hex(), chunk=64,
    )  # fmt: skip
    if mesh.leads:
        create_run(bucket, table)
    mesh.sum([0.0])  # The run is there once all ranks are here.
    publisher = ShardPublisher(
        bucket, table, Mirror(bits, -1, codec.ZERO, starts), rank=mesh.rank, ranks=mesh.ranks,
        epoch=0, session="only", timeout_s=60,
    )  # fmt: skip
    publisher.publish({name: one.bits for name, one in shards.items()})
    publisher.close()


@torch.no_grad()
def load(masters, location):
    """Loads this rank's rows of the published version over zeros; returns the digest then."""
    for parameter in masters.model.parameters():
        local_part(parameter).zero_()
    bucket = open_bucket(location)
    wanted = wanted_of(masters.source)
    masters.reset(load_mirror(bucket, read_run(bucket), at=0, wanted=wanted))
    return masters.digest().hex()


def digests_of(masters):
    """Digests of whole masters, by parameter."""
    state = masters.state().items()
    kept = {name: whole(one).cpu() for name, one in state if name.startswith("master/")}
    return {name: codec.digest_bits(name, codec.bits_of(kept[name], "F32")).hex() for name in kept}


@torch.no_grad()
def served_after_a_change(masters):
    """The served share once each master has grown by a bit, in all and by layer."""
    for master in masters._masters.values():
        local_part(master).mul_(1.0005)
    found = masters.served_share()
    return [found.since, found.share, found.layers]


def main(tasks):
    torch.set_num_threads(1)
    for task in tasks:
        record, gradients = run_task(task)
        if os.environ.get("RANK", "0") == "0":
            Path(f"{task['out']}.json").write_text(json.dumps(record))
            np.savez(f"{task['out']}.npz", **gradients)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fork_ranks(work, ranks):
    """Calls ``work`` in ranks that are forks of this process, which has imported torch for all."""
    port, children = free_port(), []
    gc.freeze()  # A rank that collects garbage would copy every page of the libraries.
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    for _ in range(ranks):
        _, status = os.wait()
        if code := os.waitstatus_to_exitcode(status):
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sys.exit(abs(code))


def run_tasks(folder, ranks, tasks):
    """Runs tasks by name in ``ranks`` processes of this script, one after another; returns rank 0's
    records and first gradients, by name."""
    listed = [{**task, "out": str(folder / name)} for name, task in tasks.items()]
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(listed), str(ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return {
        name: (
            json.loads((folder / f"{name}.json").read_text()),
            dict(np.load(folder / f"{name}.npz")),
        )
        for name in tasks
    }


def run_steps(out, ranks, **task):
    """Runs one task; returns rank 0's record and first gradients."""
    return run_tasks(out.parent, ranks, {out.name: task})[out.name]


if __name__ == "__main__":
    fork_ranks(lambda: main(json.loads(sys.argv[1])), int(sys.argv[2]))
