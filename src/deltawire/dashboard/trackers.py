"""A run's figures, version by version, for TensorBoard, Weights & Biases or Trackio.

Whoever wants them runs this beside the run, anywhere: it follows the events in the bucket, so the
trainer knows nothing of it and no failure of a tracking service touches the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from deltawire.dashboard.state import RunState
from deltawire.errors import InputError
from deltawire.events import Published, Step


class Tracker(Protocol):
    """Takes named figures at a version; versions come in order, each once."""

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Record figures at ``version``."""
        ...

    def close(self) -> None:
        """Store what has been recorded."""
        ...


class TensorBoard:
    """Event files in a folder, written by tensorboardX."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Record figures at ``version``."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self) -> None:
        """Store what has been recorded."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; ``offline`` ones are kept in ``folder`` for ``wandb sync``."""

    def __init__(
        self, folder: Path, *, project: str, name: str, config: dict[str, Any], offline: bool
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode = {"mode": "offline"} if offline else {}
        self._run: Any = wandb.init(
            project=project, name=name, config=config, dir=str(folder), **mode
        )

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Record figures at ``version``."""
        self._run.log(dict(figures), step=version)

    def close(self) -> None:
        """Store what has been recorded."""
        self._run.finish()


class Trackio:
    """A project of Trackio's, which keeps its figures on this machine unless it is told
    otherwise through its own settings."""

    def __init__(self, *, project: str, name: str, config: dict[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=project, name=name, config=config)

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Record figures at ``version``."""
        self._trackio.log(dict(figures), step=version)

    def close(self) -> None:
        """Store what has been recorded."""
        self._trackio.finish()


def open_tracker(
    kind: str, folder: Path, *, project: str, name: str, config: dict[str, Any], offline: bool
) -> Tracker:
    """The tracker of this kind; raises `InputError` if ``folder`` cannot be written,
    `ModuleNotFoundError` if its package is not installed."""
    if kind == "tensorboard":
        return TensorBoard(folder)
    if kind == "wandb":
        return Wandb(folder, project=project, name=name, config=config, offline=offline)
    return Trackio(project=project, name=name, config=config)


class Forwarder:
    """Hands each version's figures on once, in order, when they are complete.

    A step's event may come a while before its version's, or not at all after a crash: a version is
    handed on when both are there, or when a later one's are.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._version = 0
        self._evaluated: set[int] = set()

    def forward(self, state: RunState, *, over: bool = False) -> int:
        """Hand on what is new; with ``over`` whatever there is. Returns the last version."""
        whole = max(state.steps.keys() & state.published.keys(), default=0)
        last = max((*state.steps, *state.published), default=0) if over else whole
        for version in range(self._version + 1, last + 1):
            figures = figures_of(state.steps.get(version), state.published.get(version))
            swaps = [
                process.swaps[version].swap_ms
                for process in state.with_role("worker")
                if version in process.swaps
            ]
            if swaps:
                figures["swap_ms"] = max(swaps)
            # Behind its versions, because evaluators take their time.
            for measured in sorted(state.evaluated.keys() - self._evaluated):
                if measured <= version:
                    self._evaluated.add(measured)
                    figures["heldout/accuracy"] = state.evaluated[measured].accuracy
                    figures["heldout/greedy"] = state.evaluated[measured].greedy
                    figures["heldout/version"] = measured
            if figures:
                self._tracker.log(version, finite(figures))
            self._version = version
        return self._version


def figures_of(step: Step | None, published: Published | None) -> dict[str, float]:
    """What one version's events say."""
    figures: dict[str, float] = {}
    if step is not None:
        figures |= {
            "reward": step.reward_mean,
            "clipped": step.clipped,
            "parity/k3": step.k3,
            "parity/ratio_max": step.ratio_max,
            "tokens": step.tokens,
            "groups": step.groups,
            "groups_dropped": step.dropped,
            "step_seconds": step.seconds,
        }
        if step.loss is not None:
            figures["loss"] = step.loss
        if step.grad_norm is not None:
            figures["grad_norm"] = step.grad_norm
        if step.staleness:
            figures["staleness/mean"] = sum(step.staleness) / len(step.staleness)
            figures["staleness/max"] = max(step.staleness)
        if step.queued and len(step.queued) == len(step.staleness):
            queued = sum(step.queued) / len(step.queued)
            figures["staleness/queued"] = queued
            figures["staleness/in_flight"] = figures["staleness/mean"] - queued
    if published is not None:
        figures |= {
            "bytes/delta": published.bytes_delta,
            "bytes/anchor": published.bytes_anchor,
            "bytes/changed": published.changed / max(1, published.elements),
            "publish_blocked_ms": published.blocked_ms,
            "publish_upload_ms": published.upload_ms,
        }
    return figures


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Without what no plot can show."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
