"""The keys of ``deltawire bench adapters``: their floors, and the modules that measure them."""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE = "benchmarks.adapters"
KEYS: Final[dict[str, Key]] = {
    "expert_memory_ratio": Key(
        "packed_step", ">=", 3.5, "bytes of experts in bf16 over packed, the least of the 4-bit"
    ),
    "gradient_equal": Key(
        "packed_step", "is", True, "bits of gradients over packed and over dequantized experts"
    ),
    "step_slowdown": Key(
        "packed_step", "<=", 1.25, "a packed step over a bf16 one: 128 experts of 2048 x 768, top-8"
    ),
    "load_peak_over_packed": Key(
        "packed_load", "<=", 1.15, "peak memory of packing a bf16 directory over the packed model"
    ),
    "adapter_delta_share": Key(
        "run_bytes", "<=", 1.0, "bytes of a version of a real run over those of its adapter"
    ),
    "adapter_bytes_growth": Key(
        "large_adapters", "<=", 1.05, "bytes a change at --cases GB of adapters over those at 0.25"
    ),
    "adapter_swap_ms": Key(
        "slot_swap", "<=", 1e9, "pause of a swap of 10 % of an adapter in vLLM's slot, ms"
    ),
    "adapter_swap_speedup": Key(
        "slot_swap", ">=", 5, "vLLM's load_lora_adapter with load_inplace over that pause"
    ),
    "stale_prefix_hits": Key(
        "prefixes", "<=", 0, "prompts whose cached keys and values were those of an older adapter"
    ),
    "base_mismatch_found": Key(
        "base_faults", "is", True, "each planted fault in the base was found by its tensor's name"
    ),
}
"""Every key, in the order of the table."""
