"""A canary in a bucket, and rows of its answers."""

import itertools

from live_answers import NOW, answer, config_of

from deltawire.live.release.canary_outcomes import CanaryOutcomes
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.captures import Capture, encode_row, encode_segment
from deltawire.wire.decisions import CANDIDATE, Decision, ServedVersion

OLD, NEW = ServedVersion(0, "0" * 32), ServedVersion(2, "2" * 32)
RELEASE = {
    "stages": [0.5], "outcome_after_s": 55.0, "horizon_s": 10.0, "slow_s": 5.0, "long_tokens": 8,
}  # fmt: skip
GATEWAY = "g0"


class Canary:
    """A bucket whose newest decision is a canary at a share of 0.5."""

    def __init__(self, **release):
        self.bucket = open_bucket("memory://", create=True)
        self.config = config_of(release={**RELEASE, **release})
        self.log = DecisionLog(self.bucket, "1" * 32)
        self.numbers = {Capture: itertools.count(), None: itertools.count()}
        self.outcomes = CanaryOutcomes(self.bucket, self.config.live)

    def decide(self, verdict, serving=OLD, candidate=None, **facts):
        number = self.log.next_number
        decision = Decision(
            number=number, run="1" * 32, verdict=verdict, serving=serving, candidate=candidate,
            at=NOW - 100, by="ann", **facts,
        )  # fmt: skip
        assert self.log.append(decision)

    def begin(self):
        return self.begin_at(0.5)

    def begin_at(self, share):
        self.decide("serve")
        self.decide("gate", candidate=NEW)
        self.decide("canary", candidate=NEW, share=share, salt="s")
        return self

    def put(self, *rows):
        captures = [row for row in rows if isinstance(row, Capture)]
        for kind, some, key in (
            (Capture, captures, keys.live_captures),
            (None, [row for row in rows if row not in captures], keys.live_feedback),
        ):
            if some:
                number = next(self.numbers[kind])
                data = encode_segment(GATEWAY, number, [encode_row(row) for row in some])
                self.bucket.create(key(GATEWAY, number), data)

    def poll(self, now):
        return self.outcomes.poll(self.log, now)

    def held(self):
        return len(self.outcomes.records.answers), len(self.outcomes.records.reports)


def shown(number, arm=CANDIDATE, *, propensity=0.5, **changes):
    """An answer of the canary."""
    version = NEW.version if arm == CANDIDATE else OLD.version
    spans = [(version, changes.get("tokens", 4))]
    return answer(number, arm=arm, propensity=propensity, **{"spans": spans} | changes)


def counts(evidence):
    return evidence.counts[0.5]
