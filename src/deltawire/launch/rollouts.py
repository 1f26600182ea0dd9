"""Prints samples of what a run was trained on."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from deltawire.display import legible, legible_lines, safe_json
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.rl.evaluate.samples import Sample, SampleFilter, read_samples, require_trained
from deltawire.store import Bucket
from deltawire.wire.run import Run

MAX_TEXT = 4000
"""Characters of a prompt, or of a stretch of the text, that a terminal is shown."""


def print_samples(
    bucket: Bucket, run: Run, wanted: SampleFilter, *, count: int, as_json: bool
) -> int:
    """Print at most ``count`` samples; returns how many there were.

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
    for sample in itertools.islice(read_samples(bucket, run, wanted, decode), count):
        if as_json:
            print(safe_json(sample), flush=True)  # noqa: T201
        else:
            console.print(_shown(sample))
        shown += 1
    if not shown and not as_json:
        print("no sample matches", file=sys.stderr)  # noqa: T201
    return shown


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
