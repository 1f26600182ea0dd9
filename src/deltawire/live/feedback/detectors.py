"""Detectors: signals about an answer that no client reports.

Each is a function of how a conversation went on after the answer. It returns a value, or None if
the conversation says nothing about it. A detector is a signal with errors: rewards name those that
they use, and views show the rate of each. Silence is a detector of the join window
(`deltawire.live.learning.window`), because only the passing of time shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher

COMPARED_CHARACTERS = 4000
SLOW_S = 10.0
"""Seconds until the first token above which an answer counts as slow."""

_DISSATISFIED = re.compile(
    r"^\W*(no|nope|wrong|incorrect|stop|undo|revert)\b"
    r"|\b(that|this|it|which)('s| is| was)? (not|isn'?t|wasn'?t) (right|correct|what|true|working)"
    r"|\b(that|this|it)('s| is| was) (wrong|incorrect|bad|useless|false|broken)"
    r"|\b(doesn'?t|does not|didn'?t|did not|still not|not) (work|compile|help|run|answer)"
    r"|\b(you (misunderstood|missed|forgot|ignored)|try again|not what i (asked|meant|wanted))\b"
    r"|\bi (said|asked|meant|told you)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Continuation:
    """How a conversation went on after an answer.

    ``asked`` is the message that was answered and ``answer`` what was served. ``next_asked`` is the
    user's message in the next request; with ``same_turn`` it replaces ``asked`` instead of
    following the answer. ``quoted`` is the answer as the next request repeats it, None if it does
    not. ``first_s`` are the seconds until the answer's first token.
    """

    asked: str
    answer: str
    next_asked: str
    same_turn: bool
    quoted: str | None
    first_s: float


def dissatisfaction(went: Continuation) -> float | None:
    """1 if the user's next message objects to the answer, by its words, else 0."""
    if went.same_turn:
        return None
    return float(bool(_DISSATISFIED.search(went.next_asked[:COMPARED_CHARACTERS])))


def retry(went: Continuation) -> float | None:
    """1 if the same message was sent once more, 0 if the conversation continued."""
    return float(went.same_turn and went.next_asked == went.asked)


def rephrase(went: Continuation) -> float | None:
    """1 if the message was changed and sent once more, 0 if the conversation continued."""
    return float(went.same_turn and went.next_asked != went.asked)


def edit(went: Continuation) -> float | None:
    """The share of the answer that the next request kept, 1 for all of it.

    It is 2·M / (L₁ + L₂) of difflib: M matching characters, of texts of L₁ and L₂ characters.
    """
    if went.quoted is None:
        return None
    served, quoted = went.answer.strip(), went.quoted.strip()
    if served == quoted:
        return 1.0
    matcher = SequenceMatcher(
        None, served[:COMPARED_CHARACTERS], quoted[:COMPARED_CHARACTERS], autojunk=False
    )
    return matcher.quick_ratio() if len(served) + len(quoted) > 2000 else matcher.ratio()


def latency(went: Continuation) -> float | None:
    """1 if the first token took longer than `SLOW_S`, else 0."""
    return float(went.first_s > SLOW_S)


DETECTORS: dict[str, Callable[[Continuation], float | None]] = {
    "dissatisfaction": dissatisfaction,
    "retry": retry,
    "rephrase": rephrase,
    "edit": edit,
    "latency": latency,
}
"""Detectors by name; each is stored as feedback of the kind ``detected_<name>``."""


class DetectorRates:
    """Counts, for each detector, how many answers it saw and the sum of its values."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(DETECTORS, 0)
        self._sum = dict.fromkeys(DETECTORS, 0.0)

    def detect(self, went: Continuation) -> dict[str, float]:
        """Returns the value of each detector that has one."""
        found: dict[str, float] = {}
        for name, detector in DETECTORS.items():
            value = detector(went)
            if value is not None:
                found[name] = value
                self._seen[name] += 1
                self._sum[name] += value
        return found

    def listed(self) -> dict[str, float]:
        """Returns each detector's mean value, of those that saw an answer."""
        return {name: self._sum[name] / seen for name, seen in self._seen.items() if seen}
