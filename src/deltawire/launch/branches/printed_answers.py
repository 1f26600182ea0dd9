"""Prints how the answers of two versions differ."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.display import legible
from deltawire.launch.branches.answer_differences import (
    AnswerDifference,
    AnswerTokens,
    prompt_ends,
)
from deltawire.launch.branches.printing import print_line

SHOWN_PAIRS = 5
SHOWN_LETTERS = 400
MARKED_KL = 0.1
"""Tokens with this divergence, in nats, are underlined."""


def print_answers(found: AnswerDifference, console: Console) -> None:
    """Prints the figures, and the answers that differ most side by side."""
    rows = "" if found.rows is None else f" of {found.rows} rows"
    print_line(
        console,
        f"answers: {found.prompts} prompts{rows}, {found.same} of {found.answers} the same at "
        f"equal seeds, temperature {found.temperature:g}",
    )
    print_line(
        console,
        f"KL by token {found.kl_per_token:.4g} nats, by answer {found.kl_per_answer:.4g}",
    )
    table = Table("prompt", "KL", "old", "new", show_lines=True)
    shown = found.pairs[:SHOWN_PAIRS]
    for prompt, pair in zip(prompt_ends(shown, 120), shown, strict=True):
        table.add_row(
            Text(legible(prompt, 120)), f"{pair.kl:.3g}", _marked(pair.old), _marked(pair.new)
        )
    console.print(table)


def _marked(answer: AnswerTokens) -> Text:
    """Returns an answer whose tokens with a large divergence are underlined."""
    shown = Text()
    for text, value in zip(answer.texts, answer.kl, strict=True):
        if len(shown) > SHOWN_LETTERS:
            return shown.append("…")
        shown.append(legible(text, 100), style="underline" if value >= MARKED_KL else "")
    return shown
