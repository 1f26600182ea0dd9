"""Records pairs of real weights with the loop's trainer, sampler and tasks, in one process.

Every setting (reinforcement learning or supervised, at one learning rate) starts from the same
warm-started model. It takes ``settle`` steps so that Adam's moments are those of a running job,
then the base is recorded, and after each stride k the weights make a pair with it.

Sampling is on-policy: the embedded engine draws at every step from seeds that depend only on the
step's number, so an interrupted setting continues from its last saved state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.pairs import Bf16Bits, save_pair
from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import ReasoningTasks, Task
from deltawire.errors import InputError
from deltawire.export.models import load_model, load_tokenizer, stop_tokens
from deltawire.export.shards import local_part
from deltawire.export.source import bits_of
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.rl.trainer.warm_start import run_warm_start
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
from deltawire.train.build import is_built
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step
from deltawire.train.warm_start import answer_loss
from deltawire.wire.rollouts import Group

Kind = Literal["rl", "sft"]

SAVE_EVERY = 8
"""Steps between two saved states."""

_BASE = "base/"


@dataclass(frozen=True)
class Setting:
    """Options of a recording: ``strides`` are the steps between base and target of each pair."""

    kind: Kind
    learning_rate: float
    strides: tuple[int, ...]
    settle: int

    @property
    def name(self) -> str:
        """Kind and rate, as in file names: ``rl-lr3e-6``."""
        mantissa, exponent = f"{self.learning_rate:e}".split("e")
        return f"{self.kind}-lr{float(mantissa):g}e{int(exponent)}"


@dataclass(frozen=True)
class Recorded:
    """A pair that was written; ``density`` is the share of weights that changed."""

    path: Path
    density: float


def warm_model(config: RunConfig, folder: Path, say: Callable[[str], None]) -> Path:
    """The warm-started model's directory, created if it is missing."""
    out = folder / "warm"
    if is_built(out):
        return out
    folder.mkdir(parents=True, exist_ok=True)
    process = Process(open_bucket("memory:///"), "bench", "warm-start", supervised=False)
    said = time.monotonic()

    def watch(progress: Any) -> None:
        nonlocal said
        if progress.accuracy is not None or time.monotonic() - said > 15:
            said = time.monotonic()
            reached = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.2f}"
            say(f"warm start: step {progress.step}, loss {progress.loss:.3f}{reached}")

    run_warm_start(process, config, out, watch=watch)
    return out


def record(
    config: RunConfig, setting: Setting, out: Path, say: Callable[[str], None]
) -> list[Recorded]:
    """Trains at ``setting`` and writes its pairs as ``out/NAME-SETTING-kSTRIDE.npz``.

    Existing pairs are kept. States lie in ``out/work``, which may be
    deleted when no more strides are wanted. Raises InputError for a state of another model.
    """
    missing = [k for k in setting.strides if not pair_path(config, setting, out, k).exists()]
    if not missing:
        return []
    work = out / "work" / config.name
    session = _Session(config, setting, warm_model(config, work, say), work)
    session.restore(before=setting.settle + min(missing))
    recorded = []
    last = setting.settle + max(missing)
    started, first = time.monotonic(), session.masters.steps
    while session.masters.steps < last:
        if session.masters.steps == setting.settle:
            session.set_base()
        done = session.step()
        steps = session.masters.steps
        stride = steps - setting.settle
        if stride in missing:
            path = pair_path(config, setting, out, stride)
            recorded.append(Recorded(path, save_pair(path, session.base, session.bits())))
            say(f"{path.name}: {recorded[-1].density:.2%} changed")
        if steps % SAVE_EVERY == 0 or steps == last:
            session.save()
            pace = (time.monotonic() - started) / (steps - first)
            say(f"{config.name} {setting.name}: step {steps} of {last}, {done}, {pace:.1f} s each")
    return recorded


def pair_path(config: RunConfig, setting: Setting, out: Path, stride: int) -> Path:
    """The path of a stride's pair."""
    return out / f"{config.name}-{setting.name}-k{stride}.npz"


