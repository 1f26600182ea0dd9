"""Guardrails: which of them an answer touches, by facts that need no feedback.

Gateways judge copies of requests with it, and canaries judge captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from deltawire.config.release import ReleaseConfig
from deltawire.wire.captures import FAILED, FILTERED, LEFT, TIMED_OUT, Capture, Mark

OF_EVERY_ANSWER = frozenset({"error", "left", "slow", "cut_off", "silent"})
"""The guardrails of answers that may not be stored: the others need their text or tokens."""
SILENT = "silent"
"""The guardrail that needs feedback: no answer touches it by itself."""


@dataclass(frozen=True)
class AnswerFacts:
    """The facts of an answer that guardrails judge: how it ended, the seconds until its first
    token, how many tokens it has (None if that is unknown), its calls that are no valid ones, and
    the marks of its text.

    Example::

        touches("slow", AnswerFacts(first_s=12.0), ReleaseConfig())
    """

    finish: str = ""
    first_s: float = 0.0
    tokens: int | None = None
    broken_calls: int = 0
    marks: Sequence[str] = ()

    @classmethod
    def of(cls, answer: Capture) -> AnswerFacts:
        """Returns the facts of a captured answer."""
        return cls(
            answer.finish,
            answer.first_s,
            len(answer.tokens) // 4 or answer.drawn,
            answer.broken_calls,
            answer.marks,
        )


def touches(name: str, answer: AnswerFacts, release: ReleaseConfig) -> bool:
    """Returns whether an answer touches the guardrail ``name``; never `SILENT`."""
    if name == "error":
        return answer.finish in (FAILED, TIMED_OUT, FILTERED)
    if name == "left":
        return answer.finish == LEFT
    if name in get_args(Mark):
        return name in answer.marks
    if name == "slow":
        return answer.first_s > release.slow_s
    if name == "broken_call":
        return answer.broken_calls > 0
    if name == "cut_off":
        return answer.finish == "length"
    return name == "long" and (answer.tokens or 0) > release.long_tokens
