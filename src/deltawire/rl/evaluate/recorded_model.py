"""The policy at recorded versions, in main memory, to compute log-probabilities again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire.codec import ITEMSIZE
from deltawire.config import ParityConfig, RunConfig
from deltawire.engines.cache_size import available_bytes
from deltawire.errors import CorruptError
from deltawire.export.adapter import open_model
from deltawire.export.lines import open_policy
from deltawire.export.models import load_tokenizer, stop_tokens
from deltawire.export.source import open_source
from deltawire.parity.router_replay import RouteReplay, traced_replay_of
from deltawire.store import Bucket
from deltawire.sync import Mirror, load_mirror
from deltawire.train.batch import collate
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group
from deltawire.wire.run import Run

MEMORY_SHARE = 0.5
"""The largest part of the available main memory that the separate model and mirror may take."""

Logprobs = list[NDArray[np.float32]] | None
"""log π of the tokens of each trained trajectory, float32[T] each; None if it is not known."""


class RecordedModel:
    """The policy at any version that can be read, in main memory."""

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig, folder: Path) -> None:
        self._bucket = bucket
        self._run = run
        with torch.device("meta"):
            needed = memory_of(open_model(folder, config.train.served_adapter), run)
        free = available_bytes(torch.device("cpu"))
        self.lacking = ""
        """Why there is no model here; empty if there is one."""
        if needed > MEMORY_SHARE * free:
            self.lacking = (
                f"another copy of the weights needs {needed / 1e9:.3g} GB, "
                f"and {free / 1e9:.3g} GB of main memory are available"
            )
        with torch.device("meta" if self.lacking else "cpu"):
            self._model = self._open(folder, config)
        self._source = open_source(config.train.exporter, self._model)
        self.stops = stop_tokens(self._model, load_tokenizer(folder))
        """The tokens that end a completion."""
        self._mirror: Mirror | None = None
        self._version = -1

    def _open(self, folder: Path, config: RunConfig) -> Any:
        if self.lacking:  # Only its structure is needed.
            return open_model(folder, config.train.served_adapter)
        adapter = config.train.served_adapter
        return open_policy(self._bucket, config, folder, adapter=adapter)

    def logprobs(self, group: Group, version: int) -> Logprobs:
        """log π of the tokens of each trained trajectory, float32[T] each, at ``version``; None if
        that cannot be read, or there is no model here."""
        return self._logprobs(group) if self._fill(version) else None

    def traced(
        self, group: Group, version: int, parity: ParityConfig
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int32]]] | None:
        """`logprobs` with the sampler's expert choices used as the trainer uses them, and their
        flips by token and layer, int32[T, L] for each trajectory: `TracedReplay.flips_of`. No flips
        where ``parity.routes`` is off."""
        if not self._fill(version):
            return None
        replay = traced_replay_of(self._model, parity)
        logprobs = self._logprobs(group, replay)
        flips = [] if replay is None else [replay.flips_of(n) for n in range(len(logprobs))]
        return logprobs, flips

    def _fill(self, version: int) -> bool:
        """Puts the weights of a version into the model; returns False if they cannot be read."""
        if self.lacking:
            return False
        if self._version != version:
            behind = self._mirror is not None and self._version < version
            into, self._mirror, self._version = self._mirror if behind else None, None, -1
            try:
                mirror = load_mirror(self._bucket, self._run, at=version, into=into)
            except CorruptError:
                return False
            self._source.restore(mirror)
            self._mirror, self._version = mirror, version
            self._model.eval().requires_grad_(False)
        return True

    def _logprobs(
        self, group: Group, replay: RouteReplay | None = None
    ) -> list[NDArray[np.float32]]:
        batch = collate([group])
        with torch.no_grad():
            found_NC = token_logprobs(self._model, batch, replay).numpy()
        lengths = [len(group.trajectories[place].tokens_T) for _, place in batch.members_N]
        return [row[:count] for row, count in zip(found_NC, lengths, strict=True)]


def memory_of(model: torch.nn.Module, run: Run) -> int:
    """Bytes of a separate model and of the mirror that it is filled from, without activations."""
    sizes = (math.prod(one.shape) * ITEMSIZE[one.dtype] for one in run.tensors)
    return sum(p.numel() * p.element_size() for p in model.parameters()) + sum(sizes)
