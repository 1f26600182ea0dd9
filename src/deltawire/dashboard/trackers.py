"""Forwards a run's figures to TensorBoard, Weights & Biases or Trackio, version by version.

It follows the events in the bucket from a separate command, so that no failure of a tracking
service affects the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from deltawire.dashboard.figures import FIGURES
from deltawire.dashboard.state import RunState
from deltawire.errors import InputError
from deltawire.events import Evaluated, HeldoutLoss

HELDOUT = "heldout/"


class Tracker(Protocol):
    """Receives named figures of each version, in order, once."""

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Records figures at ``version``."""
        ...

    def close(self) -> None:
        """Stores what has been recorded."""
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
        """Records figures at ``version``."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self) -> None:
        """Stores what has been recorded."""
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
        """Records figures at ``version``."""
        self._run.log(dict(figures), step=version)

    def close(self) -> None:
        """Stores what has been recorded."""
        self._run.finish()


class Trackio:
    """A project of Trackio, which keeps its figures on this machine unless its own settings say
    otherwise."""

    def __init__(self, *, project: str, name: str, config: dict[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=project, name=name, config=config)

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Records figures at ``version``."""
        self._trackio.log(dict(figures), step=version)

    def close(self) -> None:
        """Stores what has been recorded."""
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
    """Forwards each version's figures once, in order, when they are complete.

    A step's event may come some time before its version's, or not at all after a crash: a version
    is forwarded once both exist, or once both of a later version do.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._version = 0
        self._evaluated: set[int] = set()
        self._measured: set[int] = set()

    def forward(self, state: RunState, *, over: bool = False) -> int:
        """Forwards complete versions; with ``over`` all of them. Returns the last version."""
        whole = max(state.steps.keys() & state.published.keys(), default=0)
        last = max((*state.steps, *state.published), default=0) if over else whole
        for version in sorted(state.steps.keys() | state.published.keys()):
            if not self._version < version <= last:
                continue
            figures = figures_at(state, version)
            # Evaluators take their time: a version's accuracy is forwarded with a later version.
            for measured in sorted(state.evaluated.keys() - self._evaluated):
                if measured <= version:
                    self._evaluated.add(measured)
                    figures |= tracked(state.at(measured), HELDOUT)
                    figures |= set_figures(state.evaluated[measured])
            for measured in sorted(state.heldout_losses.keys() - self._measured):
                if measured <= version:
                    self._measured.add(measured)
                    figures |= tracked(state.at(measured), HELDOUT)
                    figures |= source_figures(state.heldout_losses[measured])
            if figures:
                self._tracker.log(version, finite(figures))
            self._version = version
        return self._version


def figures_at(state: RunState, version: int) -> dict[str, float]:
    """The figures of one version, without those of its evaluation."""
    return {
        name: value
        for name, value in tracked(state.at(version)).items()
        if not name.startswith(HELDOUT)
    }


def set_figures(evaluated: Evaluated) -> dict[str, float]:
    """The figures of each named set of an evaluation."""
    return {
        f"{HELDOUT}{name}/{part}": value
        for name, score in evaluated.sets.items()
        for part, value in (
            ("accuracy", score.accuracy),
            ("greedy", score.greedy),
            ("reward", score.reward),
        )
    }


def source_figures(losses: HeldoutLoss) -> dict[str, float]:
    """The figures of each source of held-out documents."""
    return {
        f"{HELDOUT}{name}/{part}": value
        for name, one in losses.sources.items()
        for part, value in (("loss", one.loss), ("perplexity", one.perplexity))
        if value is not None
    }


def tracked(state: RunState, prefix: str = "") -> dict[str, float]:
    """The figures that trackers get, by the names that they know."""
    found = {row.tracked: row.of(state) for row in FIGURES if row.tracked.startswith(prefix)}
    return {name: value for name, value in found.items() if name and value is not None}


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Leaves out the values that no plot can show."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
