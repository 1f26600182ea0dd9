"""A script with a training client, as a launcher starts it: rank 0 drives, the others follow.

Run with a JSON object and the number of ranks. The object has ``url`` and ``model`` of the run to
create, ``out``, ``ranks`` (of the client, null for those of the launcher), ``train`` (keys of the
section), ``steps``, and ``tinker`` for the loop of Tinker's tests. Rank 0 writes ``out.json``
(losses, digests) and ``out.npz`` (the gradients of the first step).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from rank_steps import fork_ranks
from torch.distributed.tensor import DTensor

from benchmarks.runner import ROOT
from deltawire.config import ModelConfig, RunConfig, TrainConfig
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import read_history, read_run
from deltawire.train import AdamParams, Datum, ModelInput, TrainingClient
from deltawire.train.client.session import TrainingSession

TEXTS = ["hello there", "general", "kenobi, how are you?", "abcabcabc", "x" * 40]
gradients: dict[str, np.ndarray] = {}


def datum(text, **inputs):
    tokens = list(text.encode())
    shape = [1.0] * (len(tokens) - 1)
    given = {"target_tokens": tokens[1:], "weights": shape}
    return Datum(ModelInput.from_ints(tokens[:-1]), given | inputs)


def drawn(text, advantage):
    """A datum of RL: every token has the advantage, and was drawn with log-probability −5."""
    count = len(text.encode()) - 1
    return datum(text, logprobs=[-5.0] * count, advantages=[advantage] * count)


def squares(_data, logprobs):
    return sum((one.square()).sum() for one in logprobs), {"count": len(logprobs)}


def keep_gradients(session):
    if not gradients:
        for name, parameter in session.model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                gradients[name] = (
                    (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone().numpy()
                )


def loop(client, steps):
    """Every kind of call: several passes, one datum for all ranks, a loss of the caller's own."""
    losses = []
    for number in range(steps):
        calls = [
            client.forward_backward([datum(one) for one in TEXTS], "cross_entropy"),
            client.forward_backward([datum(TEXTS[number % len(TEXTS)])], "cross_entropy"),
            client.forward_backward(
                [drawn(one, place - 2.0) for place, one in enumerate(TEXTS)],
                "ppo",
                {"clip_high_threshold": 1.5},
            ),
            client.forward_backward_custom([datum(one) for one in TEXTS[:3]], squares),
            client.forward([datum(TEXTS[0])], "cross_entropy"),
        ]
        losses += [one.result().metrics["loss:sum"] for one in calls]
        metrics = client.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
        losses.append(metrics.metrics["grad_norm:mean"])
        client.save_weights_for_sampler().result()
    return losses


def tinker_loop(client, steps):
    """Makes the steps of `tinker_scenarios.loop`, up to its save."""
    data = [datum("abcabcabcabc")] * 2
    losses = []
    for _ in range(steps):
        found = client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-2))
        losses.append(found.result().metrics["loss:sum"])
    client.save_weights_for_sampler().result()
    return losses


def config_of(task):
    train = msgspec.convert(task.get("train", {}), TrainConfig)
    return RunConfig(name="ranks", model=ModelConfig(path=task["model"]), train=train)


def main(task):
    torch.set_num_threads(1)
    step = TrainingSession._step

    def kept(session, params):
        keep_gradients(session)
        return step(session, params)

    TrainingSession._step = kept
    with TrainingClient.create(
        task["url"], task["model"], config=config_of(task), ranks=task.get("ranks")
    ) as client:
        losses = (tinker_loop if task.get("tinker") else loop)(client, task["steps"])
        found = {"losses": losses, "ranks": client.ranks, "version": client.version}
    if client.ranks > 1:
        try:
            TrainingClient.load(task["url"])
        except InputError as error:
            found["again"] = str(error)
    bucket = open_bucket(task["url"])
    found["digests"] = [one.digest for one in read_history(bucket, read_run(bucket))]
    TrainingSession._step = step
    Path(f"{task['out']}.json").write_text(json.dumps(found))
    np.savez(f"{task['out']}.npz", **gradients)
    gradients.clear()


def follow_or_lead():
    try:
        main(json.loads(sys.argv[1]))
    except SystemExit as end:  # The other ranks end so, once rank 0 has closed its client.
        if end.code != 0 or os.environ["RANK"] == "0":
            raise


def run_script(folder, model, name, *, ranks, steps, **task):
    """Runs this script in ``ranks`` processes, or in this one; returns rank 0's record and first
    gradients."""
    out = folder / name
    task = {"url": str(folder / f"{name}-bucket"), "model": str(model), "out": str(out)} | task
    task["steps"] = steps
    if ranks == 1:
        main(task)
    else:
        command = [sys.executable, __file__, json.dumps(task), str(ranks)]
        done = subprocess.run(
            command, timeout=280, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(Path(f"{out}.json").read_text()), dict(np.load(f"{out}.npz"))


if __name__ == "__main__":
    fork_ranks(follow_or_lead, int(sys.argv[2]))
