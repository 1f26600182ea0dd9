"""Ranks open a model without its weights, and give memory to their shards only."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_runs import begin, environment

from deltawire.config import BuildConfig, parse_config
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files, load_model, published_files, save_model
from deltawire.export.source import open_source
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, open_publisher, read_run
from deltawire.sync.chain.objects import put_blob
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.train.midtrain import midtrain_step
from deltawire.train.parallel import open_mesh
from deltawire.wire.run import ModelFile

LORA = {"kind": "lora", "rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("train", [{}, {"compute": "bfloat16"}, {"adapter": LORA}])
def test_a_model_without_memory_trains_to_the_same_bits(tmp_path, family, train):
    bucket = begin(tmp_path, versions=1, family=family, **train)
    run = read_run(bucket)
    config = parse_config({"name": "m", "train": train}, source="test")
    documents = [np.arange(3, 20 + n, dtype=np.int32) for n in range(4)]
    found = []
    for meta in (False, True):
        with fetch_model_files(bucket, run) as folder:
            model = open_model(Path(folder), config.train.adapter, meta=meta)
        assert any(one.is_meta for one in model.parameters()) == meta
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        mesh = open_mesh(config.train, torch.device("cpu"), sharded=True)
        masters = MasterWeights(model, config.train, mesh=mesh)
        assert not any(one.to_local().is_meta for one in model.parameters())
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert tied == (embedding.weight is head.weight)
        masters.reset(load_mirror(bucket, run, at=0))
        losses = [midtrain_step(masters, documents, config).loss for _ in range(2)]
        found.append((losses, masters.digest().hex()))
    assert found[0] == found[1]
    assert found[0][0][1] != found[0][0][0]


def published(folder):
    """A run with chunks that are small against its tensors."""
    sizes = BuildConfig(hidden_size=64, layers=2, head_size=16, feed_forward_size=256, context=64)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    source = open_source("bf16", load_model(folder / "model"))
    files = [
        ModelFile(name=name, blob=ref.hash, bytes=ref.bytes)
        for name, data in published_files(folder / "model", source.specs()).items()
        for ref in [put_blob(bucket, data)]
    ]
    specs = source.specs()
    open_publisher(bucket, source.tensors(), specs=specs, model_files=files, chunk=1024).close()
    return bucket


def test_a_rank_needs_memory_for_its_share_and_one_tensor(tmp_path):
    bucket = published(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "sharded_loading", bucket.url, "4"],
        env=environment(), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, whole = json.loads(done.stdout.splitlines()[-1])
    assert found["share"] <= found["whole"] / 4 * 1.1
    assert found["mirror"] <= found["share"] / 2 * 1.1, "only the rows that this rank needs"
    states = 2 * found["share"]
    assert found["peak"] <= found["share"] + states + found["largest"]
    assert whole["peak"] > whole["whole"] > found["peak"], "otherwise this test proves nothing"
