"""Judges recorded log-probabilities by scoring the same tokens, and names what is wrong with them.

A hypothesis says which log-probabilities would have been recorded: those of the dump's own claims,
or of one mistake. It *fits* if the mean gap to what is recorded, each token's at most `MOST`, is
below `TOLERANCE`, which honest bf16 engines stay below. A row that its own claims fit is sound,
unless a mistake fits all rows together three times as well, at more than `DEVIATIONS` standard
errors. A row that they do not fit is named by the first mistake that fits.

Shapes: T tokens of one answer, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.parity.dump_rows import DumpRow

TOLERANCE = 0.1
MOST = 1.0
DEVIATIONS = 6.0
BETTER = 3.0
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

LogProbabilities = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]
"""Returns float32[T, V]: the logits for each token of an answer after a prompt."""


@dataclass(frozen=True)
class DumpModel:
    """A model that dumps are judged by. ``decode`` spells token ids; None without a tokenizer."""

    name: str
    logits: LogProbabilities
    vocabulary: int
    decode: Callable[[Sequence[int]], str] | None = None


class Mistake(msgspec.Struct, frozen=True):
    """Names what is wrong with a row: a word of `CAUSES`, and a sentence."""

    cause: str
    text: str


class DumpReport(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a dump: rows by cause, with a sentence and the first row of each.

    ``mean_gap`` is over the tokens that count of rows that could be scored, each gap at most 1.
    """

    model: str
    rows: int
    tokens: int
    formats: list[str]
    mean_gap: float | None
    sound: bool
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


def examine(
    rows: Iterable[DumpRow],
    model: DumpModel,
    others: Callable[[], Iterable[DumpModel]] = tuple,
) -> DumpReport:
    """Judges rows by a model. ``others`` opens further versions, once a row does not fit."""
    tally = _Tally()
    opened: list[DumpModel] | None = None
    for row in rows:
        tally.rows += 1
        tally.formats.add(row.format)
        mistake = _before_scoring(row, model)
        if mistake is None:
            tally.tokens += int(row.mask.sum())
            mistake = _scored(row, model, tally)
        if mistake is not None and mistake.cause == "unknown":
            opened = list(others()) if opened is None else opened
            mistake = _by_version(row, opened) or mistake
        if mistake is not None:
            tally.wrong.setdefault(mistake.cause, []).append(row.number)
            tally.texts.setdefault(mistake.cause, mistake.text)
    _add_subtle(tally)
    return DumpReport(
        model=model.name,
        rows=tally.rows,
        tokens=tally.tokens,
        formats=sorted(tally.formats),
        mean_gap=tally.gaps.mean if tally.gaps.count else None,
        sound=not tally.wrong and tally.gaps.count > 0,
        wrong_rows={cause: len(rows) for cause, rows in tally.wrong.items()},
        texts={cause: tally.texts[cause] for cause in tally.wrong},
        first_rows={cause: min(rows) for cause, rows in tally.wrong.items()},
    )


def _before_scoring(row: DumpRow, model: DumpModel) -> Mistake | None:
    """Returns what is wrong for certain, without scoring."""
    largest = max((*row.prompt, *row.tokens), default=0)
    if largest >= model.vocabulary:
        return Mistake("tokenizer", f"token {largest} is none of the {model.vocabulary}")
    if row.text is not None and model.decode is not None:
        spelled = model.decode(row.tokens)
        if row.text.strip() not in spelled:
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
    if np.isnan(row.logprobs[row.mask]).any():
        return Mistake("missing", "tokens that count have no log-probability")
    return None


def _scored(row: DumpRow, model: DumpModel, tally: _Tally) -> Mistake | None:
    """Compares one row with what the model gives; returns the first mistake that fits."""
    if not row.mask.any() or not row.prompt:
        return None  # Nothing counts, or there is nothing that the first token follows.
    logits = model.logits(row.prompt, row.tokens)
    stated = row.temperature or 1.0
    own = _chosen(logits, row.tokens, stated)
    gaps = _gaps(row, own)
    zeros = row.mask & (row.logprobs == 0) & (own < -TOLERANCE)
    rest = row.mask & ~zeros
    left_out = ~row.mask & (row.logprobs != 0)
    if not rest.any() and left_out.any() and _fits(_gaps(row, own, left_out)):
        return Mistake("mask", "the mask is wrong: it is inverted")
    if zeros.sum() > 0.02 * row.mask.sum() and (not rest.any() or _fits(_gaps(row, own, rest))):
        text = f"{int(zeros.sum())} of {int(row.mask.sum())} log-probabilities are exactly 0"
        return Mistake("zero-filled", text)
    shown = _hypotheses(row, own, logits, stated)
    if _fits(gaps):
        tally.gaps.add(gaps)
        tally.fitting.append(row.number)
        for key, text, theirs in shown:
            if len(theirs) == len(gaps):
                tally.others.setdefault(key, _Sums()).add(gaps - theirs)
                tally.texts.setdefault(key, text)
        return None
    for key, text, theirs in [*shown, *_masks(row, own), *_exchanged(row, model)]:
        if len(theirs) and _fits(theirs) and theirs.mean() * BETTER < gaps.mean():
            return Mistake(key.split(" ")[0], text)
    return Mistake("unknown", f"the mean gap is {gaps.mean():.2f} nats, and no mistake explains it")


def _hypotheses(
    row: DumpRow, own: Floats, logits: NDArray[np.float32], stated: float
) -> list[tuple[str, str, Floats]]:
    """Returns the mistakes that one pass can tell: key, sentence, and gaps of the tokens that
    count."""
    found = []
    for step, word in ((1, "next"), (-1, "previous")):
        moved, there = np.roll(own, -step), row.mask.copy()
        there[-1 if step > 0 else 0] = False  # It has no next, or no previous, token.
        gaps = _gaps(row, moved, there)
        if there.any():
            found.append(
                (f"shifted {step}", f"each is the log-probability of the {word} token", gaps)
            )
    for temperature in TEMPERATURES:
        if abs(temperature - stated) < 1e-6:
            continue
        gaps = _gaps(row, _chosen(logits, row.tokens, temperature))
        said = "states none" if row.temperature is None else f"states {stated:g}"
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
        if _fits(_gaps(row, _logprobs(row, other))):
            return Mistake("version", f"{other.name} fits")
    return None


def _add_subtle(tally: _Tally) -> None:
    """Names a mistake that fits all sound rows together much better than their claims, though each
    row is within the tolerance: a temperature of 0.9 for 1."""
    if not tally.gaps.count:
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
    return _chosen(model.logits(row.prompt, row.tokens), row.tokens, row.temperature or 1.0)


def _chosen(logits: NDArray[np.float32], tokens: Sequence[int], temperature: float) -> Floats:
    """Returns the log-probability of each token, float64[T]."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    chosen = scaled[np.arange(len(tokens)), list(tokens)]
    found: Floats = chosen - np.log(np.exp(scaled).sum(axis=1))
    return found


def _gaps(row: DumpRow, expected: Floats, mask: NDArray[np.bool_] | None = None) -> Floats:
    """Returns the gap of each token that counts, at most `MOST`."""
    mask = row.mask if mask is None else mask
    gaps = np.abs(expected - row.logprobs)[mask]
    found: Floats = np.minimum(np.nan_to_num(gaps, nan=MOST, posinf=MOST), MOST)
    return found


def _fits(gaps: Floats) -> bool:
    return bool(len(gaps)) and float(gaps.mean()) <= TOLERANCE
