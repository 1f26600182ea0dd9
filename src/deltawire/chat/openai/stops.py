"""Ends answers at a client's stop strings. Tokens stay as they were drawn: the answer keeps those
up to the one that completes the string, and its text ends before the string.

`cut` searches the text of whole answers. While an answer is drawn, `StopWatch` looks at new
characters only, to stop drawing early; it never decides where the answer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltawire.chat.text import Text


class Cut(NamedTuple):
    """An answer that ends at a stop string: ``tokens`` are kept, whose text is ``kept``; ``said``
    is the text before the string."""

    tokens: int
    said: str
    kept: str


class IncrementalText:
    """Decodes tokens one by one, in whole characters."""

    def __init__(self, text: Text) -> None:
        self.tokens: list[int] = []
        self._text = text
        self._clean = self._shown = 0

    def add(self, token: int) -> str:
        """The text that a token adds; empty while it ends within a character."""
        self.tokens.append(token)
        before = self._text.decode(self.tokens[self._clean : self._shown])
        now = self._text.decode(self.tokens[self._clean :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._clean, self._shown = self._shown, len(self.tokens)
        return now[len(before) :]


class StopWatch:
    """Detects one of ``stops`` while an answer is drawn."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._heard = IncrementalText(text)
        self._end = ""

    def add(self, token: int) -> bool:
        """Returns whether the answer contains one, including this token."""
        new = self._heard.add(token)
        self._end += new
        near = any(stop in self._end for stop in self._stops)
        self._end = self._end[-max(map(len, self._stops)) :]
        return bool(new) and near and cut(self._text, self._heard.tokens, self._stops) is not None


def cut(text: Text, tokens: Sequence[int], stops: Sequence[str]) -> Cut | None:
    """Cuts an answer at the first token with which its text contains one of ``stops``; None if it
    contains none."""

    def holds(count: int) -> bool:
        said = text.decode(tokens[:count])
        return any(stop in said for stop in stops)

    if not stops or not holds(len(tokens)):
        return None
    low, high = 0, len(tokens)  # The first contains none, the second does.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    kept = text.decode(tokens[:high])
    place = min(at for at in (kept.find(stop) for stop in stops) if at >= 0)
    return Cut(high, kept[:place], kept)


def safe(said: str, stops: Sequence[str]) -> str:
    """The part of an answer that can be sent before the rest is known: without an end with which a
    stop string may begin, and without what follows one."""
    ends = [at for at in (said.find(stop) for stop in stops) if at >= 0]
    if ends:
        return said[: min(ends)]
    longest = max(map(len, stops), default=0)
    for length in range(min(longest - 1, len(said)), 0, -1):
        if any(stop.startswith(said[-length:]) for stop in stops):
            return said[:-length]
    return said
