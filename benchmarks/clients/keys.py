"""The keys of ``deltawire bench clients``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.clients"

KEYS: Final[dict[str, Key]] = {
    "trl_blocked_ratio": Key(
        "trl_trainer", "<=", 1.5, "pause of the callback in TRL's trainer over cast plus memcpy"
    ),
    "trl_equal": Key(
        "trl_trainer",
        "is",
        True,
        "each version is the trainer's rounded weights; a LoRA's base stays",
    ),
    "tinker_recipe_overhead": Key(
        "tinker_server", "<=", 1.3, "a recipe's step by Tinker's client over the library's"
    ),
    "tinker_restart_lost": Key(
        "tinker_server", "<=", 0, "results that a server killed twice lost or changed"
    ),
}
"""Every key, in the order of the table."""
