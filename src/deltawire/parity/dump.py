"""Judges recorded log-probabilities by scoring the same tokens, and names what is wrong with them.

A hypothesis says which log-probabilities would have been recorded: those of the dump's own claims,
or of one mistake. It *fits* if the mean gap to what is recorded, each token's at most `MOST`, is
below `TOLERANCE`, which honest bf16 engines stay below. A row that its own claims fit is sound,
unless a mistake fits all rows together three times as well, over at least `MANY` tokens and at
more than `DEVIATIONS` standard errors. A row that they do not fit is named by the first mistake
that fits.

Single tokens of an honest engine are often further off. So rows in which fewer than `SHORT` tokens
count are judged together: those that do not fit are named only if the short rows as a whole do not,
or if more than `SHARE` of them are far off; `_limit` has the bound.

Shapes: T tokens of one answer, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError
from deltawire.parity.dump_rows import DumpRow

TOLERANCE = 0.1
MOST = 1.0
SHORT, SHARE = 16, 0.02
MANY, DEVIATIONS = 64, 6.0
BETTER = 3.0
TOGETHER = 128
"""Tokens whose probabilities are computed together, in float64[TOGETHER, V]."""
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)

CAUSES = {
    "zero-filled": "log-probabilities of exactly 0 that the model does not give",
    "missing": "tokens that count have no log-probability",
    "lengths": "there are more or fewer log-probabilities than tokens",
    "shifted": "each log-probability is the next or the previous token's",
    "temperature": "computed at another temperature than the dump states",
    "mask": "the mask selects other tokens than those that have log-probabilities",
    "exchanged": "prompt and answer are in each other's places",
    "version": "another given version fits",
    "tokenizer": "token ids that the model does not have, or that do not spell the dump's text",
    "unknown": "no mistake that was tried fits",
}
"""The words for what is wrong, and what they mean."""

Floats = NDArray[np.float64]


class RowLogits(Protocol):
    """The logits for each token of an answer: a slice of them is float32[tokens, V]."""

    def __getitem__(self, part: slice, /) -> NDArray[np.float32]: ...


LogProbabilities = Callable[[Sequence[int], Sequence[int]], RowLogits]
"""Returns the logits for each token of an answer after a prompt; an array of float32[T, V] does."""


@dataclass(frozen=True)
class DumpModel:
    """A model that dumps are judged by. ``decode`` spells token ids; None without a tokenizer.
    ``special`` are ids that texts may leave out, ``context`` the most tokens that it takes, and
    ``room`` the most for which there is memory."""

    name: str
    logits: LogProbabilities
    vocabulary: int
    decode: Callable[[Sequence[int]], str] | None = None
    special: frozenset[int] = frozenset()
    context: int | None = None
    room: int | None = None


class Mistake(msgspec.Struct, frozen=True):
    """Names what is wrong with a row: a word of `CAUSES`, and a sentence."""

    cause: str
    text: str


class DumpReport(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a dump: rows by cause, with a sentence and the first row of each.

    ``mean_gap`` is over the tokens that count of rows that could be scored, each gap at most 1.
    ``unjudged`` rows have no token that counts.
    """

    model: str
    rows: int
    tokens: int
    formats: list[str]
    mean_gap: float | None
    sound: bool
    unjudged: int
    wrong_rows: dict[str, int]
    texts: dict[str, str]
    first_rows: dict[str, int]


@dataclass
class _Sums:
    """Counts the values of rows, and sums them and their squares."""

    rows: int = 0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Floats) -> None:
        self.rows += 1
        self.count += len(values)
        self.total += float(values.sum())
        self.squares += float(np.square(values).sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        variance = max(self.squares / self.count - self.mean**2, 0.0)
        return float(np.sqrt(variance / self.count))


@dataclass(frozen=True)
class _Compared:
    """The gaps of a row's tokens that count, and key, sentence and gaps of mistakes."""

    gaps: Floats
    shown: list[tuple[str, str, Floats]]


@dataclass(frozen=True)
class _Doubt:
    """A short row that its own claims do not fit, and what its mistake is if it is wrong."""

    number: int
    compared: _Compared
    mistake: Mistake


@dataclass
class _Tally:
    gaps: _Sums = field(default_factory=_Sums)
    fitting: list[int] = field(default_factory=list)
    others: dict[str, _Sums] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, list[int]] = field(default_factory=dict)
    formats: set[str] = field(default_factory=set)
    tokens: int = 0
    rows: int = 0
    unjudged: int = 0
    short: _Sums = field(default_factory=_Sums)
    doubts: list[_Doubt] = field(default_factory=list)

    def add_sound(self, number: int, row: _Compared) -> None:
        """Counts a row among the sound ones, with what mistakes would make of it."""
        self.gaps.add(row.gaps)
        self.fitting.append(number)
        for key, text, theirs in row.shown:
            if len(theirs) == len(row.gaps):
                self.others.setdefault(key, _Sums()).add(row.gaps - theirs)
                self.texts.setdefault(key, text)


