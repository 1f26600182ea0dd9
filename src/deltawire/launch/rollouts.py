"""Prints samples of what a run was trained on, and single groups as conversations."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from deltawire.display import legible, legible_lines, safe_json
from deltawire.errors import InputError
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.rl.evaluate.samples import Sample, SampleFilter, read_samples, require_trained
from deltawire.store import Bucket
from deltawire.watch.group_view import AnswerView, GroupReader
from deltawire.wire.run import Run

MAX_TEXT = 4000
"""Characters of a prompt, or of a stretch of the text, that a terminal is shown."""


def print_samples(
    bucket: Bucket,
    run: Run,
    wanted: SampleFilter,
    *,
    count: int,
    as_json: bool,
    search: str = "",
) -> int:
    """Prints at most ``count`` samples, with ``search`` those whose text contains it in any case;
    returns how many there were.

    Raises `InputError` if nothing was trained yet, or the named version does not exist.
    """
    if wanted.version is None:
        require_trained(bucket)
    with fetch_model_files(bucket, run) as folder:
        tokenizer: Any = load_tokenizer(Path(folder))

    def decode(tokens: Any) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    console = Console(highlight=False)
    shown = 0
    found = (one for one in read_samples(bucket, run, wanted, decode) if _contains(one, search))
    for sample in itertools.islice(found, count):
        if as_json:
            print(safe_json(sample), flush=True)  # noqa: T201
        else:
            console.print(_shown(sample))
        shown += 1
    if not shown and not as_json:
        print("no sample matches", file=sys.stderr)  # noqa: T201
    return shown


def _contains(sample: Sample, search: str) -> bool:
    text = "".join([sample.prompt, *(part.text for part in sample.parts)])
    return search.casefold() in text.casefold()


def print_group(bucket: Bucket, run: Run, place: str, *, as_json: bool) -> None:
    """Prints a group that is named as ``worker/number``, each answer as messages.

    Raises `InputError` for another form of name and a group that is not there.
    """
    worker, _, number = place.rpartition("/")
    if not (worker and number.isascii() and number.isdigit() and len(number) <= 10):
        raise InputError(
            f"{place[:80]!r} does not name a group", hint="give a worker and a number: worker-0/12"
        )
    group = GroupReader(bucket, run).group(worker, int(number))
    if as_json:
        print(safe_json(group), flush=True)  # noqa: T201
        return
    console = Console(highlight=False)
    row = group.row
    heading = f"{legible(row.task, 256)} · {place} · {group.answers_total} answers"
    heading += f" · mean reward {row.reward:g} · temperature {group.temperature:g}"
    console.print(Text(heading, "bold cyan"))
    for answer in group.answers:
        console.print(_shown_answer(answer))


_STYLES = {"text": "", "thinking": "dim italic", "call": "magenta", "answer": "green"}


def _shown_answer(answer: AnswerView) -> Text:
    text = Text(f"\n#{answer.index} · reward {answer.reward:g} · {legible(answer.finish)}", "bold")
    text.append(f" · {answer.drawn} tokens drawn of {answer.tokens}")
    if answer.reused_from is not None:
        text.append(f", the first {answer.reused} by #{answer.reused_from}")
    if answer.sampled is not None:
        text.append(f" · drawn by {answer.sampled[0]} to {answer.sampled[1]}")
    if answer.logprob is not None:
        text.append(f" · mean log-probability {answer.logprob:.3f}")
    text.append("\n")
    if answer.cause:
        text.append(f"failed: {legible(answer.cause, 400)}\n", "red")
    for message in answer.messages:
        text.append(f"{legible(message.role) or 'text'}\n", "bold yellow")
        for block in message.blocks:
            title = f"{block.kind} {block.title}".strip() if block.kind != "text" else ""
            text.append(f"{legible(title, 80)}\n" if title else "", "dim")
            text.append(legible_lines(block.text, MAX_TEXT) + "\n", _STYLES[block.kind])
    return text


def _shown(sample: Sample) -> Text:
    heading = (
        f"version {sample.version} · {sample.worker}/{sample.sequence}#{sample.index} · "
        f"{legible(sample.task, 80)} · reward {sample.reward:g} · {sample.tokens} tokens · "
        f"{legible(sample.finish)}"
    )
    if sample.sampled is not None and sample.sampled[0] != sample.sampled[1]:
        heading += f" · drawn by {sample.sampled[0]} to {sample.sampled[1]}"
    text = Text()
    text.append(heading + "\n", "bold cyan")
    if sample.cause:
        text.append(f"failed: {legible(sample.cause, 400)}\n", "red")
    for name, value in sample.probes.items():
        text.append(f"probe {legible(name)}: {value:g}\n", "dim")
    text.append(legible_lines(sample.prompt, MAX_TEXT), "dim")
    for part in sample.parts:
        text.append(legible_lines(part.text, MAX_TEXT), "" if part.drawn else "dim")
    text.append("\n")
    return text
