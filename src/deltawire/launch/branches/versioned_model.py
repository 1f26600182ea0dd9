"""The model of a run at one version after another, and the log-probabilities it gives to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltawire.chat.requests import text_of
from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.cache_size import available_bytes
from deltawire.errors import InputError
from deltawire.export.lines import open_policy
from deltawire.export.models import fetch_model_files, load_tokenizer, stop_tokens
from deltawire.export.quantized import serve_quantized
from deltawire.export.source import is_lossy, open_source
from deltawire.placement.device import resolve_device
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import Mirror, load_mirror
from deltawire.train.policy import TrainedPolicy
from deltawire.wire.run import Run

COPIES = 4
"""Float32 copies of the trained weights that a gradient at two versions takes."""
MAX_TOKENS = 512
"""Tokens that pass the model at a time: activations of a model of 135M weights take 1.5 GB."""


class VersionedModel:
    """The model of a run, in float32, whose weights move from version to version.

    Example::

        with open_model_of(bucket) as model:
            model.move_to(40)
    """

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig, folder: Path) -> None:
        self.bucket, self.run, self.config, self.folder = bucket, run, config, folder
        self.device = resolve_device(config.device_of("trainer"))
        torch.set_num_threads(config.threads)
        tokenizer = load_tokenizer(folder)
        self.text: Text = text_of(config, tokenizer, bucket=bucket.url)
        self.module = open_policy(
            bucket,
            config,
            folder,
            adapter=config.train.served_adapter,
            seed=config.seed,
            device=self.device,
        ).eval()
        self.stops = stop_tokens(self.module, tokenizer)
        self._source = open_source(config.train.exporter, self.module)
        self._mirror: Mirror | None = None
        self.version: int | None = None

    @property
    def is_rounded(self) -> bool:
        """Returns whether versions are quantized: the weights here are the dequantized ones."""
        return is_lossy(self._source)

    def serving(self) -> Any:
        """Returns a model that holds the published tensors themselves, weights unset: where they
        are quantized, its layers are packed."""
        if not self.is_rounded:
            return self.module
        return serve_quantized(self.module, self.config.train.exporter).eval()

    def move_to(self, version: int) -> None:
        """Puts a version's weights into the model, by deltas from an earlier one. Raises
        `CorruptError` if it cannot be read."""
        if self.version == version:
            return
        forward = self._mirror is not None and self._mirror.version < version
        into, self._mirror, self.version = self._mirror if forward else None, None, None
        self._mirror = load_mirror(self.bucket, self.run, at=version, into=into)
        self._source.restore(self._mirror)
        self.version = version

    def forget(self) -> None:
        """Forgets which version the weights are, because somebody changed them."""
        self._mirror, self.version = None, None

    def trained(self) -> dict[str, Tensor]:
        """Returns the parameters that training moves, by name."""
        return {name: one for name, one in self.module.named_parameters() if one.requires_grad}

    def require_memory(self) -> None:
        """Raises `InputError` if gradients at two versions do not fit into free memory."""
        needed = COPIES * 4 * sum(one.numel() for one in self.trained().values())
        free = available_bytes(self.device)
        if needed > free:
            raise InputError(
                f"gradients at two versions need {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are "
                "free",
                run=self.bucket.url,
            )


@contextmanager
def open_model_of(bucket: Bucket) -> Iterator[VersionedModel]:
    """Opens the model of a run, without weights until `VersionedModel.move_to`. Raises `InputError`
    for a run without a trainer."""
    run, config = open_run(bucket, role="trainer")
    with fetch_model_files(bucket, run) as folder:
        yield VersionedModel(bucket, run, config, Path(folder))


def logprobs_of(
    module: Any, sequences: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yields the numbers of some sequences, and log π of each of their tokens but the first,
    float32[L − 1] each. Call ``backward`` before the next one is asked for.

    Sequences of at most `MAX_TOKENS` tokens together pass the model at a time.
    """
    policy = TrainedPolicy(module)
    for numbers in _parts([len(one) for one in sequences]):
        tokens = [torch.tensor(list(sequences[number]), dtype=torch.long) for number in numbers]
        inputs, targets = [one[:-1] for one in tokens], [one[1:] for one in tokens]
        with policy.sequence_terms(inputs, targets) as terms:
            yield numbers, [one.logprobs for one in terms]


def _parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    part: list[int] = []
    size = 0
    for number, length in enumerate(lengths):
        if part and size + length > MAX_TOKENS:
            yield part
            part, size = [], 0
        part.append(number)
        size += length
    if part:
        yield part
