"""Every Python block of the documents is run: alone, or with stand-ins for what it is a part of."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import ROOT, blocks

MARK = "<!-- run -->"
"""Blocks below this line are run alone, by `test_code_blocks`."""

EXEMPT = {
    "docs/CLIENTS.md: trainer = AsyncGRPOTrainer(": (
        "asks a vLLM server",
        "tests/unit/trl/test_trl_transfer.py",
    ),
    "docs/LIVE.md: FeedbackClient(": (
        "asks a gateway",
        "tests/security/live/test_live_feedback.py",
    ),
    "docs/TRAINING_CLIENT.md: client = TrainingClient.create(": (
        "starts four processes",
        "tests/unit/train/client/test_client_over_ranks.py",
    ),
}
"""Blocks that are not run, by a line of theirs: what they do, and the tests that do it instead."""


def small_model():
    """A tiny model and its tokenizer."""
    from deltawire.config.sections import BuildConfig
    from deltawire.train.build import build_model, byte_tokenizer

    sizes = {"hidden_size": 32, "layers": 1, "head_size": 16, "feed_forward_size": 64}
    return build_model(BuildConfig(**sizes, context=128), seed=0), byte_tokenizer()


def followed_run():
    """A run of two versions where the block expects one."""
    import numpy as np

    import deltawire

    publisher = deltawire.open_publisher("runs/demo/bucket", {"w": np.zeros(8, np.float32)})
    publisher.publish({"w": np.ones(8, np.float32)})
    publisher.close()
    return {}


def loss_inputs():
    """Tensors of two answers of three tokens."""
    import torch

    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    return {
        "logprobs_NC": logprobs,
        "sampler_logprobs_NC": torch.full((2, 3), -1.1),
        "advantages_N": torch.tensor([1.0, -1.0]),
        "mask_NC": torch.ones(2, 3),
        "sequences_N": torch.tensor([0, 1]),
    }


def training_loop():
    """A model with its optimizer, and two batches."""
    import torch

    model = torch.nn.Linear(4, 2)
    return {
        "MODEL": None,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss": lambda model, batch: model(batch).sum(),
        "batches": [torch.ones(1, 4)] * 2,
    }


def saved_model():
    """The directory that the block loads."""
    from deltawire.export.models import save_model

    save_model(*small_model(), Path("models/qwen3-0.6b"))
    return {}


def trainers():
    """Trainers that keep what they are given."""

    class Trainer(SimpleNamespace):
        def __init__(self, *_, **options):
            super().__init__(**options)

        def train(self):
            assert self.callbacks

    names = ("SFTTrainer", "GRPOTrainer")
    return dict.fromkeys(names, Trainer) | {"data": [], "reward": None}


def plan_file():
    """The plan that the block reads."""
    folder = Path("examples/plans")
    folder.mkdir(parents=True)
    shutil.copy(ROOT / folder / "100-gpus-15s.toml", folder)
    return {}


def rllib_config():
    """RLlib's configuration."""
    ppo = pytest.importorskip("ray.rllib.algorithms.ppo")
    return {"config": ppo.PPOConfig()}


def traits():
    """The class that a line of the table makes."""
    from deltawire.config.losses import SurrogateTraits

    return {"SurrogateTraits": SurrogateTraits}


PREPARED = {
    "README.md: follower = Subscriber(": followed_run,
    "docs/CLIENTS.md: trainer = SFTTrainer(": trainers,
    "docs/CLIENTS.md: config.callbacks(": rllib_config,
    "docs/ENVIRONMENTS.md: def reward(": dict,
    "docs/ENVIRONMENTS.md: class Guess(": dict,
    "docs/ENVIRONMENTS.md: async def harness(": dict,
    "docs/PLANNING.md: plan = make_plan(": plan_file,
    "docs/SHAPES.md: profile = resolve_training_profile(": dict,
    "docs/TRAINING.md: part.loss.backward()": loss_inputs,
    "docs/TRAINING.md: def one_sided(": dict,
    'docs/TRAINING.md: "one_sided": SurrogateTraits(': traits,
    "docs/TRAINING_CLIENT.md: with TrainingClient.create(": saved_model,
    "docs/howto/trl.md: trainer = GRPOTrainer(": trainers,
    "examples/vllm/README.md: publisher = deltawire.open_publisher(": training_loop,
}
"""Functions that return the names that a block uses, by a line of the block."""

OTHERS = [block for block in blocks("python") if block.before != MARK]


def key_of(block):
    """The entry of a block; fails the test for a block without one."""
    found = [
        key
        for key in (*EXEMPT, *PREPARED)
        if key.partition(": ")[0] == block.path.relative_to(ROOT).as_posix()
        and any(line.startswith(key.partition(": ")[2]) for line in block.text.splitlines())
    ]
    assert len(found) == 1, f"{block.place}: mark it {MARK}, prepare it here, or exempt it: {found}"
    return found[0]


def test_every_block_has_one_entry_and_every_entry_a_block():
    keys = [key_of(block) for block in OTHERS]
    assert sorted(keys) == sorted([*EXEMPT, *PREPARED])
    assert all((ROOT / path).is_file() for _, path in EXEMPT.values())


def prepared():
    """The blocks that run here; those that import whole trainers are drills."""
    for one in OTHERS:
        if key_of(one) in PREPARED:
            slow = PREPARED[key_of(one)] in (trainers, rllib_config)
            yield pytest.param(one, id=one.place, marks=pytest.mark.drills if slow else ())


@pytest.mark.parametrize("block", list(prepared()))
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAWIRE_DURABLE", "0")
    names = PREPARED[key_of(block)]()
    text = block.text.replace("s3://bucket/run", f"{tmp_path}/run").replace("…", "...")
    if text.startswith('"'):  # One line of a table.
        text = f"{{{text}}}"
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, block.place, "exec"), {"__name__": "block", **names})
