"""``head_peak_ratio``: the peak memory of a head over all logits against that of chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.training.keys import Measured, Options, in_process
from deltawire.train.head import head_terms

VOCABULARY, TOKENS, HIDDEN = 151_936, 8192, 1024
"""The head of Qwen3-0.6B over 8,192 tokens."""
REAL_TOKENS, REAL_HIDDEN, REAL_CHUNK = 1024, 64, 64
"""An eighth of the tokens, in chunks an eighth as large: the ratio is about the same."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities from the logits of all tokens."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities as the trainer computes them."""
    return head_terms(hidden, weight, targets).logprobs


def measure(options: Options) -> Measured:
    """Counts every tensor of both, forward and backward, in bf16, without allocating any."""
    found = {step.__name__: tracked(step) for step in (plain, chunked)}
    details: dict[str, float] = {f"{name}_bytes": size for name, size in found.items()}
    if options.real:
        for name in ("real_plain", "real_chunked"):
            details[f"{name}_bytes"] = float(in_process(__name__, options, name))
    return Measured({"head_peak_ratio": round(found["plain"] / found["chunked"], 2)}, details)


def tracked(step: Step) -> int:
    """Peak bytes of a step above its inputs: logits, their gradients, and those of the inputs."""
    with FakeTensorMode():
        hidden, weight, targets = _inputs(TOKENS, HIDDEN, torch.bfloat16)
        tracker = MemTracker()
        tracker.track_external(hidden, weight, targets)
        with tracker:
            step(hidden, weight, targets).sum().backward()  # type: ignore[no-untyped-call]
        peak = tracker.get_tracker_snapshot("peak")
    (total,) = [size["Total"] for size in peak.values() if size["Total"]]
    return int(total) - sum(x.numel() * x.element_size() for x in (hidden, weight, targets))


def _inputs(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.zeros(tokens, size, dtype=dtype, requires_grad=True)
    weight = torch.zeros(VOCABULARY, size, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.zeros(tokens, dtype=torch.long)


def real_plain(_options: Options) -> int:
    """Growth of this process's resident memory in a plain step, in bytes."""
    return _resident(plain)


def real_chunked(_options: Options) -> int:
    """Growth of this process's resident memory in a chunked step, in bytes."""
    return _resident(lambda x, w, y: head_terms(x, w, y, chunk=REAL_CHUNK).logprobs)


def _resident(step: Step) -> int:
    inputs = _inputs(REAL_TOKENS, REAL_HIDDEN, torch.float32)
    warm = [x[:8].detach().requires_grad_(x.is_floating_point()) for x in inputs]
    step(*warm).sum().backward()  # type: ignore[no-untyped-call]
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(*inputs).sum().backward()  # type: ignore[no-untyped-call]
    return _status("VmHWM") - before


def _status(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if field in line]
    return int(line.split()[1]) * 1024
