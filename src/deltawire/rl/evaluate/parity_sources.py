"""Parity sources: the models and prompts on which engines are compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.config import AdapterConfig, load_config
from deltawire.errors import InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import (
    fetch_model_files,
    load_model,
    load_tokenizer,
    save_model,
    serve_as,
)
from deltawire.export.quantized import serve_quantized
from deltawire.placement.live import LiveWeights
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.sync import find_run, load_mirror
from deltawire.train.build import build_model, byte_tokenizer

MAX_PROMPTS = 4096
MAX_PROMPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """A float32 causal LM, its tokenizer, and the place that it was loaded from."""

    name: str
    model: Any
    tokenizer: Any

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Saves the model as a temporary directory, for engines that read one."""
        with tempfile.TemporaryDirectory(prefix="deltawire-parity-") as folder:
            save_model(self.model, self.tokenizer, Path(folder))
            yield Path(folder)


def open_source(place: str, *, version: int | None = None, trust: ReaderTrust = ANY) -> Source:
    """Loads a Hugging Face directory, a run's version (the newest if None), or the random model
    that a configuration's ``[model.build]`` describes; raises `InputError`. ``trust`` is of a
    run."""
    path = Path(place)
    if "://" not in place and path.suffix in (".toml", ".json") and path.is_file():
        _refuse_version(place, version)
        config = load_config(path)
        if config.model.build is None:
            return open_source(config.model.path)
        model = build_model(config.model.build, seed=config.seed)
        serve_as(serve_as(model, "bfloat16"), "float32")  # as a run would publish it
        return Source(f"{place}, seed {config.seed}", model.eval(), byte_tokenizer())
    if "://" not in place and (path / "config.json").is_file():
        _refuse_version(place, version)
        return Source(place, load_model(path).eval(), load_tokenizer(path))
    return _of_run(place, version, trust)


def _refuse_version(place: str, version: int | None) -> None:
    if version is not None:
        raise InputError(f"--version: {place} is not a run", hint="give a run's bucket")


def _of_run(place: str, version: int | None, trust: ReaderTrust) -> Source:
    bucket = open_trusted(place, trust)
    run = find_run(bucket)
    if run is None:
        raise InputError(
            f"{place} is neither a model directory, nor a run, nor a configuration",
            hint="give a folder with config.json, a run's bucket, or a .toml with [model.build]",
        )
    mirror = load_mirror(bucket, run, at=version)
    with fetch_model_files(bucket, run) as folder:
        train = config_of(run, url=bucket.url).train if run.config else None
        model = open_model(Path(folder), train.served_adapter if train else AdapterConfig())
        if train is not None:
            model = serve_quantized(model, train.exporter)
        tokenizer = load_tokenizer(Path(folder))
    LiveWeights(model, run.tensors, aliases=run.aliases).load(mirror)
    return Source(f"{place}, version {mirror.version}", model.eval(), tokenizer)


def random_prompts(vocabulary: int, *, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Draws token ids uniformly: no tokenizer produces these, and agreement is hardest on them."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocabulary, length).tolist()) for _ in range(count)]


def read_prompts(path: Path, tokenizer: Any, *, vocabulary: int) -> list[tuple[int, ...]]:
    """Reads one prompt per line: text, or a JSON array of token ids.

    Raises `InputError` naming the line.
    """
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise InputError(f"--prompts {path}: more than {MAX_PROMPT_BYTES >> 20} MB")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--prompts {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, tokenizer, vocabulary, f"--prompts {path}, line {number}"))
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise InputError(f"--prompts {path}: {len(prompts)} prompts; give 1 to {MAX_PROMPTS}")
    return prompts


def _prompt(line: str, tokenizer: Any, vocabulary: int, where: str) -> tuple[int, ...]:
    ids: Any = None
    if line.lstrip().startswith("["):
        try:
            ids = json.loads(line)
        except (ValueError, RecursionError):
            ids = None
    if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        ids = tokenizer.encode(line, add_special_tokens=False)
    if not ids or not all(0 <= i < vocabulary for i in ids):
        raise InputError(f"{where}: a token id is not one of the model's {vocabulary}")
    return tuple(ids)


def fitting(
    prompts: Sequence[tuple[int, ...]],
    *,
    tokens: int,
    model: Any,
    hint: str = "lower --tokens or --length",
) -> None:
    """Raises `InputError` if the longest prompt with ``tokens`` more exceeds the model's
    context."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts)) + tokens
    if room is not None and longest > room:
        raise InputError(
            f"the longest prompt and {tokens} tokens need {longest}; the context has {room}",
            hint=hint,
        )