def examine(
    rows: Iterable[DumpRow],
    model: DumpModel,
    others: Callable[[], Iterable[DumpModel]] = tuple,
) -> DumpReport:
    """Judges rows by a model. ``others`` opens further versions, once a row does not fit. Raises
    `InputError` for a row of more tokens than the model takes, or than memory is enough for."""
    tally = _Tally()
    opened: list[DumpModel] | None = None
    for row in rows:
        tally.rows += 1
        tally.formats.add(row.format)
        mistake, doubted = _before_scoring(row, model), None
        if mistake is None:
            tally.tokens += int(row.mask.sum())
            mistake, doubted = _scored(row, model, tally)
        if mistake is not None and mistake.cause == "unknown":
            opened = list(others()) if opened is None else opened
            mistake = _by_version(row, opened) or mistake
        if mistake is not None and doubted is not None:
            tally.doubts.append(_Doubt(row.number, doubted, mistake))
        elif mistake is not None:
            _name(tally, row.number, mistake)
    _settle(tally)
    _add_subtle(tally)
    return DumpReport(
        model=model.name,
        rows=tally.rows,
        tokens=tally.tokens,
        formats=sorted(tally.formats),
        mean_gap=tally.gaps.mean if tally.gaps.count else None,
        sound=not tally.wrong and tally.gaps.count > 0,
        unjudged=tally.unjudged,
        wrong_rows={cause: len(rows) for cause, rows in tally.wrong.items()},
        texts={cause: tally.texts[cause] for cause in tally.wrong},
        first_rows={cause: min(rows) for cause, rows in tally.wrong.items()},
    )


def _before_scoring(row: DumpRow, model: DumpModel) -> Mistake | None:
    """Returns what is wrong for certain, without scoring."""
    largest = max((*row.prompt, *row.tokens), default=0)
    if largest >= model.vocabulary:
        return Mistake("tokenizer", f"token {largest} is none of the {model.vocabulary}")
    count = len(row.prompt) + len(row.tokens)
    if model.context is not None and count > model.context:
        raise InputError(f"row {row.number} has {count} tokens; the model takes {model.context}")
    if model.room is not None and count > model.room:
        raise InputError(
            f"row {row.number} has {count} tokens; memory is enough for {model.room}",
            hint="use a machine with more memory, or another --device",
        )
    if row.text is not None and not _spells(row, row.text, model):
        return Mistake("tokenizer", "the tokens do not spell the dump's text")
    if len(row.logprobs) == len(row.prompt) != len(row.tokens) and row.tokens:
        tokens, prompt = np.ones(len(row.prompt), np.bool_), row.tokens
        turned = DumpRow(
            row.number, row.format, prompt, row.prompt, row.logprobs, tokens, row.temperature
        )
        if _fits(_gaps(turned, _logprobs(turned, model))):
            return Mistake("exchanged", "the prompt's tokens have the answer's log-probabilities")
    if not len(row.tokens) == len(row.logprobs) == len(row.mask):
        return Mistake(
            "lengths",
            f"{len(row.tokens)} tokens, {len(row.logprobs)} log-probabilities and a mask of "
            f"{len(row.mask)}",
        )
    if not np.isfinite(row.logprobs[row.mask]).all():
        return Mistake("missing", "tokens that count have no log-probability")
    return None


