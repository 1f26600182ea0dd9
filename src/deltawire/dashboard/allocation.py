"""Totals of allocation: what was decided about prompts, over all steps of a run."""

from __future__ import annotations

from collections import Counter

import msgspec

from deltawire.dashboard.state import RunState
from deltawire.dashboard.wording import percent


class AllocationTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of `deltawire.events.Allocated` over steps; its fields are explained there.

    ``equal_share`` is the share of judged prompts whose completions all succeeded or all failed.
    ``completions`` counts trained prompts by their number of completions.
    """

    judged: int
    trained: int
    partial: int
    skipped: int
    deferred: int
    passed: int
    equal_share: float
    completions: dict[str, int]
    dropped_tokens: int
    saved_tokens: int

    @classmethod
    def of(cls, state: RunState) -> AllocationTotals | None:
        """Returns the totals of a run; None with a fixed group size, and before its first step."""
        events = list(state.allocated.values())
        if not events:
            return None
        sizes: Counter[str] = Counter()
        for one in events:
            sizes.update(one.completions)
        judged = sum(one.judged for one in events)
        return cls(
            judged=judged,
            trained=sum(one.trained for one in events),
            partial=sum(one.partial for one in events),
            skipped=sum(one.skipped for one in events),
            deferred=sum(one.deferred for one in events),
            passed=sum(one.passed for one in events),
            equal_share=sum(one.equal for one in events) / judged if judged else 0.0,
            completions=dict(sorted(sizes.items(), key=lambda one: int(one[0]))),
            dropped_tokens=sum(one.dropped_tokens for one in events),
            saved_tokens=sum(one.saved_tokens for one in events),
        )

    @property
    def verdicts(self) -> str:
        """The decisions in words."""
        return (
            f"{self.trained:,} trained ({self.partial:,} partial), {self.skipped:,} skipped, "
            f"{self.deferred:,} deferred, {self.passed:,} passed over"
        )

    @property
    def sizes(self) -> str:
        """The completions of trained prompts, as COMPLETIONS: PROMPTS."""
        return ", ".join(f"{size}: {count:,}" for size, count in self.completions.items()) or "-"

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the report."""
        return [
            ("Prompts allocated", self.verdicts),
            ("· completions of a trained prompt: prompts", self.sizes),
            ("· prompts whose completions all succeeded or all failed", percent(self.equal_share)),
            ("· tokens of skipped and deferred prompts", f"{self.dropped_tokens:,}"),
            ("· tokens saved on them, against a fixed size", f"{self.saved_tokens:,}"),
        ]
