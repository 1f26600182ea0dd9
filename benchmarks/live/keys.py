"""The keys of ``deltawire bench live``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.live"

KEYS: Final[dict[str, Key]] = {
    "gateway_delay_ratio_p50": Key(
        "gateway", "<=", 2, "median delay to the first token and per chunk over a pass-through's"
    ),
    "gateway_delay_ratio_p99": Key("gateway", "<=", 3, "the same, 99th percentile"),
    "gateway_rps_ratio": Key(
        "gateway", ">=", 0.4, "answers per second of one core over a pass-through's, all captured"
    ),
    "captures_lost": Key("drills", "<=", 0, "answers with a receipt that are not in the bucket"),
    "feedback_lost": Key("drills", "<=", 0, "reports that were taken and are not in the bucket"),
    "feedback_trained_twice": Key("drills", "<=", 0, "answers that two groups were made of"),
    "feedback_trained_twice_two_learners": Key(
        "two_learners", "<=", 0, "the same, trained by two learners that are killed and stopped"
    ),
    "satisfaction_gain": Key(
        "satisfaction", ">=", 0.0, "true satisfaction of simulated users, end over start, 5 seeds"
    ),
    "satisfaction_gain_errors": Key("satisfaction", ">=", 3.0, "that gain over its standard error"),
    "releases_right": Key(
        "releases", ">=", 18, "of 20 runs of make live, those that stop both plants and gain 0.1"
    ),
    "lagged_gain": Key(
        "lagged", ">=", 0.2, "gain of satisfaction from answers 6 to 12 versions old, worst seed"
    ),
    "lagged_seeds": Key(
        "lagged", ">=", 18, "of 20 seeds, those that gain at least 0.1 from such answers"
    ),
    "attack_shift": Key(
        "bandit", "<=", 0.1, "share of the honest gain that 5 % of users take who lie together"
    ),
    "largest_user_influence": Key(
        "influence", "<=", 1.2, "one user's largest share of a gradient over user_cap, any lengths"
    ),
    "answer_lag": Key(
        "freshness", "<=", 1.5, "mean versions until an answer is trained on, at triple supply"
    ),
    "rejections_as_silence": Key(
        "delays", "<=", 0.05, "rejections that come after training on silence, worst of 5 worlds"
    ),
    "critics_trained": Key(
        "bandit", ">=", 0.95, "answers of critics that are trained on, the worst of 20 seeds"
    ),
    "false_promotion_worst": Key(
        "canary", "<=", 0.05, "canaries that promote a drop equal to the margin, worst of 9 worlds"
    ),
    "false_rollback_worst": Key(
        "canary", "<=", 0.05, "canaries that roll back an equal candidate, worst of 9 worlds"
    ),
    "good_promotion_worst": Key(
        "canary", ">=", 0.9, "5 points better, promoted within 20,000 outcomes, worst of 9 worlds"
    ),
    "voters_promote": Key(
        "canary", "<=", 0.05, "4 points worse, promoted by 5 % who vote by a guess of their arm"
    ),
    "gate_rollback_equal": Key(
        "gate", "<=", 0.02, "equal versions that the evaluation gate rolls back, 1 and 4 samples"
    ),
    "progress_kept": Key(
        "gate", ">=", 0.95, "of the progress of 40 better versions, what serves after the gate"
    ),
    "creep_loss_100": Key(
        "creep", "<=", 0.02, "lost by 100 candidates each .005 worse, margins of one budget"
    ),
    "creep_progress_kept": Key(
        "creep", ">=", 0.8, "of the progress of 100 candidates each .005 better, 560,000 users each"
    ),
    "decay_loss": Key(
        "hold_back", "<=", 0.15, "lost by 36 promotions each .01 worse until the hold-back shows it"
    ),
    "decay_false_alarm": Key(
        "hold_back", "<=", 0.05, "equal versions, returned to the hold-back version, worst world"
    ),
    "regression_found_after": Key(
        "canary", "<=", 1.0, "answers until a 5-point drop is rolled back over a fixed test's"
    ),
    "rollback_polls": Key(
        "rollback", "<=", 2, "polls of decisions and replicas until all are back, by digest"
    ),
}
"""Every key, in the order of the table."""
