"""Defines the sections of tasks, their data, the chat template, and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from msgspec import Meta

from deltawire.config.base import Count, OwnDevice, Positive, Section

SetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")]
Place = Annotated[str, Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)?\Z")]
"""``module:function``, or empty."""
ToolName = Annotated[
    str, Meta(max_length=2048, pattern=r"^[a-z]{1,16}:([A-Za-z0-9_.-]{1,40}|https?://[^\s,]+)\Z")
]
Column = Annotated[str, Meta(max_length=128)]

_PLACEHOLDER = re.compile(r"\{([^{}\s]{1,128})\}")


class ChatConfig(Section, frozen=True, kw_only=True):
    """Defines how messages become tokens, in every task of the run.

    Example::

        [chat]
        system = "Answer with a number."
        template_kwargs = { enable_thinking = false }
    """

    system: Annotated[str, Meta(max_length=100_000)] = ""
    """A system prompt before the messages of every episode that begins without one."""
    template: Annotated[str, Meta(max_length=1_000_000)] = ""
    """The text of a Jinja chat template that replaces the model's; not a file name."""
    template_kwargs: dict[str, Any] = {}
    """Further variables of the template, such as ``enable_thinking``."""


class MessageTemplate(Section, frozen=True, kw_only=True):
    """One message of a task. ``{column}`` stands for a column of the task's row.

    Example::

        [[task.messages]]
        role = "user"
        content = "Spell backward: {question}"
    """

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Meta(max_length=100_000)]


class DataConfig(Section, frozen=True, kw_only=True):
    """The rows of the environment ``dataset``: their location, and the meaning of their columns
    (`deltawire.data.rows`).

    Example::

        [task]
        environment = "dataset"
        prompt = "{question} "

        [task.data]
        path = "data/train.jsonl"
        answer = "answer"
    """

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A .jsonl or .parquet file, a folder of them, or a folder that ``save_to_disk`` of Hugging
    Face datasets wrote. Every process reads it, so it must be the same on all machines; each
    machine's user names what a run may read (`deltawire.config.machine`).
    """
    split: Annotated[str, Meta(max_length=128)] = ""
    heldout_split: Annotated[str, Meta(max_length=128)] = ""
    """The split for evaluation; if empty, rows of ``split`` are held out."""
    messages: Column = ""
    """The column with a list of messages, each with ``role`` and ``content``, instead of
    ``task.prompt`` or ``task.messages``."""
    answer: Column = ""
    """The column with the correct answer: for the exact reward, and for a warm start."""
    identity: Column = ""
    """The column that identifies a row; without it, the row's number does."""
    family: Column = ""
    """The column with the kind of a task."""
    shuffle: bool = True
    """Draw each epoch in another order; false keeps the order of the file."""


