"""Compacts what all gateways of a run stored, and deletes what is older than ``[retain]`` says."""

from __future__ import annotations

import time

from deltawire.errors import UnreadableError
from deltawire.launch.role_keys import read_signer
from deltawire.live.compaction.maintenance import (
    DAY_S,
    days_of,
    gateway_compactors,
    learner_compactor,
)
from deltawire.runtime.compacted_segments import stored_owners
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.sync import read_run
from deltawire.wire.roles import GATEWAY_ROLE


def compact_run(location: str, *, trust: ReaderTrust, key: str = "") -> dict[str, int]:
    """Compacts the streams of all gateways, and in a run without signatures the lineages of all
    learners; returns how many objects were made (``compacted``) and
    how many rows deleted (``expired``).

    In a signed run ``key`` is the gateways' key. Raises `UnreadableError` if an object cannot be
    read, after everything else was done.
    """
    bucket = open_trusted(location, trust, signer=read_signer(key), role=GATEWAY_ROLE)
    bucket.check_writer()
    run = read_run(bucket)
    days = days_of(config_of(run, url=bucket.url).retain) if run.config else {}
    found, alarm = {"compacted": 0, "expired": 0}, ""
    owners = {*stored_owners(bucket, "captures"), *stored_owners(bucket, "feedback")}
    compactors = [one for owner in sorted(owners) for one in gateway_compactors(bucket, owner)]
    if not run.public_key:  # Otherwise only the learner can sign.
        learners = stored_owners(bucket, "lineage")
        compactors += [learner_compactor(bucket, learner) for learner in learners]
    for one in compactors:
        kept = days.get(one.stream, 0.0)
        try:
            found["compacted"] += one.compact()
        except UnreadableError as error:
            alarm = alarm or f"{error.message} ({error.key})"
        if kept:
            found["expired"] += one.expire(time.time() - kept * DAY_S)
        alarm = alarm or one.alarm
    if alarm:
        raise UnreadableError(
            f"the rest is compacted, but {alarm}",
            hint="delete the object if it is not the gateway's, then run the command again",
            run=bucket.url,
        )
    return found
