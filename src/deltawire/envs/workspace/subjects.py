# Agents read these functions, which have no annotations, as in much code.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,var-annotated"
"""The parts of the workspaces' packages: correct functions, and faults to plant in them.

The source of a subject goes into the package as it is here, except for a planted fault, which
replaces one piece of text by another. Its docstring is all that the agent knows, so it is complete.
Arguments and results are JSON values.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = list[Any]


def chunks(values, size):
    """Cut a list into lists of ``size`` values, in order; the last one may be shorter.

    Raises ValueError if size is below 1.
    """
    if size < 1:
        raise ValueError("size must be at least 1")
    return [values[start : start + size] for start in range(0, len(values), size)]


def merge_spans(spans):
    """Join spans [first, last] that overlap or touch at a point; sorted by first."""
    merged = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def moving_sums(values, width):
    """The sum of every ``width`` neighbouring values, from the left; none if there are fewer.

    Raises ValueError if width is below 1.
    """
    if width < 1:
        raise ValueError("width must be at least 1")
    return [sum(values[at : at + width]) for at in range(len(values) - width + 1)]


def roman(number):
    """A number in Roman numerals. Raises ValueError unless it is in 1 to 3999."""
    if not 1 <= number <= 3999:
        raise ValueError("out of range")
    text = ""
    for value, letters in (
        (1000, "M"),
        (900, "CM"),
        (500, "D"),
        (400, "CD"),
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ):
        while number >= value:
            text += letters
            number -= value
    return text


def parse_settings(text):
    """Read "name = value; name = value": names and values as text, without spaces around.

    Empty pieces are passed over; a value may contain "="; of a name that comes twice, the last
    value counts. Raises ValueError for a piece without "=".
    """
    settings = {}
    for piece in text.split(";"):
        if not piece.strip():
            continue
        name, sign, value = piece.partition("=")
        if not sign:
            raise ValueError(f"no = in {piece!r}")
        settings[name.strip()] = value.strip()
    return settings


def frequent_words(text, least=1):
    """[word, count] of each word that occurs at least ``least`` times, whatever its case, words
    in lower case; the most frequent first, and in order of the alphabet where counts are equal."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    pairs = [[word, count] for word, count in counts.items() if count >= least]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def rotated(values, steps):
    """A list turned to the right by so many steps (to the left if negative), as a new list."""
    if not values:
        return []
    steps %= len(values)
    return values[len(values) - steps :] + values[: len(values) - steps]


def place_for(values, wanted):
    """Where to insert ``wanted`` in a sorted list to keep it sorted: before any equal values."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def book(moves, stock=None):
    """Apply moves ["add" or "take", name, count] to a stock {name: count}; returns the new stock.

    The stock that is given (none: empty) stays as it is. What has a count of 0 is not listed.
    Raises ValueError for taking more than there is.
    """
    held = dict(stock or {})
    for kind, name, count in moves:
        change = count if kind == "add" else -count
        if held.get(name, 0) + change < 0:
            raise ValueError(f"too few {name}")
        held[name] = held.get(name, 0) + change
    return {name: count for name, count in held.items() if count}


def flattened(values, depth):
    """The values of nested lists in one list; lists deeper than ``depth`` stay as they are.

    Depth 0 changes nothing.
    """
    flat = []
    for value in values:
        if isinstance(value, list) and depth > 0:
            flat.extend(flattened(value, depth - 1))
        else:
            flat.append(value)
    return flat


def newer(left, right):
    """Compare versions such as "1.10.2" by number: 1 if left is newer, -1 if right is, else 0.

    Missing parts count as 0, so "1.2" equals "1.2.0".
    """
    ours = [int(part) for part in left.split(".")]
    theirs = [int(part) for part in right.split(".")]
    length = max(len(ours), len(theirs))
    ours += [0] * (length - len(ours))
    theirs += [0] * (length - len(theirs))
    return (ours > theirs) - (ours < theirs)


def shared_out(total, people):
    """Share a whole number of cents: as evenly as it goes, the first ones getting a cent more.

    Raises ValueError if there are no people or the total is negative.
    """
    if people < 1 or total < 0:
        raise ValueError("nothing to share, or nobody to share with")
    each, rest = divmod(total, people)
    return [each + (place < rest) for place in range(people)]


@dataclass(frozen=True)
class PlantedFault:
    """A fault of a function: its kind, and the text that is replaced by other text."""

    family: str
    old: str
    new: str


@dataclass(frozen=True)
class Subject:
    """A function, its possible names, a generator of arguments, and its faults."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    arguments: Callable[[random.Random], Arguments]
    faults: tuple[PlantedFault, ...]

    def source(self, name: str, fault: PlantedFault | None = None) -> str:
        """The text of the module, with the function named ``name`` and perhaps a fault."""
        text = inspect.getsource(self.function)
        if fault is not None:
            if text.count(fault.old) != 1:
                raise AssertionError(f"{fault} in {self.function.__name__}")
            text = text.replace(fault.old, fault.new)
        return text.replace(f"{self.function.__name__}(", f"{name}(")


