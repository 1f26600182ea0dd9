"""Reads a run's probes, or compares the rewards of live users' answers with theirs."""

from __future__ import annotations

import time

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.reward_monitor.monitor import ProbeState
from deltawire.reward_monitor.watch import read_probes
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.sync import read_run


def probe_state(location: str, trust: ReaderTrust, *, live: bool) -> ProbeState:
    """Returns the probes that a run's trainer stored, or with ``live`` those of the answers that
    gateways stored. Raises `InputError` if there are none."""
    bucket = open_trusted(location, trust)
    run = read_run(bucket)
    if live:
        from deltawire.live.release.live_probes import monitor_live

        config = config_of(run, url=bucket.url) if run.config else RunConfig(name="live")
        found = monitor_live(bucket, config, now=time.time())
        if found.streams:
            return found
        raise InputError(
            "no answer of a live user has a reward yet",
            hint="answers count once live.release.outcome_after_s has passed; silent ones need "
            "live.silent",
            run=bucket.url,
        )
    state = read_probes(bucket)
    if state is None:
        raise InputError(
            "the run has no probes yet",
            hint="its environment declares none, or no step was trained on; live users' answers: "
            "--live",
            run=bucket.url,
        )
    return state
