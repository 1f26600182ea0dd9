"""``load_peak_over_packed``: memory while a bf16 directory is read and packed, tensor by tensor.

The directories are written by a process that has ended, and read by this one: first a tiny one, so
that the memory of imported modules does not count. The peak is that of anonymous memory, sampled
each millisecond: pages of the mapped file are the kernel's to drop.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.training.keys import Measured, Options
from deltawire.config import AdapterConfig
from deltawire.export.adapter import load_adapted

LAYERS, EXPERTS, HIDDEN, INNER = 2, 128, 1024, 512
TINY = (1, 8, 64, 64)


def config(layers: int, experts: int, hidden: int, inner: int) -> Any:
    """A small vocabulary and few heads: nearly all weights are experts."""
    settings: Any = transformers.Qwen3MoeConfig
    return settings(
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=300,
        num_experts=experts,
        num_experts_per_tok=8,
        dtype="bfloat16",
    )


def write(folder: Path, seed: int) -> None:
    """Writes a model with drawn weights, and a tiny one, in folders of ``folder``."""
    _write(folder / "tiny", seed, TINY)
    _write(folder / "model", seed, (LAYERS, EXPERTS, HIDDEN, INNER))


def _write(folder: Path, seed: int, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config(*sizes), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(folder)


def measure(options: Options) -> Measured:
    """Load once, and compare the peak with what stays."""
    with tempfile.TemporaryDirectory() as place:
        code = "import sys; from pathlib import Path; from benchmarks.adapters.packed_load import "
        code += "write; write(Path(sys.argv[1]), int(sys.argv[2]))"
        subprocess.run(  # noqa: S603 - our own interpreter, our own module
            [sys.executable, "-c", code, place, str(options.seed)], check=True
        )
        adapter = AdapterConfig(kind="lora", rank=8, targets=["experts"], packed="int4-g32")
        load_adapted(Path(place, "tiny"), adapter, seed=0)
        before = anonymous()
        started = time.perf_counter()
        with peak_of() as peak:
            model = load_adapted(Path(place, "model"), adapter, seed=0)
        seconds = time.perf_counter() - started
    held = sum(one.nbytes for one in model.parameters())
    plain = sum(2 * LAYERS * EXPERTS * size for size in (2 * HIDDEN * INNER, HIDDEN * INNER))
    over = (peak[0] - before) / held
    return Measured(
        {"load_peak_over_packed": round(over, 3)},
        {
            "packed_bytes": held,
            "bf16_expert_bytes": plain,
            "peak_bytes": peak[0] - before,
            "seconds": round(seconds, 2),
        },
    )


def anonymous() -> int:
    """Returns the bytes of this process's anonymous memory that are resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


@contextlib.contextmanager
def peak_of() -> Iterator[list[int]]:
    """Samples `anonymous` while the body runs; the list's only member is the largest."""
    peak, done = [anonymous()], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=sample, name="memory")
    thread.start()
    try:
        yield peak
    finally:
        peak[0] = max(peak[0], anonymous())
        done.set()
        thread.join()
