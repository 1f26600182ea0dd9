"""Writes the page of ``diff``: which weights changed, and how answers differ, with pictures.

One file without scripts and without references to other files. Names come from buckets and answers
from models, so each text is escaped where it enters the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from deltawire.dashboard.report import PAGE
from deltawire.display import legible, legible_lines
from deltawire.errors import InputError
from deltawire.launch.branches.answer_differences import (
    AnswerDifference,
    AnswerPair,
    AnswerTokens,
    prompt_ends,
)
from deltawire.launch.branches.differences import BitDifference

SHOWN_PAIRS = 20
BAR = 22
"""Height of a bar with its gap, in units of the picture."""
WIDTH = 960
WIDEST = 48
"""The widest bar of a place in the answer: answers may have one token."""
LABEL = 210
FULL_KL = 1.0
"""The divergence of a token, in nats, from which its mark is strongest."""
_STYLE = """
.bars rect { fill: var(--sample); } .bars text { fill: var(--muted); font: 13px var(--font); }
.bars text.value { fill: var(--ink); font-variant-numeric: tabular-nums; }
.answer, .prompt { white-space: pre-wrap; overflow-wrap: anywhere; }
.answer { margin: 0; font: 13.5px/1.7 var(--mono); }
.answer span { border-radius: 3px; }
.prompt { margin: 18px 0 8px; color: var(--muted); font: 13px/1.5 var(--mono);
  border-left: 3px solid var(--line); padding-left: 12px; }
