"""Parts of ``deltawire live status --json``, and the webhook of ``deltawire live decide``."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from deltawire.config.release import ReleaseConfig
from deltawire.dashboard.live_processes import read_gateways
from deltawire.dashboard.users import users_of
from deltawire.errors import CorruptError, InputError
from deltawire.launch.tokens import read_token
from deltawire.live.release.decision_webhook import DecisionWebhook
from deltawire.live.release.evidence import DifferenceFinding
from deltawire.live.release.lineage import PromotionLineage
from deltawire.live.release.shadow_evidence import ShadowEvidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket
from deltawire.wire.decisions import ServedVersion


def users_row(bucket: Bucket, log: DecisionLog, now: float) -> dict[str, Any] | None:
    """Returns the figures of all gateways; None where none has any. Raises `RetryError`; a damaged
    object is named in the member ``fault``."""
    try:
        found = users_of(read_gateways(bucket), log, now)
    except CorruptError as error:
        return {"fault": error.message}
    return None if found is None else msgspec.to_builtins(found)


def shadow_row(shadow: ShadowEvidence | None, wanted: int) -> dict[str, Any] | None:
    """Returns what a shadow has shown so far; None without one."""
    if shadow is None:
        return None
    return {
        "copies": shadow.copies,
        "wanted": wanted,
        "dropped": shadow.dropped,
        "first_s": {"candidate": shadow.first_s[0], "serving": shadow.first_s[1]},
        "tests": {name: finding_row(one) for name, one in shadow.guardrails.items()},
    }


def lineage_row(found: PromotionLineage, release: ReleaseConfig) -> dict[str, Any]:
    """Returns what promotions have added up to since a person chose a version."""
    return {
        "first": found.first,
        "promotions": found.promotions,
        "spent": found.spent,
        "margin": found.margin,
        "change": math.fsum(found.changes),
        "measured_worse": sum(change < 0 for change in found.changes),
        "bound": release.creep or None,
    }


def finding_row(one: DifferenceFinding) -> dict[str, Any]:
    """Returns one test."""
    return {
        "difference": one.difference,
        "log_evidence": one.log_evidence,
        "log_threshold": one.log_threshold,
        "rejects": one.rejects,
    }


def webhook_of(url: str, secret_file: str, run: str, log: DecisionLog) -> DecisionWebhook | None:
    """Returns the webhook that is told of decisions after those of ``log``; None without a URL.
    Raises `InputError`."""
    if not url:
        if secret_file:
            raise InputError("--webhook-secret-file needs --webhook")
        return None
    secret = read_token(secret_file) if secret_file else ""
    webhook = DecisionWebhook(url, run=run, secret=secret.encode())
    webhook.report_new(log)
    return webhook


def version_row(one: ServedVersion | None) -> dict[str, Any] | None:
    """Returns what serves; None for nothing."""
    if one is None:
        return None
    return {
        "version": None if one.upstream else one.version,
        "digest": "" if one.upstream else one.digest,
        "upstream": one.upstream,
        "attested": not one.upstream,
    }
