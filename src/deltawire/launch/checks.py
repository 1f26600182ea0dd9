"""Checks what a run needs on this machine before anything is started."""

from __future__ import annotations

from pathlib import Path

from deltawire.config import RunConfig
from deltawire.envs.registry import require_tasks
from deltawire.envs.scaffold import require_scaffold
from deltawire.errors import InputError


def check_start(config: RunConfig) -> None:
    """Checks the model, the environment and this machine's trust in it, without loading either.

    Raises `InputError` for the first that is missing or not allowed.
    """
    check_model(config)
    require_tasks(config.task)
    for scaffold in (config.rollout.scaffold, *config.budget.scaffolds):
        require_scaffold(scaffold)
    for one in config.evaluate.sets:
        require_tasks(one.task)


def check_tasks(config: RunConfig) -> None:
    """Opens the tasks of rows and of reasoning-gym, as a dry run does: their files, columns,
    rewards, and numbers of held-out problems are then known to be sound.

    Other environments are not opened: they may start servers or take minutes. Raises `InputError`
    for the first fault.
    """
    from deltawire.envs.registry import open_tasks

    for task in (config.task, *(one.task for one in config.evaluate.sets)):
        for part in task.each():
            if part.environment in ("dataset", "reasoning_gym"):
                open_tasks(part, seed=config.seed)


def check_model(config: RunConfig) -> None:
    """Raises `InputError` unless ``model.path`` is a Hugging Face directory, or is not set."""
    if not config.model.path:
        return
    path = Path(config.model.path)
    if not path.is_dir():
        raise InputError(
            f"model.path {path} is not a directory",
            hint="give a Hugging Face model directory; relative paths start at the current folder",
        )
    if not (path / "config.json").is_file():
        raise InputError(
            f"model.path {path} has no config.json",
            hint="give the directory that a Hugging Face model was saved to",
        )
