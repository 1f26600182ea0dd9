"""Compares the features that a run needs with those that this build has, before a process joins."""

from __future__ import annotations

from deltawire.builds import build_name, release_of
from deltawire.config import RunConfig, run_config
from deltawire.config.features import FEATURES, features_of, without_features
from deltawire.errors import InputError
from deltawire.wire.run import Need, Run

MAX_NAMED = 4


def needs_of(config: RunConfig) -> list[Need]:
    """Returns what a run with this configuration needs of its processes."""
    return [
        Need(feature=name, since=FEATURES[name].since, roles=list(FEATURES[name].roles))
        for name in features_of(config)
    ]


def check_needs(run: Run, role: str, *, url: str) -> None:
    """Raises `InputError` if a process of ``role`` lacks a feature that it needs for this run,
    naming the features and the release that has them."""
    needed = [need for need in _missing(run) if role == "trainer" or role in need.roles]
    if needed:
        since = max((need.since for need in needed), key=release_of)
        names = ", ".join(need.feature for need in needed[:MAX_NAMED])
        more = f" and {len(needed) - MAX_NAMED} more" if len(needed) > MAX_NAMED else ""
        raise InputError(
            f"this run needs deltawire {since} for {names}{more}; this {role} is {build_name()}",
            hint="start it with that release or a later one (docs/UPGRADING.md)",
            run=url,
        )


def config_of(run: Run, *, url: str, role: str = "") -> RunConfig:
    """Returns a run's configuration for a process of ``role``; without one, for a view.

    Features that this build does not have are left out if the role does not act on them. Raises
    `InputError` as `check_needs` does, for a run without a configuration, and for one that this
    build cannot read.
    """
    if role:
        check_needs(run, role, url=url)
    raw = without_features(run.config, [need.feature for need in _missing(run)])
    return run_config(raw, url=url, created_by=run.build)


def _missing(run: Run) -> list[Need]:
    return [need for need in run.needs if need.feature not in FEATURES]
