"""Opens the versions that an endpoint is compared with, looks, and prints the report."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.launch.black_box.endpoint import HttpEndpoint
from deltawire.launch.black_box.judging import (
    DRAWN,
    BlackBoxReport,
    Floats,
    Score,
    ScoredVersion,
    check_endpoint,
)
from deltawire.launch.branches.version_names import VersionName, open_version
from deltawire.parity.scorers import open_scorer, parse_spec
from deltawire.parity.scores import DrawnSequence, Scorer
from deltawire.rl.evaluate.parity_sources import (
    fitting,
    open_source,
    random_prompts,
    read_prompts,
)
from deltawire.runtime.trusted import ReaderTrust

SEQUENCES, LENGTH = 96, 64
SHORTEST = 8
SEED = 0


@dataclass(frozen=True, kw_only=True)
class BlackBoxOptions:
    """Names the endpoint and what it is compared with; see ``deltawire attest --help``."""

    url: str
    against: str
    also: Sequence[str] = ()
    model: str = ""
    prompts: str = ""
    error: float = 0.01
    token: str = ""


class BlackBox:
    """Looks at an endpoint. Versions are loaded once, and again if a run that is named without a
    version has a newer one.

    Example::

        report = BlackBox(BlackBoxOptions(url=url, against="run@4"), trust).check()
    """

    def __init__(self, options: BlackBoxOptions, trust: ReaderTrust) -> None:
        if not 0 < options.error < 0.5:
            raise InputError("--error must be above 0 and below 0.5")
        self._options = options
        self._trust = trust
        self._names: list[str] = []
        self._versions: list[ScoredVersion] = []
        self._sequences: list[tuple[int, ...]] = []
        self._vocabulary = 0
        self._cached: int | None = None

    @property
    def version(self) -> int | None:
        """The version of the reference at the last look; None if it is no version of a run."""
        text = self._names[0] if self._names else ""
        return None if (Path(text) / "config.json").is_file() else VersionName.parse(text).version

    def check(self) -> BlackBoxReport:
        """Returns a report; raises as opening the versions and asking the endpoint do."""
        options = self._options
        names = [self._resolved(text) for text in (options.against, *options.also)]
        endpoint = HttpEndpoint(options.url, model=options.model, token=options.token)
        if names != self._names:
            self._versions = []  # Two sets of versions need twice the memory.
            self._versions = [self._open(text, first=not at) for at, text in enumerate(names)]
            self._names = names
        report = check_endpoint(
            endpoint,
            self._versions,
            self._sequences,
            name=options.url,
            fresh=_fresh(self._vocabulary),
            vocabulary=self._vocabulary,
            error=options.error,
            cached=self._cached,
        )
        # The first look has asked for tokens after these. Later ones ask after no others.
        self._cached = self._cached or report.sequences
        return report

    def _resolved(self, text: str) -> str:
        """Returns a model's folder as it is, and a version of a run with its number."""
        if (Path(text) / "config.json").is_file():
            return text
        if any(Path(text).glob("*.safetensors")) or text.endswith(".json"):
            raise InputError(
                f"{text} is no model directory: it has no config.json",
                hint="scores need a model directory, or a version of a run",
            )
        _, _, version = open_version(text, self._trust)
        return f"{VersionName.parse(text).location}@{version}"

    def _open(self, text: str, *, first: bool) -> ScoredVersion:
        name = VersionName.parse(text)
        source = open_source(name.location, version=name.version, trust=self._trust)
        vocabulary = int(source.model.get_input_embeddings().num_embeddings)
        if first:
            self._vocabulary = vocabulary
            path = self._options.prompts
            self._sequences = (
                read_prompts(Path(path), source.tokenizer, vocabulary=vocabulary)
                if path
                else random_prompts(vocabulary, count=SEQUENCES, length=LENGTH, seed=SEED)
            )
            if min(map(len, self._sequences)) < SHORTEST:
                raise InputError(f"--prompts: each needs at least {SHORTEST} tokens")
            fitting(
                self._sequences,
                tokens=DRAWN,
                model=source.model,
                hint="give shorter sequences with --prompts",
            )
        elif vocabulary != self._vocabulary:
            raise InputError(f"{text} has another vocabulary than {self._options.against}")
        return scored_version(text, source.model, rounded=first)


def scored_version(name: str, model: Any, *, rounded: bool) -> ScoredVersion:
    """Returns a float32 model as a version; ``rounded`` keeps a copy in bf16 too."""
    exact = _score(open_scorer(parse_spec("transformers:float32"), model, None))
    if not rounded:
        return ScoredVersion(name, exact, exact)
    in_bf16 = _score(open_scorer(parse_spec("transformers:bf16"), model, None))
    return ScoredVersion(name, exact, in_bf16)


def _score(scorer: Scorer) -> Score:
    def score(tokens: Sequence[int]) -> Floats:
        with torch.no_grad():
            sequence = DrawnSequence((tokens[0],), tuple(tokens[1:]))
            return scorer.score([sequence])[0].logprobs_T

    return score


def _fresh(vocabulary: int) -> Iterator[int]:
    """Yields random first tokens: earlier requests are unlikely to have begun with them."""
    while True:
        yield secrets.randbelow(vocabulary)


def print_black_box(report: BlackBoxReport, console: Console) -> None:
    """Prints the verdict, the gaps and the notes."""
    words = {
        "prefix cache": "the weights are the same, but answers after cached prompts are not: "
        "the prefix cache holds what other weights computed",
        "version": f"{report.fits} fits best",
        "": "",
    }
    if text := words[report.cause]:
        console.print(safe_line(text), markup=False)
    gaps = ", ".join(f"{name} {gap:.4f}" for name, gap in report.gaps.items())
    console.print(
        safe_line(f"mean gap in nats: {gaps}; bf16 on this machine {report.noise:.4f}"),
        markup=False,
    )
    for note in report.notes:
        console.print(safe_line(note), markup=False)
    console.print(
        safe_line(
            f"{report.endpoint} against {report.reference}: {report.verdict} "
            f"({report.sequences} sequences, error at most {report.error:g})"
        ),
        markup=False,
    )