def _numbers(rng: random.Random, least: int, most: int, longest: int) -> list[int]:
    return [rng.randint(least, most) for _ in range(rng.randint(0, longest))]


def _spans(rng: random.Random) -> Arguments:
    starts = [rng.randint(0, 20) for _ in range(rng.randint(0, 6))]
    return [[[start, start + rng.randint(0, 6)] for start in starts]]


def _settings(rng: random.Random) -> Arguments:
    pieces = [
        rng.choice(["a=1", " b = two ", "c=x=y", "", "  ", "d=", "a = 7", "= e", "url=h?q=1"])
        for _ in range(rng.randint(0, 5))
    ]
    return [";".join(pieces) + rng.choice(["", "", ";", ";f"])]


def _words(rng: random.Random) -> Arguments:
    words = [rng.choice(["Oak", "oak", "elm", "Ash", "ash", "fir"]) for _ in range(8)]
    return [" ".join(words[: rng.randint(0, 8)]), *([rng.randint(1, 3)] * rng.randint(0, 1))]


def _moves(rng: random.Random) -> Arguments:
    moves = [
        [rng.choice(["add", "add", "take"]), rng.choice("ab"), rng.randint(0, 3)]
        for _ in range(rng.randint(0, 5))
    ]
    return [moves, *([{"a": rng.randint(1, 3), "c": 2}] * rng.randint(0, 1))]


def _nested(rng: random.Random) -> Arguments:
    def value(room: int) -> Any:
        if room and rng.random() < 0.5:
            return [value(room - 1) for _ in range(rng.randint(0, 3))]
        return rng.randint(0, 9)

    return [[value(3) for _ in range(rng.randint(0, 4))], rng.randint(0, 3)]


def _versions(rng: random.Random) -> Arguments:
    def version() -> list[str]:
        return [str(rng.choice([0, 1, 2, 10])) for _ in range(rng.randint(1, 3))]

    left = version()
    right = rng.choice([version(), [*left, "0"], left[:1] + version()])
    return rng.sample([".".join(left), ".".join(right)], 2)