class ToolServerConfig(Section, frozen=True, kw_only=True):
    """A server of tools that speaks MCP: a command in the sandbox, or a URL.

    Each episode has a server, or a session of it, for itself. The command sees the file or folder
    ``path`` in its working directory, and no network.

    Example::

        [[task.tool_servers]]
        name = "calculator"
        command = ["python3", "calculator.py"]
        path = "servers/calculator.py"
    """

    name: SetName
    command: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=64)
    ] = []
    path: Annotated[str, Meta(max_length=4096)] = ""
    """A file or folder that is copied into the sandbox. Each machine's user names what a run may
    read (`deltawire.config.machine`)."""
    packages: Annotated[str, Meta(max_length=4096)] = ""
    """A folder of installed Python packages that the command may import, such as the site-packages
    of an environment for the server."""
    url: Annotated[str, Meta(max_length=2048, pattern=r"^(https?://[^\s,]+)?\Z")] = ""
    """The address of a server that runs already (streamable HTTP). Each machine's user names those
    that a run may reach."""
    isolation: Literal["namespaces", "process"] = "namespaces"
    only: Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(max_length=128)] = []
    """The tools to offer; all that the server has, if empty."""
    calls: Count = 32
    """The most calls of one episode."""
    start_limit_s: Positive = 60.0
    """Seconds for each request until the tools are known."""
    call_limit_s: Positive = 30.0
    limit_s: Positive = 600.0
    """Seconds that a command may run, which is the whole episode."""
    cpu_s: Positive = 120.0
    memory_mib: Annotated[int, Meta(ge=32, le=1 << 20)] = 1024
    processes: Annotated[int, Meta(ge=1, le=1 << 15)] = 64
    """Processes and threads of a command."""
    answer_kib: Annotated[int, Meta(ge=1, le=1 << 14)] = 256
    """The longest message of the server; longer ones are not kept."""

    def contradiction(self, where: str) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason, naming ``where``, and what to do;
        None if there is no contradiction."""
        if bool(self.command) == bool(self.url):
            return f"{where} needs either command or url", ""
        if self.url and (self.path or self.packages):
            return f"{where}.path and {where}.packages are for a command", "leave them out"
        return None


class TaskConfig(Section, frozen=True, kw_only=True):
    """The source of tasks: an environment by its name, and its ``options``; or a ``mixture``.

    Example::

        [task]
        environment = "reasoning_gym"
        dataset = "spell_backward"
        options = { max_word_len = 4 }
    """

    environment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}\Z")] = "reasoning_gym"
    """A registered name (`deltawire.envs`), or ``module:attribute`` of a module that this machine
    trusts; see docs/ENVIRONMENTS.md."""
    dataset: str = "spell_backward"
    """One of the environment's datasets, if it has several."""
    options: dict[str, Any] = {}
    prompt: str = "{question}\n"
    messages: list[MessageTemplate] = []
    """Messages instead of ``prompt``, for the model's chat template."""
    attempts: Count = 1
    """Answers allowed for a question of reasoning-gym; each wrong one except the last is answered
    with ``retry``."""
    retry: str = "That is not right. Try again.\n"
    heldout: Count = 200
    """Number of problems that are evaluated on and never trained on."""
    data: DataConfig | None = None
    """The rows of the environment ``dataset``."""
    reward: Place = ""
    """A custom reward, ``module:function`` of a module that this machine trusts, instead of the
    environment's score.
    """
    reward_limit_s: Positive = 10.0
    """Seconds that one call of ``reward`` may take."""
    tools: Annotated[list[ToolName], Meta(max_length=16)] = []
    """Tools of servers that the model may call next to those of the environment: ``mcp:`` and the
    name of one of ``tool_servers``, or a URL."""
    tool_servers: Annotated[list[ToolServerConfig], Meta(max_length=16)] = []
    """The servers that ``tools`` names."""
    mixture: list[MixtureEntry] = []
    """Several tasks in one run; all other keys of this table are then unused."""

    @property
    def placeholders(self) -> set[str]:
        """The columns that the prompt, or the messages, name."""
        texts = [message.content for message in self.messages] or [self.prompt]
        return {name for text in texts for name in _PLACEHOLDER.findall(text)}

    def contradiction(self, where: str) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason, naming ``where``, and what to do;
        None if there is no contradiction.
        """
        if self.mixture:
            names = [entry.name for entry in self.mixture]
            if len(set(names)) < len(names):
                return f"{where}.mixture names a task twice", "give each its own name"
            if any(entry.task.mixture for entry in self.mixture):
                return f"{where}.mixture holds another mixture", "list all tasks in one"
            found = (
                entry.task.contradiction(f"{where}.mixture[{number}].task")
                for number, entry in enumerate(self.mixture)
            )
            return next((one for one in found if one), None)
        if found_tools := self._tool_contradiction(where):
            return found_tools
        if self.environment == "reasoning_gym" and "question" not in self.placeholders:
            kind = "messages" if self.messages else "prompt"
            return f"{where}.{kind} must contain {{question}}", ""
        if self.environment != "text_gym" and (self.environment == "dataset") != bool(self.data):
            return (
                f"{where}.data belongs to the environment dataset, which needs it",
                'set environment = "dataset" and [task.data] with a path',
            )
        if self.environment == "dataset" and self.data and not (self.reward or self.data.answer):
            return (
                f"{where} has no reward",
                'set reward = "module:function", or data.answer to a column for an exact match',
            )
        if self.environment not in ("dataset", "reasoning_gym") and (self.reward or self.messages):
            return (
                f"{where}.reward and {where}.messages are for dataset and reasoning_gym",
                f"the environment {self.environment} has its own",
            )
        return None

    def _tool_contradiction(self, where: str) -> tuple[str, str] | None:
        names = [server.name for server in self.tool_servers]
        if len(set(names)) < len(names):
            return f"{where}.tool_servers names a server twice", "give each its own name"
        if self.tools and self.environment == "verifiers":
            return (
                f"{where}.tools are for environments, and those of verifiers are harnesses",
                "let the harness connect to the server",
            )
        for tools in self.tools:
            kind, _, name = tools.partition(":")
            if kind != "mcp":
                return f"{where}.tools has no kind {kind!r}", "the kind is mcp"
            if name not in names and "://" not in name:
                return f"{where}.tools names {name}, which {where}.tool_servers lacks", ""
        found = (
            server.contradiction(f"{where}.tool_servers[{number}]")
            for number, server in enumerate(self.tool_servers)
        )
        return next((one for one in found if one), None)

    def servers(self) -> list[ToolServerConfig]:
        """The servers that ``tools`` names, in that order."""
        named = {server.name: server for server in self.tool_servers}
        places = [tools.partition(":")[2] for tools in self.tools]
        return [
            ToolServerConfig(name=f"url{number}", url=place) if "://" in place else named[place]
            for number, place in enumerate(places)
        ]

    def each(self) -> Iterator[TaskConfig]:
        """Returns its tasks: those of the mixture, or itself."""
        yield from (entry.task for entry in self.mixture) if self.mixture else [self]


class MixtureEntry(Section, frozen=True, kw_only=True):
    """One of several tasks of a run: its ``name``, and its share of the groups.

    Example::

        [[task.mixture]]
        name = "spelling"
        weight = 2.0

        [task.mixture.task]
        dataset = "spell_backward"
    """

    name: SetName
    weight: Positive = 1.0
    task: TaskConfig


class EvaluationSet(Section, frozen=True, kw_only=True):
    """A named set of problems for evaluation: the held-out ones of ``task``.

    Example::

        [[evaluate.sets]]
        name = "long-words"

        [evaluate.sets.task]
        options = { min_word_len = 8, max_word_len = 12 }
    """

    name: SetName
    task: TaskConfig


class EvaluateConfig(Section, frozen=True, kw_only=True):
    """Held-out accuracy at version 0, every so many versions, and at the last.

    It is the share of correct answers among ``samples`` for each problem, drawn at the rollout's
    temperature (pass@1 of the policy that is trained); greedy accuracy and the mean reward are
    measured as well.

    Example::

        [evaluate]
        every = 50
        samples = 8
    """

    every: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 20
    """0 starts no evaluator."""
    samples: Count = 4
    slots: Count = 256
    """The most sequences that are decoded at a time; memory may allow fewer."""
    device: OwnDevice = ""
    """The evaluator's device, if not the run's."""
    sets: list[EvaluationSet] = []
    """Further sets of problems, each measured and reported under its name."""
    budgets: Annotated[list[Count], Meta(max_length=16)] = []
    """Budgets of thinking with which the held-out problems are measured as well: the curve of
    accuracy over tokens (needs rollout.thinking)."""

    def contradiction(self) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            return "evaluate.sets names a set twice", "give each its own name"
        if self.budgets != sorted(set(self.budgets)):
            return "evaluate.budgets do not rise", "list each budget once, the smallest first"
        for number, one in enumerate(self.sets):
            where = f"evaluate.sets[{number}].task"
            if one.task.mixture:
                return f"{where} is a mixture", "list each task as a set"
            if found := one.task.contradiction(where):
                return found
        return None


class DocumentStreamConfig(Section, frozen=True, kw_only=True):
    """One stream of documents for mid-training: rows with a text each.

    Example::

        [[midtrain.streams]]
        path = "data/books.jsonl"
        weight = 3.0
    """

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """The documents, as in ``task.data.path``: JSONL, Parquet, a folder of them, or a saved
    dataset.
    """
    split: Annotated[str, Meta(max_length=128)] = ""
    column: Annotated[str, Meta(min_length=1, max_length=128)] = "text"
    weight: Positive = 1.0
    """Its share of the documents."""
    shuffle: bool = True
    name: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,39})?\Z")] = ""
    """Its name among the held-out losses; otherwise that of the file or folder."""
    heldout_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The share of its rows that is never trained on, and on which the loss is measured. No seed
    changes which rows these are."""

    @property
    def source(self) -> str:
        """The name of its held-out loss."""
        return self.name or re.sub(r"[^A-Za-z0-9_.-]", "-", PurePath(self.path).stem)[:40]


