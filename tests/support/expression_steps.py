"""Counts the steps of a regular expression: a slow twin of `re` that backtracks as it does.

One step is one attempt to match a character, a position or a repetition's next round. The engine in
C does the same work, or less of it where it skips ahead, so a text for which these steps grow in
proportion to its length takes it time in proportion, whatever the machine does meanwhile.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Then = Callable[[int], "int | None"]
_ONE = (kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN)
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_CLASSES = {
    "DIGIT": r"\d",
    "NOT_DIGIT": r"\D",
    "SPACE": r"\s",
    "NOT_SPACE": r"\S",
    "WORD": r"\w",
    "NOT_WORD": r"\W",
}


def hard_texts(pattern: str, flags: int) -> set[tuple[str, str]]:
    """Returns (beginning, repeated text) of what an expression is slowest on.

    Of each long repetition what it takes, the same after a character that the expression names, and
    spaces; and what almost matches, many times.
    """
    marks = {c for c in pattern if c in "_.<[{`:-@/ "}
    pumps = [("", "a")]
    whole = _sample(parser.parse(pattern, flags), pumps, marks, "")
    pumps += [(start, one * 2 + " ") for start, one in pumps[:1]]
    pumps += [("", whole[:n]) for n in (len(whole) - 1, len(whole) // 2, 1) if n > 0]
    return {(start, one) for start, one in pumps if one}


def _sample(tree: Any, pumps: list[tuple[str, str]], marks: set[str], prefix: str) -> str:
    """Returns a text that matches, and adds to ``pumps``."""
    text = ""
    for kind, value in tree:
        before = prefix + text
        if kind is kinds.LITERAL:
            text += chr(value)
        elif kind is kinds.NOT_LITERAL:
            text += "a" if chr(value) != "a" else "b"
        elif kind is kinds.ANY:
            text += "a"
        elif kind is kinds.IN:
            text += _letter(value)
        elif kind is kinds.SUBPATTERN:
            text += _sample(value[3], pumps, marks, before)
        elif kind is kinds.ATOMIC_GROUP:
            text += _sample(value, pumps, marks, before)
        elif kind is kinds.BRANCH:
            text += [_sample(one, pumps, marks, before) for one in value[1][::-1]][-1]
        elif kind in _REPEATS:
            low, high, inner = value
            one = _sample(inner, pumps, marks, before)
            if high > 1000:
                pumps += [(before, mark + one) for mark in ("", *marks)] + [(before, " ")]
            text += one * max(low, 1)
        elif kind is kinds.ASSERT:
            found = _sample(value[1], pumps, marks, before)
            text += found if value[0] < 0 else ""
    return text


def _letter(items: list[Any]) -> str:
    """A character of a class: a space or a letter if it has one."""
    characters = map(chr, [32, 97, 65, 48, 45, 91, 60, 58, *range(33, 127), 10])
    return next((c for c in characters if re.match(class_of(items), c)), "a")


@contextmanager
def _deep() -> Iterator[None]:
    """Allows some calls for each character: the rest of a match is a call within it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class TooManyStepsError(Exception):
    """A match took more steps than its budget."""


