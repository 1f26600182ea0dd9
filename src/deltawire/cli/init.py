"""``deltawire init``: writes a commented configuration for a model, a task and a machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, at_least

if TYPE_CHECKING:
    from deltawire.launch.new_config import Wishes

TASKS = "reasoning_gym:DATASET, dataset:PATH, verifiers:TASKSET or workspace"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "init",
        help="write a commented configuration for a model, a task and a machine",
        description="On a terminal it asks for what no option says. It overwrites nothing.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("config", metavar="CONFIG.toml", help="the file to write; - prints it")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a Hugging Face directory, or scratch for a tiny model with random weights "
        "(default: scratch)",
    )
    parser.add_argument(
        "--task", metavar="KIND", help=f"{TASKS} (default: reasoning_gym:spell_backward)"
    )
    parser.add_argument(
        "--reward", metavar="MODULE:FUNCTION", help="your own reward (default: the task's)"
    )
    parser.add_argument(
        "--on",
        metavar="NxNAME",
        help="accelerators of the trainer, such as 8xh200, or cpu (default: this machine's)",
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "full", "lora"),
        default="auto",
        help="train the whole model or an adapter (default: the whole model if it fits)",
    )
    parser.add_argument("--name", help="the run's name (default: the file's)")
    parser.add_argument("--versions", type=at_least(1), default=100, metavar="N")
    parser.add_argument(
        "--max-tokens",
        type=at_least(1),
        default=0,
        metavar="N",
        help="tokens of one answer (default: what suits the task)",
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing; take the defaults")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, and says what to run next."""
    from deltawire.launch.new_config import new_config, write_new

    wishes = _wishes(arguments)
    path = Path(arguments.config)
    if arguments.config == "-":
        print(new_config(wishes, where=Path("CONFIG.toml")), end="")  # noqa: T201
        return 0
    config = write_new(wishes, path)
    if arguments.json:
        from deltawire.config import flatten
        from deltawire.display import safe_json

        found = {"path": str(path), "name": config.name, "settings": flatten(config)}
        print(safe_json(found))  # noqa: T201
        return 0
    from deltawire.display import safe_line

    shown = safe_line(str(path))
    commands = {
        f"deltawire run {shown} --dry-run": "checks it and prints every setting",
        f"deltawire run {shown}": "starts it, or continues it",
        f"deltawire watch runs/{config.name}/bucket": "shows it in a browser",
    }
    width = max(map(len, commands))
    lines = [f"  {command:<{width}}  {does}" for command, does in commands.items()]
    print("\n".join([f"wrote {shown}", *lines]))  # noqa: T201
    return 0


def _wishes(arguments: argparse.Namespace) -> Wishes:
    """The options; on a terminal, the answers to questions about those that were not given."""
    from deltawire.launch.new_config import Wishes, this_machine

    ask = not arguments.yes and not arguments.json and sys.stdin.isatty() and sys.stderr.isatty()
    model = _answer(arguments.model, "Model: a Hugging Face directory, or", Wishes.model, ask=ask)
    task = _answer(arguments.task, f"Task: {TASKS}", Wishes.task, ask=ask)
    reward = _answer(arguments.reward, "Your own reward, module:function, or none", "", ask=ask)
    on = arguments.on or "cpu"
    if model != Wishes.model:
        on = _answer(arguments.on, "Accelerators, such as 8xh200, or cpu", this_machine(), ask=ask)
    stem = Path(arguments.config).stem.strip("-") or Wishes.name
    return Wishes(
        model=model,
        task=task,
        reward=reward,
        on=on,
        mode=arguments.mode,
        name=arguments.name or stem,
        versions=arguments.versions,
        max_tokens=arguments.max_tokens,
    )


def _answer(given: str | None, question: str, default: str, *, ask: bool) -> str:
    if given is not None:
        return given
    if not ask:
        return default
    from rich.console import Console
    from rich.prompt import Prompt

    return Prompt.ask(question, default=default, console=Console(stderr=True))
