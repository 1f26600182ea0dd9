"""Where an answer ends at one of a client's stop strings. Tokens stay as they were drawn: the
answer keeps those up to the one that completes the string, and its text ends before the string.

A string is looked for in the text of whole answers (`cut`). While an answer is drawn, `StopWatch`
looks at new characters alone, only to end the drawing early; it never decides by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltawire.chat.text import Text


class Cut(NamedTuple):
    """An answer that ends at a stop string: ``tokens`` of it are kept, and say ``kept``; ``said``
    is what stands before the string."""

    tokens: int
    said: str
    kept: str


class IncrementalText:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, text: Text) -> None:
        self.tokens: list[int] = []
        self._text = text
        self._clean = self._shown = 0

    def add(self, token: int) -> str:
        """The text that a token adds; nothing while it ends in half a character."""
        self.tokens.append(token)
        before = self._text.decode(self.tokens[self._clean : self._shown])
        now = self._text.decode(self.tokens[self._clean :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._clean, self._shown = self._shown, len(self.tokens)
        return now[len(before) :]


class StopWatch:
    """Tells while an answer is drawn that it holds one of ``stops``."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._heard = IncrementalText(text)
        self._end = ""

    def add(self, token: int) -> bool:
        """Whether the answer holds one, now that it has this token too."""
        new = self._heard.add(token)
        self._end += new
        near = any(stop in self._end for stop in self._stops)
        self._end = self._end[-max(map(len, self._stops)) :]
        return bool(new) and near and cut(self._text, self._heard.tokens, self._stops) is not None


def cut(text: Text, tokens: Sequence[int], stops: Sequence[str]) -> Cut | None:
    """Where an answer of ``tokens`` ends: at the first token with which its text holds one of
    ``stops``; None if it holds none."""

    def holds(count: int) -> bool:
        said = text.decode(tokens[:count])
        return any(stop in said for stop in stops)

    if not stops or not holds(len(tokens)):
        return None
    low, high = 0, len(tokens)  # The first holds none, the second does.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    kept = text.decode(tokens[:high])
    place = min(at for at in (kept.find(stop) for stop in stops) if at >= 0)
    return Cut(high, kept[:place], kept)


def safe(said: str, stops: Sequence[str]) -> str:
    """What of an answer can be told before it is known how it goes on: all but an end with which
    a stop string may begin, and nothing behind one."""
    ends = [at for at in (said.find(stop) for stop in stops) if at >= 0]
    if ends:
        return said[: min(ends)]
    longest = max(map(len, stops), default=0)
    for length in range(min(longest - 1, len(said)), 0, -1):
        if any(stop.startswith(said[-length:]) for stop in stops):
            return said[:-length]
    return said