class Counted:
    """An expression whose steps are counted.

    Example::

        one = Counted(r"a*b")
        one.spans("aab")    # [(0, 3)], as re finds them
        one.steps           # 4 characters were tried
    """

    def __init__(self, pattern: str, flags: int = 0, *, budget: int = 1 << 24) -> None:
        tree = parser.parse(pattern, flags)
        self._tree, self._flags = list(tree), tree.state.flags
        self._text, self._budget, self.steps = "", budget, 0
        self._fits: dict[tuple[Any, Any, str], bool] = {}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The matches that `re.finditer` finds."""
        with _deep():
            return list(self._search(text))

    def match(self, text: str) -> int | None:
        """Where a match at the beginning ends, None if there is none."""
        self._text = text
        with _deep():
            return self._run(self._tree, 0, 0, lambda end: end)

    def _search(self, text: str) -> Iterator[tuple[int, int]]:
        self._text, start, empty = text, 0, -1
        while start <= len(text):
            end = self._run(
                self._tree,
                0,
                start,
                lambda end, at=start, no=empty: None if end == at == no else end,
            )
            if end is None:
                start += 1
                continue
            yield start, end
            start, empty = end, end if end == start else -1

    def _ends(self, start: int, empty: int) -> int | None:
        """Where the match at ``start`` ends, which is not empty if one at ``empty`` was."""
        return self._run(self._tree, 0, start, lambda end: None if end == start == empty else end)

    def _count(self) -> None:
        self.steps += 1
        if self.steps > self._budget:
            raise TooManyStepsError

    def _run(self, items: list[Any], place: int, at: int, then: Then) -> int | None:
        if place == len(items):
            return then(at)
        kind, value = items[place]

        def rest(after: int) -> int | None:
            return self._run(items, place + 1, after, then)

        if kind in _ONE:
            return rest(at + 1) if self._one(kind, value, at) else None
        if kind in _REPEATS:
            return self._repeat(kind, *value, at, rest)
        if kind is kinds.SUBPATTERN:
            return self._run(list(value[3]), 0, at, rest)
        if kind is kinds.BRANCH:
            ends = (self._run(list(branch), 0, at, rest) for branch in value[1])
            return next((end for end in ends if end is not None), None)
        if kind is kinds.ATOMIC_GROUP:
            end = self._run(list(value), 0, at, lambda end: end)
            return None if end is None else rest(end)
        if kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            return rest(at) if self._looks(value, at) is (kind is kinds.ASSERT) else None
        assert kind is kinds.AT, kind
        return rest(at) if self._stands(str(value), at) else None

    def _repeat(
        self, kind: Any, low: int, high: Any, inner: Any, at: int, rest: Then
    ) -> int | None:
        most = sys.maxsize if high is kinds.MAXREPEAT else high
        inner = list(inner)
        if len(inner) == 1 and inner[0][0] in _ONE:
            return self._repeat_one(kind, low, most, inner[0], at, rest)
        if kind is kinds.POSSESSIVE_REPEAT:
            rounds = 0
            while rounds < most:
                end = self._run(inner, 0, at, lambda end: end)
                if end is None or end == at:
                    break
                at, rounds = end, rounds + 1
            return rest(at) if rounds >= low else None

        def more(rounds: int, at: int) -> int | None:
            self._count()
            if rounds >= most:
                return None
            return self._run(
                inner,
                0,
                at,
                lambda end: None if end == at and rounds >= low else go(rounds + 1, end),
            )

        def go(rounds: int, at: int) -> int | None:
            if rounds < low:
                return more(rounds, at)
            first, second = (more, lambda _, at: rest(at))
            if kind is kinds.MIN_REPEAT:
                first, second = second, first
            end = first(rounds, at)
            return second(rounds, at) if end is None else end

        return go(0, at)

    def _repeat_one(
        self, kind: Any, low: int, most: int, item: Any, at: int, rest: Then
    ) -> int | None:
        count, lazy = 0, kind is kinds.MIN_REPEAT
        while count < (low if lazy else most) and self._one(*item, at + count):
            count += 1
        if count < low:
            return None
        if kind is kinds.POSSESSIVE_REPEAT:
            return rest(at + count)
        while True:
            self._count()
            end = rest(at + count)
            if end is not None:
                return end
            if lazy:
                if count >= most or not self._one(*item, at + count):
                    return None
                count += 1
            elif count == low:
                return None
            else:
                count -= 1

    def _one(self, kind: Any, value: Any, at: int) -> bool:
        self._count()
        if at >= len(self._text):
            return False
        # The parsed expression lives as long as this object, so no two classes have one id.
        known = (value if isinstance(value, int) else id(value), kind, self._text[at])
        if known not in self._fits:
            self._fits[known] = self._fit(kind, value, self._text[at])
        return self._fits[known]

    def _fit(self, kind: Any, value: Any, character: str) -> bool:
        text = {
            kinds.LITERAL: lambda: re.escape(chr(value)),
            kinds.NOT_LITERAL: lambda: f"[^{re.escape(chr(value))}]",
            kinds.ANY: lambda: ".",
            kinds.IN: lambda: class_of(value),
        }[kind]()
        return re.fullmatch(text, character, self._flags) is not None

    def _looks(self, value: Any, at: int) -> bool:
        direction, inner = value
        if direction < 0:
            at -= inner.getwidth()[0]
        return at >= 0 and self._run(list(inner), 0, at, lambda end: end) is not None

    def _stands(self, name: str, at: int) -> bool:
        self._count()
        text, lines = self._text, self._flags & re.MULTILINE
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            at_line = name == "AT_BEGINNING" and lines and at > 0 and text[at - 1] == "\n"
            return at == 0 or bool(at_line)
        if name in ("AT_END", "AT_END_STRING"):
            last = at == len(text) - 1 or bool(lines)
            return at == len(text) or (name == "AT_END" and last and text[at] == "\n")
        within = [
            0 <= n < len(text) and re.match(r"\w", text[n], self._flags) is not None
            for n in (at - 1, at)
        ]
        return (within[0] != within[1]) is (name == "AT_BOUNDARY")


def class_of(items: list[Any]) -> str:
    """The text of a class of characters."""
    text, negated = "", ""
    for kind, value in items:
        if kind is kinds.NEGATE:
            negated = "^"
        elif kind is kinds.LITERAL:
            text += re.escape(chr(value))
        elif kind is kinds.RANGE:
            text += "-".join(re.escape(chr(end)) for end in value)
        else:
            text += _CLASSES[str(value).removeprefix("CATEGORY_")]
    return f"[{negated}{text}]"
