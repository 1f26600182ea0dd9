"""The keys of ``deltawire bench attest``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.attest"

KEYS: Final[dict[str, Key]] = {
    "bugs_named": Key("bugs", ">=", 12, "known bugs of others that are named, of 12 rebuilt ones"),
    "false_alarms": Key(
        "honest", "<=", 0, "tensors not equal in 200 honest updates, dense and MoE, 1 and 2 ranks"
    ),
    "attest_of_step": Key(
        "step_share", "<=", 0.01, "digests of the trainer's weights over a step of a real model"
    ),
    "blackbox_error": Key(
        "blackbox", "<=", 0.01, "wrong verdicts of 500 honest and 500 wrong looks, stored scores"
    ),
    "blackbox_told_apart": Key(
        "blackbox",
        "<=",
        1.1,
        "smallest shift over bf16's noise at which two given versions are told apart",
    ),
    "blackbox_seen": Key(
        "blackbox",
        "<=",
        3.0,
        "the same for a version that is not given, and is called different",
    ),
}
"""Every key, in the order of the table."""