class HeldoutStreamConfig(Section, frozen=True, kw_only=True):
    """Documents that are only measured on, never trained on."""

    name: SetName
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    split: Annotated[str, Meta(max_length=128)] = ""
    column: Annotated[str, Meta(min_length=1, max_length=128)] = "text"


class HeldoutLossConfig(Section, frozen=True, kw_only=True):
    """Mean cross-entropy on documents that are not trained on, at version 0, every so many
    versions, and at the last."""

    every: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 20
    """0 measures nothing."""
    tokens: Count = 262_144
    """The most tokens of each source: a fixed sample of its documents where it has more."""
    streams: Annotated[list[HeldoutStreamConfig], Meta(max_length=100)] = []
    """Documents in addition to the ``heldout_share`` of the streams that are trained on."""


class MidtrainConfig(Section, frozen=True, kw_only=True):
    """Mid-training, instead of reinforcement learning: next-token steps over documents, one version
    a step. The run has no workers and no evaluator.

    Example::

        [midtrain]
        tokens_per_step = 32768
        sequence_length = 2048

        [[midtrain.streams]]
        path = "data/books.jsonl"
    """

    streams: Annotated[list[DocumentStreamConfig], Meta(min_length=1, max_length=100)]
    tokens_per_step: Count = 65_536
    sequence_length: Annotated[int, Meta(ge=2, le=1_000_000_000)] = 4096
    """Longer documents are cut into pieces of this many tokens."""
    heldout: HeldoutLossConfig = HeldoutLossConfig()

    def contradiction(self) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        names = [one.source for one in self.streams if one.heldout_share]
        names += [one.name for one in self.heldout.streams]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            return (
                f"two held-out sources of midtrain have the name {twice}",
                "give each a name of its own, as midtrain.streams.name",
            )
        return None


def data_paths(section: Section) -> Iterator[str]:
    """Returns the paths of rows, and of files for servers of tools, that a configuration, or a part
    of it, names."""
    for one in _sections(section):
        if isinstance(one, DataConfig | DocumentStreamConfig | HeldoutStreamConfig):
            yield one.path
        if isinstance(one, ToolServerConfig):
            yield from filter(None, (one.path, one.packages))


def server_urls(section: Section) -> Iterator[str]:
    """Returns the URLs of servers that a configuration, or a part of it, names."""
    for one in _sections(section):
        if isinstance(one, TaskConfig) and not one.mixture:
            yield from (server.url for server in one.servers() if server.url)
            if one.environment == "openenv" and isinstance(url := one.options.get("url"), str):
                yield from filter(None, [url])


def _sections(section: Section) -> Iterator[Section]:
    yield section
    for name in section.__struct_fields__:
        value = getattr(section, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Section):
                yield from _sections(one)
