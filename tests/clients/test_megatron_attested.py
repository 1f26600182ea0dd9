"""Megatron Bridge itself on CPUs: it names and gathers what tensor-parallel ranks hold.

Needs ``megatron-bridge`` and ``megatron-core`` without their dependencies, and ``omegaconf`` and
``einops``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.ports import free_port

core = pytest.importorskip("megatron.core", reason="Megatron is not installed")
pytestmark = [pytest.mark.drills, pytest.mark.timeout(600)]

RANK = Path(__file__).parents[1] / "support/megatron_rank.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shards_of_megatron_are_digested_as_the_checkpoint(tmp_path, ranks):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
              "WORLD_SIZE": str(ranks), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(tmp_path / "model")], text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        printed = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            one.kill()
    for found, errors in printed:
        lines = [line for line in found.splitlines() if line.startswith(("first", "then"))]
        wanted = ["first []", "then ['model.layers.1.mlp.down_proj.weight']"]
        assert lines == wanted, errors[-4000:]
