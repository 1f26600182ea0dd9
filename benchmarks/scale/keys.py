"""The keys of ``deltawire bench scale``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.scale"

KEYS: Final[dict[str, Key]] = {
    "commit_s_2000_ranks": Key(
        "commit", "<=", 2, "seconds from 2,000 stored parts to the leader's commit, 20 ms a request"
    ),
    "fetch_s_2000_blobs": Key(
        "fetch", "<=", 2, "seconds to fetch and verify a delta of 2,000 blobs, 20 ms a request"
    ),
    "publish_start_reads_10k_versions": Key(
        "versions", "<=", 50, "requests of publish before its first directory, 10,000 versions"
    ),
    "status_s_100k_versions": Key(
        "versions", "<=", 1, "seconds to read the status of 100,000 versions, 20 ms a request"
    ),
    "forget_requests_per_version": Key(
        "live_users", "<=", 1.1, "requests of deltawire forget for each of 10,000 versions"
    ),
    "forget_requests_month_rows": Key(
        "live_month",
        "<=",
        2000,
        "requests of deltawire forget for the answers and reports of a month of three gateways",
    ),
    "rollback_poll_requests": Key(
        "live_users", "<=", 3, "most requests of a learner's poll after a rollback, 200 versions"
    ),
    "trainer_start_s_10k_workers": Key(
        "workers",
        "<=",
        20,
        "seconds of a trainer's first poll of 10,000 workers, 20 ms a request",
    ),
    "trainer_poll_s_10k_workers": Key(
        "workers", "<=", 2, "seconds of a later poll, of which each brings 500 groups"
    ),
    "trainer_poll_requests_10k_workers": Key("workers", "<=", 2200, "most requests of such a poll"),
    "status_s_10k_workers": Key(
        "workers", "<=", 25, "seconds to make the status of 10,000 workers, for all views"
    ),
    "resume_s_1m_groups": Key(
        "workers", "<=", 15, "seconds until a trainer that resumes has granted; 1M groups consumed"
    ),
    "resume_requests_growth": Key(
        "workers", "<=", 1.05, "its requests over those with a hundredth of the groups"
    ),
    "shard_reader_excess": Key(
        "shards", "<=", 0.10, "bytes that a rank of 2, 4 or 8 fetches beyond the chunks it serves"
    ),
    "shard_host_excess": Key(
        "host", "<=", 0.10, "bytes that a host's 2, 4 or 8 ranks fetch beyond a delta's, with cache"
    ),
    "manifest_bytes_1t": Key(
        "tables", "<=", 1e7, "manifest and piece table of one delta of a model of 1T parameters"
    ),
    "manifest_bytes_shard16": Key(
        "tables", "<=", 8e5, "bytes of these that a reader of a sixteenth of each tensor fetches"
    ),
    "fp8_share_3e6": Key(
        "quantized", "<=", 0.003, "share of an fp8 model that a step at 3e-6 sends"
    ),
    "fp8_share_1e6": Key("quantized", "<=", 0.0013, "the same at 1e-6"),
    "plan_time_error": Key(
        "planned", "<=", 0.15, "median error of the planned time to the last reader, real runs"
    ),
    "plan_time_error_p90": Key("planned", "<=", 0.30, "the 90th percentile of the same"),
    "plan_bytes_error": Key("planned", "<=", 0.02, "largest error of the planned bytes"),
    "storm_last_reader_vs_needed": Key(
        "storm_run", "<=", 1.25, "last of 16 readers that outrun their store, over a perfect queue"
    ),
    "storm_attempts": Key(
        "storm_run", "<=", 1.5, "requests of these readers over those that they needed"
    ),
    "storm_cold_start_vs_needed": Key(
        "storm_run", "<=", 1.25, "the same time, of readers that hold nothing"
    ),
    "storm_processes_ended": Key("storm_run", "<=", 0, "readers that ended before they were done"),
    "storm_commit_delay_s": Key(
        "storm_run", "<=", 2, "seconds that the storm adds to commits on the same store, most"
    ),
    "storm_plan_error": Key(
        "storm_run", "<=", 0.15, "largest error of what plan and simulation say of these readers"
    ),
    "run_dollars_error": Key(
        "run_costs", "<=", 0.10, "error of the planned dollars of a whole run, counted by its store"
    ),
    "run_item_error": Key(
        "run_costs", "<=", 0.10, "largest error of an item that is 3 % of them or more"
    ),
    "simulation_error": Key(
        "planned", "<=", 0.15, "median error of the simulated time to the last reader"
    ),
}
"""Every key, in the order of the table."""
