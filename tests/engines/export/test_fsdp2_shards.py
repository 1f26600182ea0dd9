"""Ranks of a real FSDP2 model, two processes over gloo: each publishes its own shards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from anchored import anchor_of

from benchmarks.ports import free_port
from deltawire.export.shards import saved_tensors
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, open_publisher, read_manifest, read_run
from deltawire.sync.chain.payloads import read_payload
from deltawire.wire import keys

RANK = Path(__file__).parents[2] / "support/fsdp2_rank.py"
STEPS = 3


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_publish_one_model(tmp_path):
    folder = tmp_path / "bucket"
    bucket = open_bucket(str(folder), create=True)
    port = str(free_port())
    with (tmp_path / "printed").open("w") as printed:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(folder)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": port, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=printed, stderr=printed,
            )
            for rank in range(2)
        ]  # fmt: skip
    try:
        codes = [rank.wait(250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], (tmp_path / "printed").read_text()[-6000:]
    run = read_run(bucket)
    for version in range(STEPS + 1):
        assert (anchor_of(bucket, run, version) is not None) == (version % 2 == 0)
        mirror = load_mirror(bucket, run, at=version)
        wanted = bucket.get(f"wanted/{version}", limit=100).decode()
        assert mirror.compute_held().hex() == mirror.digest.hex() == wanted
        assert bucket.get(f"attested/{version}", limit=100).decode() == wanted
    assert len({read_manifest(bucket, run, v).digest for v in range(STEPS + 1)}) == STEPS + 1
    failed = [bucket.get(f"failed/{rank}", limit=500).decode() for rank in range(2)]
    assert failed[1].startswith("dtype complex64 has no wire dtype")
    other = "another rank cannot digest what it holds; rank 1: InputError: dtype complex64"
    assert failed[0].startswith(other)
    # Both ranks wrote: the first weight has pieces of both halves of its rows.
    first = read_manifest(bucket, run, 0)
    assert len(read_payload(bucket, run, first, first.anchor).blobs) == 2
    assert not bucket.list(keys.PARTS)


def test_a_module_with_tied_weights():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    bucket = open_bucket("memory://")
    publisher = open_publisher(bucket, saved_tensors(model))
    assert [spec.name for spec in publisher.run.tensors] == ["embed.weight"]
    assert publisher.run.aliases == {"head.weight": "embed.weight"}
    with torch.no_grad():
        model["embed"].weight += 1
    assert publisher.publish(saved_tensors(model)) == 1
    publisher.close()
    held = load_mirror(bucket, publisher.run).tensors["embed.weight"]
    live = model["embed"].weight.detach().view(torch.int32).reshape(-1).numpy()
    assert (held.view("i4") == live).all()


def test_a_transposed_view_is_not_a_tied_weight():
    """Of a square weight it has the address, the shape and the dtype."""
    model = torch.nn.ModuleDict(
        {"encode": torch.nn.Linear(4, 4, bias=False), "decode": torch.nn.Linear(4, 4, bias=False)}
    )
    model["decode"].weight = torch.nn.Parameter(model["encode"].weight.detach().t())
    bucket = open_bucket("memory://")
    publisher = open_publisher(bucket, saved_tensors(model))
    publisher.close()
    assert publisher.run.aliases == {}
    held = load_mirror(bucket, publisher.run).tensors
    for name, live in model.state_dict().items():
        assert (held[name].view("f4") == live.numpy().reshape(-1)).all()