class _Session:
    """One setting's training between two steps."""

    def __init__(self, config: RunConfig, setting: Setting, model_path: Path, work: Path) -> None:
        optimizer = msgspec.structs.replace(
            config.train.optimizer, learning_rate=setting.learning_rate
        )
        train = msgspec.structs.replace(config.train, optimizer=optimizer)
        self.config = msgspec.structs.replace(config, train=train)
        self.setting = setting
        self._state = work / f"{setting.name}-settle{setting.settle}.safetensors"
        torch.set_num_threads(config.threads)
        self.model = load_model(model_path).train()
        tokenizer = load_tokenizer(model_path)
        self.text = Text(tokenizer)
        self.stops = stop_tokens(self.model, tokenizer)
        self.tasks = ReasoningTasks(config.task, seed=config.seed)
        self.masters = MasterWeights(self.model, train)
        self.base: dict[str, Bf16Bits] = {}

    def bits(self) -> dict[str, Bf16Bits]:
        """The published bits by name, in their shapes; the caller's own."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return {
            name: bits.reshape(shapes[name]).astype(np.uint16)
            for name, bits in bits_of(self.masters.source).items()
            if name in shapes  # Saved buffers are not trained.
        }

    def set_base(self) -> None:
        """Records the current weights as the base."""
        self.base = self.bits()

    def step(self) -> str:
        """One optimizer step; returns a few words about it."""
        if self.setting.kind == "sft":
            return self._supervised_step()
        groups = asyncio.run(self._sample(self.masters.steps))
        self.model.train()
        result = train_step(self.masters, groups, self.config)
        return f"reward {result.reward_mean:.2f}, k3 {result.parity.drift.k3:.1e}"

    def _supervised_step(self) -> str:
        batch, step = self.config.warm_start.batch, self.masters.steps
        drawn = [self.tasks.draw("recorded-sft", step * batch + i) for i in range(batch)]
        pairs = [
            (
                self.text.prompt(self.tasks.prompt(task)),
                [*self.text.encode(self.tasks.answer(task)), self.stops[0]],
            )
            for task in drawn
        ]
        loss = answer_loss(self.model, pairs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.masters.step()
        return f"loss {float(loss.detach()):.3f}"

    async def _sample(self, step: int) -> list[Group]:
        """A step's groups, drawn from the current weights."""
        rollout, count = self.config.rollout, self.config.train.groups_per_step
        engine = TransformersEngine(
            self.model,
            stop_tokens=self.stops,
            slots=rollout.slots,
            capacity=rollout.context,
            seed=self.config.seed * 1_000_003 + step,
            version=step,
        )
        drawn = [self.tasks.draw("recorded-rl", step * count + i) for i in range(count)]
        groups = asyncio.gather(*(self._sample_group(engine, task) for task in drawn))
        while not groups.done():
            await engine.advance()
        return await groups

    async def _sample_group(self, engine: TransformersEngine, task: Task) -> Group:
        rollout = self.config.rollout
        limits = EpisodeLimits.of(rollout)
        episodes = await asyncio.gather(
            *(
                run_episode(
                    engine,
                    self.tasks.open(task),
                    self.text,
                    temperature=rollout.temperature,
                    limits=limits,
                )
                for _ in range(rollout.group_size)
            )
        )
        if failed := [episode.cause for episode in episodes if episode.cause]:
            raise InputError(f"an episode of task {task.identity} failed: {failed[0]}")
        return group_of("recording", "recording", task, rollout.temperature, episodes)

    def save(self) -> None:
        """Writes the state atomically."""
        state = {
            name: local_part(tensor).contiguous() for name, tensor in self.masters.state().items()
        }
        for name, bits in self.base.items():
            state[_BASE + name] = torch.from_numpy(bits.view(np.int16))
        self._state.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._state.with_suffix(".part")
        safetensors.torch.save_file(state, unfinished)
        unfinished.rename(self._state)

    def restore(self, *, before: int) -> None:
        """Continues from the saved state, if there is one before step ``before``."""
        if not self._state.is_file():
            return
        try:
            state: dict[str, Tensor] = safetensors.torch.load_file(self._state)
        except safetensors.SafetensorError as error:
            raise InputError(f"{self._state} is damaged: {error}", hint="delete it") from error
        if int(state["steps"]) >= before:
            return
        self.masters.restore(state)
        self.base = {
            name.removeprefix(_BASE): tensor.numpy().view(np.uint16)
            for name, tensor in state.items()
            if name.startswith(_BASE)
        }
