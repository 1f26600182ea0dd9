"""Marks of an answer: properties of its text that a reward may not see.

A gateway marks each answer before redaction and stores the names of the marks only. The canary's
guardrails test their rates (`deltawire.live.release.outcomes`). Refusals and hedging are detected
by lists of English phrases: measure the error rate of these two on your answers.
"""

from __future__ import annotations

import re

from deltawire.wire.captures import Mark

REFUSED_WITHIN = 200
"""A refusal stands within this many characters from the start."""
HEDGES = 3
"""Hedging phrases from which an answer hedges, if there is one in every `HEDGED_WORDS` words."""
HEDGED_WORDS = 40
GRAM = 4
REPEATED_WORDS = 32
"""Shorter answers are too short to call repetitive."""
DISTINCT = 0.5
"""An answer is repetitive if fewer of its sequences of `GRAM` words are distinct."""
MAX_CHARACTERS = 1 << 16

_REFUSAL = re.compile(
    r"\b(i (can ?not|can['’]?t|won['’]?t|am (not able|unable) to|['’]?m (not able|unable) to)"
    r"|i['’]m (not able|unable) to|(i['’]m |i am )?sorry,? but|as an ai\b)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(perhaps|maybe|possibly|it depends|might be|may be|could be|i think|i believe|"
    r"it seems|it is possible|i['’]m not (sure|certain)|i am not (sure|certain)|arguably)\b",
    re.IGNORECASE,
)


def marks_of(text: str, *, calls: int = 0) -> list[Mark]:
    """Returns the marks of an answer's text; ``calls`` is how many tools it called.

    Example::

        marks_of("I can't help with that.")
    """
    text = text[:MAX_CHARACTERS].strip()
    words = text.split()
    found: list[Mark] = []
    if _REFUSAL.search(text[:REFUSED_WITHIN]):
        found.append("refusal")
    if text.endswith(("?", "？")) and not calls:
        found.append("question")
    hedges = len(_HEDGE.findall(text))
    if hedges >= HEDGES and hedges * HEDGED_WORDS >= len(words):
        found.append("hedging")
    if len(words) >= REPEATED_WORDS:
        grams = list(zip(*(words[start:] for start in range(GRAM)), strict=False))
        if len(set(grams)) < DISTINCT * len(grams):
            found.append("repetition")
    return found
