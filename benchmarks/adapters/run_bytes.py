"""``adapter_delta_share``: bytes of a real run's versions, and of uploads of the whole adapter.

A small mixture of experts with packed experts is trained for a few versions by `deltawire run`,
with two workers over a folder. The manifests state the bytes that each version uploaded.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.training.keys import Measured, Options
from deltawire.codec import ITEMSIZE
from deltawire.export.adapter import PREFIX
from deltawire.store import open_bucket
from deltawire.sync import read_history, read_manifest, read_run

VERSIONS, ANCHOR_EVERY = 8, 4
CONFIG = """
name = "adapter-bytes"
seed = {seed}

[model.build]
family = "qwen3_moe"
hidden_size = 64
layers = 2
head_size = 32
feed_forward_size = 64
experts = 8
experts_per_token = 2
context = 256

[task]
dataset = "spell_backward"
options = {{ min_word_len = 3, max_word_len = 3 }}
prompt = "{{question}}\\n"
heldout = 8

[warm_start]
max_steps = 24
stop_at_accuracy = 0.1
check_every = 8
learning_rate = 2e-3
batch = 16

[rollout]
workers = 2
group_size = 8
max_tokens = 8
slots = 16
context = 80

[train]
versions = {versions}
groups_per_step = 4
max_staleness = 2
optimizer.learning_rate = 2e-4
anchor_every = {anchor_every}
checkpoint_every = 100

[train.adapter]
kind = "lora"
rank = 8
alpha = 16.0
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
packed = "int4-g32"

[evaluate]
every = 100
samples = 1
"""


def measure(options: Options) -> Measured:
    """Run, and read what was uploaded."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = CONFIG.format(seed=options.seed, versions=VERSIONS, anchor_every=ANCHOR_EVERY)
        (folder / "run.toml").write_text(text)
        code = "from deltawire.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "run", "run.toml", "--out", "out", "--plain"]
        done = subprocess.run(  # noqa: S603 - our own interpreter, our own command
            command, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr[-2000:]}")
        report = json.loads((folder / "out" / "report.json").read_bytes())
        bucket = open_bucket(str(folder / "out" / "bucket"))
        run = read_run(bucket)
        history = list(read_history(bucket, run))
        first = read_manifest(bucket, run, 0)
    sizes = {spec.name: spec.count * ITEMSIZE[spec.dtype] for spec in run.tensors}
    adapter = sum(size for name, size in sizes.items() if name.startswith(PREFIX))
    deltas = [one.delta.bytes for one in history if one.delta is not None]
    anchors = [one.anchor.bytes for one in history if one.anchor is not None]
    return Measured(
        {"adapter_delta_share": round(statistics.mean(deltas) / adapter, 4)},
        {
            "embedded_swap_ms": report["swap_ms"],
            "adapter_bytes": adapter,
            "base_bytes": sum(sizes.values()) - adapter,
            "delta_bytes": deltas,
            "whole_adapter_bytes_a_version": adapter,
            "first_anchor_bytes": first.anchor.bytes if first and first.anchor else 0,
            "later_anchor_bytes": anchors,
            "workers": report["workers"],
        },
    )
