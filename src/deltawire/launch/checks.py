"""Checks what a run needs on this machine before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.config import RunConfig
from deltawire.config.exporters import require_exporter
from deltawire.envs.registry import require_tasks
from deltawire.envs.scaffold import require_scaffold
from deltawire.errors import InputError

if TYPE_CHECKING:
    from deltawire.chat.text import Text

CHECKED_PROMPTS = 100
"""Prompts that a dry run encodes, of tasks to train on and of those held out."""


def check_start(config: RunConfig) -> None:
    """Checks the model, the environment and this machine's trust in it, without loading either.

    Raises `InputError` for the first that is missing or not allowed.
    """
    check_model(config)
    check_positions(config)
    require_exporter(config.train.exporter)
    require_tasks(config.task)
    for scaffold in (config.rollout.scaffold, *config.budget.scaffolds):
        require_scaffold(scaffold)
    for one in config.evaluate.sets:
        require_tasks(one.task)


def check_tasks(config: RunConfig) -> None:
    """Opens the tasks of rows and of reasoning-gym, as a dry run does: their files, columns,
    rewards, and numbers of held-out problems are then known to be sound.

    Other environments are not opened: they may start servers or take minutes. Of a model that is a
    directory, the first prompts are encoded. Raises `InputError` for the first fault.
    """
    from deltawire.envs.registry import open_tasks

    text = _text_of(config)
    for task in (config.task, *(one.task for one in config.evaluate.sets)):
        for part in task.each():
            if part.environment in ("dataset", "reasoning_gym"):
                source = open_tasks(part, seed=config.seed)
                if text is not None:
                    check_prompts(source, text, context=config.rollout.context)


def _text_of(config: RunConfig) -> Text | None:
    """Returns the text of the model's directory; None if it is built, or has no tokenizer here."""
    path = Path(config.model.path)
    if not config.model.path or not (path / "tokenizer_config.json").is_file():
        return None
    from deltawire.chat.requests import text_of
    from deltawire.export.models import load_tokenizer

    return text_of(config, load_tokenizer(path), bucket="")


def check_prompts(source: Any, text: Text, *, context: int) -> None:
    """Raises `InputError` if one of the first prompts, or of those held out, fills the context."""
    tasks = [source.draw("check", number) for number in range(CHECKED_PROMPTS)]
    for task in [*tasks, *source.heldout()[:CHECKED_PROMPTS]]:
        length = len(text.prompt(source.prompt(task)))
        if length >= context:
            raise InputError(
                f"the prompt of {task.identity} has {length} tokens, and rollout.context is "
                f"{context}: there is no room for an answer",
                hint=f"set rollout.context above {length}, or leave out rows that are longer",
            )


def warnings_of(config: RunConfig) -> list[str]:
    """Returns what is allowed and probably a mistake, a sentence each."""
    path = Path(config.model.path)
    tasks = [one for one in config.task.each() if one.environment in ("dataset", "reasoning_gym")]
    found = []
    sampled, computed = config.rollout.precision, config.train.compute
    if config.midtrain is None and sampled != computed:
        found.append(
            f"workers sample in {sampled} (rollout.precision) and the trainer computes in "
            f"{computed} (train.compute), so their log-probabilities differ on the same weights; "
            "set both alike, or watch k3"
        )
    if not config.model.path or not tasks:
        return found
    chats = [one for one in tasks if one.messages or (one.data and one.data.messages)]
    template = has_chat_template(path)
    if chats and not template and not config.chat.template:
        found.append(
            f"{path} has no chat template: the contents of messages follow each other as plain "
            "text; set chat.template, or take an instruction-tuned model"
        )
    if template and not config.chat.template and len(chats) < len(tasks):
        found.append(
            f"{path} has a chat template, which makes task.prompt one message of a user; "
            "task.messages chooses the messages"
        )
    return found


def has_chat_template(folder: Path) -> bool:
    """Returns whether the files of a model have a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = _json_of(folder / "tokenizer_config.json")
    return bool(settings.get("chat_template"))


def check_positions(config: RunConfig) -> None:
    """Raises `InputError` if sequences may be longer than the model was trained for."""
    if not config.model.path:
        return
    positions = model_positions(config.model.path)
    if positions and config.rollout.context > positions:
        raise InputError(
            f"rollout.context is {config.rollout.context}, and {config.model.path} has "
            f"{positions} positions",
            hint=f"set rollout.context to {positions} or less, or rope_scaling in the model's "
            "config.json",
        )


def model_positions(path: str) -> int:
    """Returns the longest sequence of the model in a directory, 0 if it states none."""
    return positions_of(_json_of(Path(path) / "config.json"))


def positions_of(settings: dict[str, Any]) -> int:
    """Returns the longest sequence of a Hugging Face configuration, 0 if it states none.

    RoPE that is scaled by a factor reaches that much further than the original positions. Families
    differ in whether ``max_position_embeddings`` counts that already, so the larger one counts.
    """
    inner = settings.get("text_config")
    settings = inner if isinstance(inner, dict) else settings
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int) or most <= 0:
        return 0
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters")
    if not isinstance(scaling, dict):
        return most
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", most)
    if kind in (None, "default", "llama3") or not isinstance(factor, int | float):
        return most  # Llama 3 states the whole, and its factor is of frequencies.
    return max(most, int(original * factor)) if isinstance(original, int) else most


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