def _spells(row: DumpRow, text: str, model: DumpModel) -> bool:
    """Returns whether the tokens spell a text, in which special tokens may be left out, and white
    space cleaned up."""
    if model.decode is None:
        return True
    plain = [token for token in row.tokens if token not in model.special]
    wanted = "".join(text.split())
    return any(wanted in "".join(model.decode(one).split()) for one in (row.tokens, plain))


def _name(tally: _Tally, number: int, mistake: Mistake) -> None:
    tally.wrong.setdefault(mistake.cause, []).append(number)
    tally.texts.setdefault(mistake.cause, mistake.text)


def _limit(count: int) -> float:
    """Returns the mean gap of so many tokens that only wrong ones have. Single tokens of
    SmolLM2-135M in bf16 had 0.038 nats in the mean and 0.73 at most of 2,304."""
    return TOLERANCE + 0.4 / float(np.sqrt(count))


def _settle(tally: _Tally) -> None:
    """Names the short rows that do not fit, or counts them among the sound ones."""
    if not tally.doubts:
        return
    doubted = [one.compared.gaps for one in tally.doubts]
    far = sum(gaps.mean() > _limit(len(gaps)) for gaps in doubted)
    as_a_whole = tally.short.mean > _limit(tally.short.count)
    if as_a_whole or far > max(1, SHARE * tally.short.rows) or far == tally.short.rows:
        for one in tally.doubts:
            _name(tally, one.number, one.mistake)
        return
    for one in tally.doubts:
        tally.add_sound(one.number, one.compared)


def _scored(
    row: DumpRow, model: DumpModel, tally: _Tally
) -> tuple[Mistake | None, _Compared | None]:
    """Compares one row with what the model gives; returns the first mistake that fits, and the
    comparison if the row is too short to be judged by itself."""
    if not row.mask.any():
        tally.unjudged += 1
        return None, None
    logits = model.logits(row.prompt, row.tokens)
    stated = row.temperature or 1.0
    temperatures = [stated, *(one for one in TEMPERATURES if abs(one - stated) >= 1e-6)]
    at = dict(zip(temperatures, _chosen(logits, row.tokens, temperatures), strict=True))
    own = at.pop(stated)
    gaps = _gaps(row, own)
    zeros = row.mask & (row.logprobs == 0) & (own < -TOLERANCE)
    rest = row.mask & ~zeros
    left_out = ~row.mask & (row.logprobs != 0)
    if not rest.any() and left_out.any() and _fits(_gaps(row, own, left_out)):
        return Mistake("mask", "the mask is wrong: it is inverted"), None
    if zeros.sum() > 0.02 * row.mask.sum() and (not rest.any() or _fits(_gaps(row, own, rest))):
        text = f"{int(zeros.sum())} of {int(row.mask.sum())} log-probabilities are exactly 0"
        return Mistake("zero-filled", text), None
    short = len(gaps) < SHORT
    if short:
        tally.short.add(gaps)
    compared = _Compared(gaps, _hypotheses(row, own, at))
    if _fits(gaps):
        tally.add_sound(row.number, compared)
        return None, None
    doubted = compared if short else None
    for key, text, theirs in [*compared.shown, *_masks(row, own), *_exchanged(row, model)]:
        if len(theirs) and _fits(theirs) and theirs.mean() * BETTER < gaps.mean():
            return Mistake(key.split(" ")[0], text), doubted
    text = f"the mean gap is {gaps.mean():.2f} nats, and no mistake explains it"
    return Mistake("unknown", text), doubted


def _hypotheses(
    row: DumpRow, own: Floats, at: Mapping[float, Floats]
) -> list[tuple[str, str, Floats]]:
    """Returns the mistakes that one pass can tell: key, sentence, and gaps of the tokens that
    count. ``at`` has the log-probabilities at other temperatures."""
    found = []
    for step, word in ((1, "next"), (-1, "previous")):
        moved, there = np.roll(own, -step), row.mask.copy()
        there[-1 if step > 0 else 0] = False  # It has no next, or no previous, token.
        gaps = _gaps(row, moved, there)
        if there.any():
            found.append(
                (f"shifted {step}", f"each is the log-probability of the {word} token", gaps)
            )
    for temperature, logprobs in at.items():
        gaps = _gaps(row, logprobs)
        said = "states none" if row.temperature is None else f"states {row.temperature:g}"
        text = f"they are those at temperature {temperature:g}; the dump {said}"
        found.append((f"temperature {temperature}", text, gaps))
    # Temperature 1 first, for a temperature that was forgotten, then the nearest fit.
    return sorted(found, key=lambda one: (not one[0].startswith("shifted"), one[2].mean()))


