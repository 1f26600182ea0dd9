"""Computes the memory that keys and values take, and how much of it this machine has free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARE = 0.5
"""The share of available memory that caches may take; activations and other workers need the
rest.
"""


def token_bytes(config: Any, *, itemsize: int) -> int:
    """Returns the bytes that one token's keys and values take over all layers.

    Latent attention, as of DeepSeek-V3, has keys and values of different sizes.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    key = int(getattr(text, "qk_head_dim", None) or size)
    value = int(getattr(text, "v_head_dim", None) or size)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    return itemsize * int(text.num_hidden_layers) * shared * (key + value)


def available_bytes(device: torch.device) -> int:
    """Returns the memory that can still be allocated on ``device``."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def available_host_bytes() -> int:
    """Returns the host memory that can still be allocated, within a container's limit.

    If neither Linux nor a limit states it, returns a number larger than any memory.
    """
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) << 10, _control_group_bytes())
    except OSError:
        pass  # Not Linux: the limit is unknown until an allocation fails.
    return 1 << 62


def _control_group_bytes() -> int:
    """Returns the memory that the process's control group (a container's limit) still allows."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text(encoding="ascii"))
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # There is no control group, or its limit is the word "max".
        return 1 << 62
    return max(0, limit - used + int(stat.get("inactive_file", 0)))
