"""Evidence of a shadow: guardrails on pairs of answers to one request, the candidate's and the
user's.

Each pair has a difference of −1, 0 or 1 for each guardrail. The tests are those of the canary on
paired differences, and need their counts only, so those of all gateways add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from deltawire.config.release import ReleaseConfig
from deltawire.errors import CorruptError
from deltawire.live.capture.guardrails import SILENT
from deltawire.live.release.evidence import DifferenceFinding, error_budget
from deltawire.live.release.sequential_tests import ArmDifference, log_threshold
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, GatewayState, ShadowCounts
from deltawire.wire.decisions import Decision
from deltawire.wire.objects import decode_json


@dataclass(frozen=True)
class ShadowEvidence:
    """The state of a shadow's tests: ``copies`` that were compared, those that were ``dropped``,
    a test for each guardrail, and the mean seconds until the first token, of the candidate and of
    the users' answers.

    Example::

        shadow_evidence([counts], release).harmful()
    """

    copies: int
    dropped: int
    guardrails: Mapping[str, DifferenceFinding]
    first_s: tuple[float, float]

    def harmful(self) -> list[str]:
        """Returns the names of the guardrails that demand a rollback."""
        return [name for name, one in self.guardrails.items() if one.rejects]

    def figures(self) -> dict[str, float]:
        """Returns the figures that a decision records."""
        found = {
            "shadow_copies": float(self.copies),
            "shadow_dropped": float(self.dropped),
            "shadow_first_s_candidate": self.first_s[0],
            "shadow_first_s_serving": self.first_s[1],
        }
        for name, one in self.guardrails.items():
            found[f"shadow_difference_{name}"] = one.difference
            found[f"log_evidence_shadow_{name}"] = one.log_evidence
        return found


def shadow_evidence(counts: Iterable[ShadowCounts], release: ReleaseConfig) -> ShadowEvidence:
    """Returns what the counts of all gateways say."""
    rose: Counter[str] = Counter()
    fell: Counter[str] = Counter()
    copies = dropped = 0
    first_s = [0.0, 0.0]
    for one in counts:
        copies += one.copies
        dropped += sum(one.dropped.values())
        rose.update(one.rose)
        fell.update(one.fell)
        first_s = [total + more for total, more in zip(first_s, one.first_s, strict=True)]
    threshold = log_threshold(error_budget(release).shadow) if release.shadow else float("inf")
    findings = {}
    for name, tolerance in release.guardrails.items():
        if name == SILENT:
            continue
        test = ArmDifference(tolerance=tolerance)
        same = copies - rose[name] - fell[name]
        test.add_counted(
            np.array([1.0, -1.0, 0.0]), np.array([rose[name], fell[name], same], float)
        )
        findings[str(name)] = DifferenceFinding(test.mean, test.log_evidence, threshold)
    means = (first_s[0] / max(copies, 1), first_s[1] / max(copies, 1))
    return ShadowEvidence(copies, dropped, findings, means)


def read_shadow(bucket: Bucket, decision: Decision) -> list[ShadowCounts]:
    """Reads the counts of all gateways of the shadow that ``decision`` is part of; damaged ones
    and those of other runs are left out. Raises `RetryError`."""
    found = []
    for key in bucket.list(keys.LIVE_GATEWAYS):
        try:
            data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
            if data is None:
                continue
            state = decode_json(data, GatewayState, run=bucket.url, key=key)
        except CorruptError:
            # Fewer copies count: the test holds at any number of them, and is repeated.
            continue
        counts = state.shadow
        fits = state.run == decision.run and key == keys.live_gateway(state.gateway)
        if fits and counts is not None and counts.shadow == decision.salt and not counts.fault():
            found.append(counts)
    return found