def _masks(row: DumpRow, own: Floats) -> Iterator[tuple[str, str, Floats]]:
    """Yields other masks under which the recorded values fit, while some of this mask's do not."""
    candidates = {
        "it is inverted": ~row.mask,
        "it begins one token late": np.append(row.mask[1:], row.mask[-1:]),
        "it begins one token early": np.append(row.mask[:1], row.mask[:-1]),
    }
    recorded = np.isfinite(row.logprobs) & (row.logprobs != 0)
    if recorded.any():
        candidates["it selects tokens without log-probabilities"] = recorded
    for text, mask in candidates.items():
        if mask.any() and not np.isnan(row.logprobs[mask]).any():
            yield "mask", f"the mask is wrong: {text}", _gaps(row, own, mask)


def _exchanged(row: DumpRow, model: DumpModel) -> Iterator[tuple[str, str, Floats]]:
    if len(row.prompt) != len(row.tokens):
        return
    turned = DumpRow(
        row.number, row.format, row.tokens, row.prompt, row.logprobs, row.mask, row.temperature
    )
    text = "the prompt's tokens have the answer's log-probabilities"
    yield "exchanged", text, _gaps(turned, _logprobs(turned, model))


def _by_version(row: DumpRow, others: Sequence[DumpModel]) -> Mistake | None:
    for other in others:
        if max(*row.prompt, *row.tokens) >= other.vocabulary:
            continue
        count = len(row.prompt) + len(row.tokens)
        if any(most is not None and count > most for most in (other.context, other.room)):
            continue
        if _fits(_gaps(row, _logprobs(row, other))):
            return Mistake("version", f"{other.name} fits")
    return None


def _add_subtle(tally: _Tally) -> None:
    """Names a mistake that fits all sound rows together much better than their claims, though each
    row is within the tolerance: a temperature of 0.9 for 1."""
    if tally.gaps.count < MANY:
        return
    mean = tally.gaps.mean
    found = []
    for key, better in tally.others.items():
        theirs = mean - better.mean
        if (
            better.rows == tally.gaps.rows
            and better.mean > DEVIATIONS * (better.error + 1e-12)
            and theirs * BETTER < mean
        ):
            found.append((theirs, key))
    if found:
        key = min(found)[1]
        cause = key.split(" ")[0]
        tally.wrong.setdefault(cause, []).extend(tally.fitting)
        tally.texts[cause] = tally.texts[key]


def _logprobs(row: DumpRow, model: DumpModel) -> Floats:
    logits = model.logits(row.prompt, row.tokens)
    found: Floats = _chosen(logits, row.tokens, [row.temperature or 1.0])[0]
    return found


def _chosen(logits: RowLogits, tokens: Sequence[int], temperatures: Sequence[float]) -> Floats:
    """Returns the log-probability of each token at each temperature, float64[temperatures, T]."""
    found = np.empty((len(temperatures), len(tokens)), np.float64)
    for first in range(0, len(tokens), TOGETHER):
        part = slice(first, first + TOGETHER)
        given = logits[part].astype(np.float64)
        for number, temperature in enumerate(temperatures):
            scaled = given / temperature
            scaled -= scaled.max(axis=1, keepdims=True)
            chosen = scaled[np.arange(len(scaled)), list(tokens[part])]
            found[number, part] = chosen - np.log(np.exp(scaled).sum(axis=1))
    return found


def _gaps(row: DumpRow, expected: Floats, mask: NDArray[np.bool_] | None = None) -> Floats:
    """Returns the gap of each token that counts, at most `MOST`."""
    mask = row.mask if mask is None else mask
    gaps = np.abs(expected - row.logprobs)[mask]
    found: Floats = np.minimum(np.nan_to_num(gaps, nan=MOST, posinf=MOST), MOST)
    return found


def _fits(gaps: Floats) -> bool:
    return bool(len(gaps)) and float(gaps.mean()) <= TOLERANCE
