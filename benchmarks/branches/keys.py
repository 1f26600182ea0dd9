"""The keys of ``deltawire bench branches``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.branches"

KEYS: Final[dict[str, Key]] = {
    "bisect_wrong": Key(
        "noisy_bisection", "<=", 0.072, "wrong results of 400 culprits, pass rates .8 and .5"
    ),
    "bisect_questions_ratio": Key(
        "noisy_bisection", "<=", 0.5, "questions over those of fixed repetitions, as seldom wrong"
    ),
    "bisect_named_without_culprit": Key(
        "noisy_bisection", "<=", 0.05, "culprits named where there is none, worst of three worlds"
    ),
    "bisect_real_found": Key(
        "real_culprits", ">=", 1, "faults of three real runs that a noisy test of answers finds"
    ),
    "bisect_real_named_without": Key(
        "real_culprits", "<=", 0, "culprits named in the same run without a fault"
    ),
    "compare_trees_kept": Key(
        "null_changes", "<=", 0.1, "share of trees of 100 null changes in which one is kept"
    ),
    "diff_kl_error": Key(
        "version_tools",
        "<=",
        1e-4,
        "largest error of diff's KL to float64, of the largest",
    ),
    "fork_seconds": Key(
        "fork_cost", "<=", 1, "seconds of a fork of 100 versions of 146M weights, slowest of 6"
    ),
    "fork_kb": Key("fork_cost", "<=", 100, "kilobytes that such a fork stores, the most of 6"),
    "served_wrong": Key(
        "version_tools",
        "<=",
        0,
        "share of 20 moves of bisect --serve with another version's figures",
    ),
    "why_planted_found": Key(
        "planted_groups", ">=", 1, "share of 20 runs whose planted group has the largest effect"
    ),
    "why_residual": Key(
        "planted_groups", "<=", 0.05, "median residual of the integral, of the whole change"
    ),
}
"""Every key, in the order of the table."""
