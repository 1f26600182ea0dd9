"""Learns the share of values that a step changes from the versions of a run."""

from __future__ import annotations

from statistics import median

from deltawire.errors import InputError
from deltawire.plan.fleet.rates import CodecRates
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest, read_run

LAST = 20
"""Versions that are looked at, the newest ones."""


def learn_share(bucket: Bucket, codec: CodecRates) -> float:
    """Returns the share whose deltas are as large as the median of the newest versions'.

    Manifests state bytes and not changes, so the measured sizes are inverted: bytes grow with the
    share. Raises `InputError` for a run without deltas.
    """
    run = read_run(bucket)
    newest = newest_version(bucket)
    sizes = []
    for version in range(newest or 0, max(0, (newest or 0) - LAST), -1):
        manifest = read_manifest(bucket, run, version)
        if manifest is not None and manifest.delta is not None:
            sizes.append(manifest.delta.bytes)
    if not sizes:
        raise InputError(
            "the run has no deltas to learn the changed share from",
            hint="give [model] changed, or wait for its next version",
            run=bucket.url,
        )
    values = sum(spec.count for spec in run.tensors)
    wanted = 8 * median(sizes) / values
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        coded = middle * codec.bits_per_change(middle)
        low, high = (low, middle) if coded > wanted else (middle, high)
    return high
