"""Computes the memory that keys and values take, and how much of it this machine has free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltawire.runtime.memory import available_host_bytes

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
