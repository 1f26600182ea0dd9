"""Chooses the settings of a first run, and writes them with the reason for each."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltawire.config import RunConfig, TaskConfig, check_config
from deltawire.data.rows import open_rows
from deltawire.errors import InputError
from deltawire.launch.checks import check_model, has_chat_template, model_positions
from deltawire.launch.new_config.document import Document
from deltawire.launch.new_config.size import CPU, Sizing, size_trainer

SCRATCH = "scratch"
KINDS = ("reasoning_gym:DATASET", "dataset:PATH", "verifiers:TASKSET", "workspace")
_PROMPTS = ("question", "prompt", "problem", "instruction", "input")
_ANSWERS = ("answer", "solution", "target", "output", "label", "completion")
SAMPLED = 1000
"""Rows of which the longest answer is looked for; of a generator a twentieth."""
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The answers that a first configuration is made from.

    ``model`` is a Hugging Face directory or ``scratch``; ``task`` one of `KINDS`; ``reward`` a
    function as ``module:function``, or empty; ``on`` accelerators such as ``8xh200``, or ``cpu``;
    ``max_tokens`` tokens of an answer, 0 for what suits the task.

    Example::

        config = write_new(Wishes(versions=200), Path("run.toml"))
    """

    model: str = SCRATCH
    task: str = "reasoning_gym:spell_backward"
    reward: str = ""
    on: str = CPU
    mode: Literal["auto", "full", "lora"] = "auto"
    name: str = "first"
    versions: int = 100
    max_tokens: int = 0

    @property
    def scratch(self) -> bool:
        """True if a small model with random weights is built."""
        return self.model == SCRATCH