SUBJECTS = (
    Subject(
        chunks,
        ("chunks", "in_pieces", "batched"),
        lambda rng: [_numbers(rng, 0, 9, 8), rng.randint(-1, 4)],
        (
            PlantedFault(
                "boundary", "range(0, len(values), size)", "range(0, len(values) - 1, size)"
            ),
            PlantedFault("guard", "size < 1", "size == 0"),
            PlantedFault("slip", "start : start + size", "start : size"),
        ),
    ),
    Subject(
        merge_spans,
        ("merge_spans", "joined_spans", "union_of"),
        _spans,
        (
            PlantedFault("boundary", "first <= merged", "first < merged"),
            PlantedFault("slip", "max(merged[-1][1], last)", "last"),
            PlantedFault("order", "sorted(spans)", "spans"),
        ),
    ),
    Subject(
        moving_sums,
        ("moving_sums", "window_sums", "sliding_sums"),
        lambda rng: [_numbers(rng, -5, 9, 7), rng.randint(-1, 4)],
        (
            PlantedFault("boundary", "len(values) - width + 1", "len(values) - width"),
            PlantedFault("guard", "width < 1", "width < 0"),
        ),
    ),
    Subject(
        roman,
        ("roman", "numeral", "to_roman"),
        lambda rng: [rng.choice([rng.randint(-9, 60), rng.randint(1, 4400), rng.randint(0, 3)])],
        (
            PlantedFault("boundary", "number >= value", "number > value"),
            PlantedFault("guard", "1 <= number <= 3999", "0 <= number <= 3999"),
            PlantedFault(
                "order",
                '(50, "L"),\n        (40, "XL"),\n        (10, "X"),\n        (9, "IX"),',
                '(50, "L"),\n        (10, "X"),\n        (40, "XL"),\n        (9, "IX"),',
            ),
            PlantedFault("slip", '(400, "CD")', '(400, "DC")'),
        ),
    ),
    Subject(
        parse_settings,
        ("parse_settings", "read_settings", "settings_in"),
        _settings,
        (
            PlantedFault("guard", "if not piece.strip():", "if not piece:"),
            PlantedFault("slip", 'piece.partition("=")', 'piece.rpartition("=")'),
            PlantedFault("order", "= value.strip()", "= name.strip()"),
        ),
    ),
    Subject(
        frequent_words,
        ("frequent_words", "top_words", "word_counts"),
        _words,
        (
            PlantedFault("boundary", "count >= least", "count > least"),
            PlantedFault("order", "(-pair[1], pair[0])", "(pair[0], -pair[1])"),
            PlantedFault("guard", "text.lower().split()", "text.split()"),
            PlantedFault("state", "counts.get(word, 0) + 1", "1"),
        ),
    ),
    Subject(
        rotated,
        ("rotated", "turned", "shifted"),
        lambda rng: [_numbers(rng, 0, 9, 6), rng.randint(-7, 7)],
        (
            PlantedFault("guard", "    if not values:\n        return []\n", ""),
            PlantedFault("order", "steps %= len(values)", "steps = -steps % len(values)"),
            PlantedFault("state", "    steps %=", "    values.append(values.pop(0))\n    steps %="),
        ),
    ),
    Subject(
        place_for,
        ("place_for", "insertion_point", "where_to_insert"),
        lambda rng: [sorted(_numbers(rng, 0, 6, 8)), rng.randint(0, 7)],
        (
            PlantedFault("boundary", "values[middle] < wanted", "values[middle] <= wanted"),
            PlantedFault("slip", "0, len(values)", "0, max(0, len(values) - 1)"),
        ),
    ),
    Subject(
        book,
        ("book", "after_moves", "apply_moves"),
        _moves,
        (
            PlantedFault(
                "state", "held = dict(stock or {})", "held = {} if stock is None else stock"
            ),
            PlantedFault("boundary", "+ change < 0", "+ change <= 0"),
            PlantedFault("guard", " if count}", "}"),
            PlantedFault("slip", 'kind == "add"', 'kind != "take" or count > 2'),
        ),
    ),
    Subject(
        flattened,
        ("flattened", "levelled", "unnested"),
        _nested,
        (
            PlantedFault("boundary", "depth > 0", "depth >= 0"),
            PlantedFault("state", "depth - 1", "depth"),
            PlantedFault("slip", "flat.extend(", "flat.append("),
        ),
    ),
    Subject(
        newer,
        ("newer", "compare_versions", "version_order"),
        _versions,
        (
            PlantedFault(
                "order", "(ours > theirs) - (ours < theirs)", "(ours < theirs) - (ours > theirs)"
            ),
            PlantedFault("guard", "    theirs += [0] * (length - len(theirs))\n", ""),
            PlantedFault("slip", "[int(part) for part in left", "[len(part) for part in left"),
        ),
    ),
    Subject(
        shared_out,
        ("shared_out", "split_evenly", "portions"),
        lambda rng: [rng.randint(-1, 30), rng.randint(0, 6)],
        (
            PlantedFault("boundary", "place < rest", "place <= rest"),
            PlantedFault("guard", "people < 1 or total < 0", "people < 1"),
            PlantedFault("order", "place < rest", "people - place <= rest"),
        ),
    ),
)

FAMILIES = tuple(sorted({fault.family for subject in SUBJECTS for fault in subject.faults}))
"""The kinds of fault: boundary, guard, order, slip, state."""
