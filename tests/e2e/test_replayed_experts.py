"""A mixture-of-experts run whose workers sample in bf16 and tell their expert choices: the trainer
takes them, trains, and agrees better with its samplers than it would have without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from deltawire.chat.text import Text
from deltawire.config import ParityConfig, RunConfig, WarmStartConfig, load_config
from deltawire.dashboard.state import RunState
from deltawire.envs import ReasoningTasks
from deltawire.events import decode_lines
from deltawire.export.models import empty_model, fetch_model_files, save_model
from deltawire.parity import divergence
from deltawire.parity.router_replay import replay_of
from deltawire.placement.live import LiveWeights
from deltawire.rl.control.rollout_buffer import read_consumed
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, read_manifest, read_run
from deltawire.train.batch import collate
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.policy import token_logprobs
from deltawire.train.warm_start import warm_start
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(400)]

VERSIONS = 4
CONFIG = f"""
name = "experts"
[model.build]
family = "qwen3_moe"
hidden_size = 64
layers = 3
head_size = 16
feed_forward_size = 32
experts = 16
experts_per_token = 2
context = 128
[task]
heldout = 8
options = {{ min_word_len = 3, max_word_len = 6 }}
[rollout]
group_size = 8
max_tokens = 12
slots = 32
context = 96
precision = "bfloat16"
[train]
versions = {VERSIONS}
groups_per_step = 4
max_staleness = 0
optimizer.learning_rate = 1e-3
schedule.warmup_steps = 0
checkpoint_every = 100
[parity]
routes = "replay"
[parity.stop]
flipped_share = 0.5
"""


def measure(bucket: Bucket, version: int, mode: str) -> tuple[float, int, int]:
    """k3 and tokens of the batch that was trained on at a version, with its weights as they are in
    the bucket; and how many expert choices flipped."""
    run = read_run(bucket)
    mirror, manifest = load_mirror(bucket, run, at=version), read_manifest(bucket, run, version + 1)
    assert mirror is not None
    assert manifest is not None
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder)).eval()
    LiveWeights(model, run.tensors).load(mirror)
    metadata = msgspec.convert(manifest.metadata["deltawire.step"], CommitMetadata)
    batch = collate([buffered.group for buffered in read_consumed(bucket, metadata)])
    replay = replay_of(model, msgspec.convert({"routes": mode}, ParityConfig))
    assert replay is not None
    with torch.no_grad():
        ours = token_logprobs(model, batch, replay)
    found = divergence(ours, batch.sampler_logprobs_NC, batch.loss_mask_NC)
    return found.k3, found.tokens, int(replay.flipped_L.sum())


def write_model(folder: Path, config: RunConfig, sharp: Callable[[Any], Any]) -> None:
    """Version 0: experts that matter, and letters rather than any bytes, so that some are right."""
    assert config.model.build is not None
    model, tokenizer = sharp(build_model(config.model.build, seed=0)), byte_tokenizer()
    text, tasks = Text(tokenizer), ReasoningTasks(config.task, seed=0)

    def pairs(step: int) -> list[tuple[list[int], list[int]]]:
        drawn = [tasks.draw("warm", 16 * step + place) for place in range(16)]
        return [(text.prompt(tasks.prompt(t)), [*text.encode(tasks.answer(t)), 256]) for t in drawn]

    settings = WarmStartConfig(max_steps=40, check_every=1000, learning_rate=5e-3)
    warm_start(
        model.train(),
        settings,
        draw=pairs,
        check=lambda: 0.0,
        report=lambda _: None,
        stopping=lambda: False,
    )
    save_model(model, tokenizer, folder)


def test_a_run_replays_its_samplers_experts(tmp_path: Path, sharp: Callable[[Any], Any]) -> None:
    path, url = tmp_path / "experts.toml", str(tmp_path / "bucket")
    path.write_text(CONFIG)
    write_model(tmp_path / "model", load_config(path), sharp)
    bucket = open_bucket(url, create=True)
    trainer = ["trainer", url, "--config", str(path), "--model", str(tmp_path / "model")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "deltawire", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in (trainer, ["worker", url, "--id", "w0"])
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()

    state = RunState()
    for key in bucket.list(keys.EVENTS):
        state.add(decode_lines(bucket.get(key, limit=1 << 26) or b""))
    assert sorted(state.parity) == list(range(1, VERSIONS + 1))
    assert max(step.grad_norm for step in state.steps.values()) > 0, "it trains"
    with_replay = without = flips = 0.0
    for version in range(VERSIONS):
        told = state.parity[version + 1]
        assert len(told.flipped) == 3
        assert told.numeric.tokens == told.drift.tokens > 0, "nothing is stale when alternating"
        k3, tokens, _ = measure(bucket, version, "replay")
        assert abs(told.numeric.k3 - k3) < 1e-3 * k3, "the run measured what the bucket shows"
        with_replay += k3 * tokens
        plain, _, flipped = measure(bucket, version, "record")
        without += plain * tokens
        flips += flipped
    assert flips > 0
    assert with_replay < without