def write_new(wishes: Wishes, path: Path) -> RunConfig:
    """Writes a new file; returns the configuration in it.

    Raises `InputError` if the file exists, or a wish cannot be met.

    Example::

        write_new(Wishes(model="models/qwen3-0.6b", task="dataset:data/gsm8k"), Path("first.toml"))
    """
    text = new_config(wishes, where=path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(
            f"{path} exists already", hint="choose another name, or remove the file first"
        ) from error
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return check_config(tomllib.loads(text), source=str(path))


def new_config(wishes: Wishes, *, where: Path) -> str:
    """Returns the text of the configuration; checked as ``deltawire run`` checks it."""
    document = Document(
        f"A run of deltawire. Check it with:  deltawire run {where} --dry-run\n"
        "That prints every key with its value; those left out here have defaults."
    )
    name = _NAME.sub("-", wishes.name).strip("-")[:64] or "first"
    if not wishes.scratch:
        check_model(check_config({"name": name, "model": {"path": wishes.model}}, source="--model"))
    document.key("name", name)
    document.key("seed", 0)
    _model(document, wishes)
    _task(document, wishes)
    tokens, context = _lengths(wishes)
    sizing = Sizing("A model of 1.4 M parameters trains on two cores.")
    if not wishes.scratch:
        sizing = size_trainer(wishes.model, on=wishes.on, mode=wishes.mode, context=context)
    if "threads" in sizing.settings:
        document.top("threads", sizing.settings["threads"], "of each process: they share the cores")
    _rollout(document, wishes, tokens, context)
    _slots(document, sizing, "rollout.slots")
    _train(document, wishes, sizing)
    _evaluate(document, wishes)
    _slots(document, sizing, "evaluate.slots")
    text = document.text()
    check_config(tomllib.loads(text), source=str(where))
    return text


def _model(document: Document, wishes: Wishes) -> None:
    if not wishes.scratch:
        document.table("model", "Version 0 is this Hugging Face directory.")
        document.key("path", wishes.model)
        return
    document.table("model.build", "Version 0 has random weights; its tokens are bytes.")
    for name, value in (
        ("hidden_size", 160),
        ("layers", 4),
        ("head_size", 32),
        ("feed_forward_size", 480),
        ("context", 512),
    ):
        document.key(name, value)
    if wishes.task == "workspace":
        return
    document.table("warm_start", "Supervised steps on questions and answers, before version 0.")
    document.key("max_steps", 400)
    document.key("stop_at_accuracy", 0.3, "so that reinforcement learning has room to improve")
    document.key("check_every", 8)


def _task(document: Document, wishes: Wishes) -> None:
    kind, _, detail = wishes.task.partition(":")
    match kind:
        case "reasoning_gym":
            _check_dataset(detail)
            document.table("task", "Problems of reasoning-gym, with their own scores.")
            document.key("dataset", detail or "spell_backward", "any of its datasets")
            if wishes.scratch and detail in ("", "spell_backward"):
                document.key("options", {"min_word_len": 3, "max_word_len": 3})
            _prompt(document, wishes, "question")
            document.key("heldout", 200, "problems to evaluate on, never trained on")
            _reward(document, wishes)
        case "dataset":
            _dataset_task(document, wishes, detail)
        case "verifiers":
            document.table("task", f"Set DELTAWIRE_TRUSTED_MODULES={detail} for every process.")
            document.key("environment", "verifiers")
            document.key("options", {"taskset": detail, "tasks": 1000})
            document.key("heldout", 20)
        case "workspace":
            document.table("task", "Small repositories to repair, with tools, in a sandbox.")
            document.key("environment", "workspace")
            document.key("options", {"turns": 6, "describe_tools": True})
            document.key("heldout", 20)
        case _:
            raise InputError(f"there is no task {wishes.task!r}", hint=f"one of {', '.join(KINDS)}")
    if kind in ("verifiers", "workspace") and wishes.reward:
        raise InputError(f"tasks of {kind} have their own reward", hint="leave --reward out")


def _check_dataset(name: str) -> None:
    """Raises `InputError` for a name that reasoning-gym does not have."""
    if name in ("", "spell_backward"):
        return  # The default needs no import, which takes seconds.
    try:
        from deltawire.envs.reasoning import require_dataset
    except ImportError:  # A configuration may be written where nothing is trained.
        return
    require_dataset(name)


def _dataset_task(document: Document, wishes: Wishes, path: str) -> None:
    if not path:
        raise InputError("the task dataset needs a path", hint="write dataset:data/train.jsonl")
    rows = open_rows(Path(path))
    columns = list(rows.columns)
    prompt = next((name for name in _PROMPTS if name in columns), "")
    answer = next((name for name in _ANSWERS if name in columns), "")
    messages = "messages" if "messages" in columns and not prompt else ""
    if not prompt and not messages:
        raise InputError(
            f"{path} has no column of questions: it has {', '.join(columns)}",
            hint=f"name one of them {' or '.join(_PROMPTS)}, or write the configuration by hand "
            "with docs/ENVIRONMENTS.md",
        )
    if not answer and not wishes.reward:
        raise InputError(
            f"{path} has no column of answers: it has {', '.join(columns)}",
            hint=f"name one of them {' or '.join(_ANSWERS)}, or give --reward module:function",
        )
    document.table("task", "Rows of a file.")
    document.key("environment", "dataset")
    if prompt:
        _prompt(document, wishes, prompt)
    if len(rows) < 2:
        raise InputError(
            f"{path} has {len(rows)} rows, and one is held out", hint="give at least 2 rows"
        )
    held = max(1, min(100, len(rows) // 5))
    document.key("heldout", held, "rows to evaluate on, never trained on")
    _reward(document, wishes)
    document.table("task.data")
    document.key("path", path, "must be the same on every machine")
    if messages:
        document.key("messages", messages, "the column with a list of messages")
    if answer:
        document.key("answer", answer, "the column that is compared exactly, without a reward")


def _prompt(document: Document, wishes: Wishes, column: str) -> None:
    """One user message where the model has a chat template, otherwise a line of text."""
    if not wishes.scratch and has_chat_template(Path(wishes.model)):
        document.key("messages", [{"role": "user", "content": f"{{{column}}}"}])
    else:
        document.key("prompt", f"{{{column}}}\n")


def _reward(document: Document, wishes: Wishes) -> None:
    if not wishes.reward:
        return
    module = wishes.reward.partition(":")[0]
    document.remark(
        f"def {wishes.reward.partition(':')[2]}(completion: str, row: dict) -> float, in the "
        f"module {module}. Every process needs it on its path, and has to be told to trust it:\n"
        f"export PYTHONPATH=. DELTAWIRE_TRUSTED_MODULES={module}"
    )
    document.key("reward", wishes.reward)


def _answer_tokens(wishes: Wishes) -> int:
    if wishes.task == "workspace":
        return 24 if wishes.scratch else 1024
    if not wishes.scratch:
        return 512
    # Its tokens are bytes. Answers that are sampled to a limit far above the known ones would take
    # most of the warm start's time.
    longest = _longest_answer(wishes)
    return 64 if longest is None else max(8, min(64, longest + longest // 4 + 2))


def _longest_answer(wishes: Wishes) -> int | None:
    """The bytes of the longest known answer among the first ones; None if there is no answer."""
    kind, _, detail = wishes.task.partition(":")
    answers: list[str] = []
    if kind == "dataset":
        rows = open_rows(Path(detail))
        column = next((name for name in _ANSWERS if name in rows.columns), None)
        if column is not None:
            answers = [str(rows[at][column]) for at in range(min(len(rows), SAMPLED))]
    elif kind == "reasoning_gym" and wishes.task != Wishes.task:
        answers = _drawn_answers(detail)
    elif kind == "reasoning_gym":
        return 3  # The options of the default keep words this short.
    return max((len(answer.encode()) for answer in answers), default=None)


def _drawn_answers(dataset: str) -> list[str]:
    try:
        from deltawire.envs import open_tasks
    except ImportError:  # A configuration may be written where nothing is trained.
        return []
    tasks = open_tasks(TaskConfig(dataset=dataset, heldout=1), seed=0)
    drawn = (tasks.draw("init", number).data for number in range(SAMPLED // 20))
    return [str(data["answer"]) for data in drawn if data.get("answer")]


def _lengths(wishes: Wishes) -> tuple[int, int]:
    """Returns the most tokens of an answer and of a sequence, which the model's positions bound."""
    tokens = wishes.max_tokens or _answer_tokens(wishes)
    context = _context(wishes, tokens)
    positions = 0 if wishes.scratch else model_positions(wishes.model)
    if not positions or context <= positions:
        return tokens, context
    parts = 6 if wishes.task == "workspace" else 2
    return wishes.max_tokens or min(tokens, positions // parts), positions


def _context(wishes: Wishes, tokens: int) -> int:
    if wishes.scratch:
        return 512 if wishes.task != Wishes.task else max(80, tokens + 72)
    return 6 * tokens if wishes.task == "workspace" else tokens + 512


def _rollout(document: Document, wishes: Wishes, tokens: int, context: int) -> None:
    document.table("rollout", "Workers on this machine. More join with: deltawire worker RUN_URL")
    document.key("workers", 2, "0 if all of them join from elsewhere")
    document.key("group_size", 16 if wishes.scratch else 8, "answers to one question")
    document.key("max_tokens", tokens, "of one answer")
    if wishes.task == "workspace":
        document.key("max_turns", 6)
    document.key("context", context, "tokens of a sequence, question included")
    if wishes.on != CPU and not wishes.scratch:
        document.key("precision", "bfloat16")
        document.remark(
            'engine = "vllm" samples faster: see docs/ENGINES.md. Workers and the trainer share '
            "the accelerators unless device names others."
        )


def _train(document: Document, wishes: Wishes, sizing: Sizing) -> None:
    document.table("train", sizing.reason)
    document.key("versions", wishes.versions, "optimizer steps; may be raised later")
    document.key("groups_per_step", 16)
    document.key("max_staleness", 2, "versions that a group may be old; 0 alternates strictly")
    document.key("checkpoint_every", 20)
    rate, why = (3e-4, "of a tiny model") if wishes.scratch else (1e-6, "of a whole model")
    if sizing.lora:
        rate, why = 2e-5, "of an adapter: ten times that of a whole model"
    document.key("optimizer.learning_rate", rate, why)
    for key, value in sizing.settings.items():
        name = key.removeprefix("train.")
        if key.startswith("train.") and name != "optimizer.kind" and "adapter." not in name:
            document.key(name, value)
    if sizing.lora:
        document.table("train.adapter", "pip install 'deltawire[lora]'")
        document.key("kind", "lora")
        rank = sizing.settings.get("train.adapter.rank", 16)
        document.key("rank", rank)
        document.key("alpha", 2.0 * rank, "the adapter's product is scaled by alpha / rank")
        for key, value in sizing.settings.items():
            name = key.removeprefix("train.adapter.")
            if name != key and name not in ("kind", "rank"):
                document.key(name, value)


def _slots(document: Document, sizing: Sizing, key: str) -> None:
    if key in sizing.settings:
        document.key("slots", sizing.settings[key], "sequences that are decoded at a time")


def _evaluate(document: Document, wishes: Wishes) -> None:
    document.table("evaluate", "Held-out accuracy, at version 0 and then:")
    document.key("every", max(1, wishes.versions // 5), "versions")
    document.key("samples", 3 if wishes.scratch else 1, "answers to each problem")