.side h3 { margin: 0 0 4px; font-size: 13px; font-weight: 560; color: var(--muted); }
"""


def write_page(
    path: Path, old: str, new: str, bits: BitDifference, answers: AnswerDifference | None
) -> None:
    """Writes the page; raises `InputError` if it cannot be written."""
    style = files("deltawire.dashboard").joinpath("report.css").read_text(encoding="utf-8") + _STYLE
    body = [_header(old, new), _heads(bits, answers)]
    if answers is not None:
        body += [_divergence(answers), _positions(answers), _pairs(answers)]
    body += [_parts("Changed weights by layer", bits, layers=True)]
    body += [_parts("Changed weights by kind of tensor", bits, layers=False), _movers(bits)]
    title = escape(f"{legible(old, 80)} and {legible(new, 80)}")
    page = PAGE.format(title=title, style=style, body="\n".join(body))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _header(old: str, new: str) -> str:
    names = f"{_text(old)} <span class='arrow'>→</span> {_text(new)}"
    return f"<header><p class='eyebrow'>deltawire diff</p><h1>{names}</h1></header>"


def _heads(bits: BitDifference, answers: AnswerDifference | None) -> str:
    share = bits.changed / max(1, bits.count)
    heads = [("changed weights", f"{share:.2%}", f"{bits.changed} of {bits.count}")]
    if answers is None:
        heads.append(("norm of the update", f"{bits.norm:.4g}", "all tensors"))
    else:
        same = f"{answers.same} of {answers.answers}"
        heads.append(
            ("KL by token", f"{answers.kl_per_token:.3g}", "nats, mean of both directions")
        )
        heads.append(("same answers", same, f"{answers.prompts} prompts, equal seeds"))
    shown = [
        f"<div class='head'><dt>{name}</dt><dd><span class='value'>{value}</span>"
        f"<span class='note'>{note}</span></dd></div>"
        for name, value, note in heads
    ]
    return f"<dl class='heads'>{''.join(shown)}</dl>"


def _divergence(answers: AnswerDifference) -> str:
    shown = answers.pairs[:SHOWN_PAIRS]
    rows = [(end, pair.kl) for end, pair in zip(prompt_ends(shown, 30), shown, strict=True)]
    return _card(
        "KL by answer",
        "The divergence of whole answers to a prompt, in nats, the largest first.",
        _bars(rows),
    )


def _positions(answers: AnswerDifference) -> str:
    values = answers.by_position
    top = max([*values, 1e-12])
    step = min(WIDTH / len(values), WIDEST)
    bars = "".join(
        f"<rect x='{number * step:.2f}' y='{140 - 120 * value / top:.2f}' "
        f"width='{max(0.5, step - 1):.2f}' height='{120 * value / top:.2f}'/>"
        for number, value in enumerate(values)
    )
    words = (
        f"<text x='0' y='14'>{top:.3g} nats</text><text x='0' y='158'>token 1</text>"
        f"<text x='{max(step * len(values), 140):.2f}' y='158' text-anchor='end'>"
        f"{f'token {len(values)}' if len(values) > 1 else ''}</text>"
    )
    picture = f"<svg class='chart bars' role='img' viewBox='0 0 {WIDTH} 164'>{bars}{words}</svg>"
    return _card("KL by place in the answer", "The mean over the answers that reach it.", picture)


def _pairs(answers: AnswerDifference) -> str:
    shown = "".join(_pair(pair) for pair in answers.pairs[:SHOWN_PAIRS])
    left = len(answers.pairs) - SHOWN_PAIRS
    more = f"<p>{left} more answers: --json has all.</p>" if left > 0 else ""
    return _card(
        "Answers side by side",
        "Those that differ most first. A token is marked by its divergence from the other version.",
        shown + more,
    )


def _pair(pair: AnswerPair) -> str:
    sides = "".join(
        f"<div class='side'><h3>{name}, {answer.total:.3g} nats</h3>{_answer(answer)}</div>"
        for name, answer in (("old", pair.old), ("new", pair.new))
    )
    prompt = escape(legible_lines(pair.prompt))
    seed = f"seed {pair.seed}" + (", same answer" if pair.same else "")
    return f"<div class='prompt'>{prompt} · {seed}</div><div class='pair'>{sides}</div>"


def _answer(answer: AnswerTokens) -> str:
    spans = []
    for text, value in zip(answer.texts, answer.kl, strict=True):
        shown = escape(legible_lines(text))
        percent = round(70 * min(1.0, value / FULL_KL))
        mark = f"color-mix(in srgb,var(--alarm) {percent}%,transparent)"
        style = f" style='background:{mark}'" if percent else ""
        spans.append(f"<span{style} title='{value:.4g} nats'>{shown}</span>")
    return f"<p class='answer'>{''.join(spans)}</p>"


def _parts(title: str, bits: BitDifference, *, layers: bool) -> str:
    parts = bits.layers if layers else bits.kinds
    rows = [(one.name, one.norm) for one in parts if one.norm]
    if not rows:
        return ""
    return _card(title, "The Euclidean norm of the update.", _bars(rows))


def _movers(bits: BitDifference) -> str:
    titles = ("tensor", "changed", "norm", "of its values", "rank")
    rows = []
    for one in bits.movers:
        share = f"{one.changed / max(1, one.count):.2%}"
        numbers = (share, _number(one.norm), _number(one.relative), _number(one.rank))
        cells = "".join(f"<td class='number'>{number}</td>" for number in numbers)
        rows.append(f"<tr><td>{_text(one.name)}</td>{cells}</tr>")
    head = "".join(
        f"<th{' class=number' if place else ''}>{title}</th>" for place, title in enumerate(titles)
    )
    table = f"<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
    return _card("Largest movers", "By the norm of the update over that of the values.", table)


def _bars(rows: Sequence[tuple[str, float]]) -> str:
    """Draws horizontal bars, one a row."""
    top = max((value for _, value in rows), default=0.0) or 1.0
    space = WIDTH - LABEL - 90
    drawn = []
    for number, (name, value) in enumerate(rows):
        y, width = number * BAR, space * value / top if math.isfinite(value) else 0.0
        label = escape(legible(name, 30))
        drawn.append(
            f"<text x='{LABEL - 8}' y='{y + 14}' text-anchor='end'>{label}</text>"
            f"<rect x='{LABEL}' y='{y + 3}' width='{width:.2f}' height='{BAR - 8}' rx='2'/>"
            f"<text class='value' x='{LABEL + width + 7:.2f}' y='{y + 14}'>{value:.3g}</text>"
        )
    height = BAR * len(rows) + 4
    return (
        f"<svg class='chart bars' role='img' viewBox='0 0 {WIDTH} {height}'>{''.join(drawn)}</svg>"
    )


def _card(title: str, words: str, content: str) -> str:
    return f"<section class='card wide'><h2>{title}</h2><p>{words}</p>{content}</section>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(value: str) -> str:
    return escape(legible(value, 120))
