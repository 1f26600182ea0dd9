"""Runs the job in each system from one start, and measures both by the same means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.grpo.memory import run_and_watch
from deltawire.config import load_config
from deltawire.envs.reasoning import ReasoningTasks
from deltawire.events import Step
from deltawire.runtime.event_tail import events_of
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_manifest, read_run

HERE = Path(__file__).parent
JOB = HERE / "job.toml"
SCRIPT = HERE / "trl_job.py"
SAMPLES = 3
OURS, THEIRS = "deltawire", "trl"


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one job. ``accuracies`` is by step, pass@1 at temperature 1 on held-out
    problems; ``seconds_to_target`` is None if no checkpoint reached it."""

    system: str
    seed: int
    steps: int
    seconds: float
    """From loaded models to the last step."""
    whole_seconds: float
    """From the start of the command to its end."""
    tokens: float
    """Of answers that were trained on."""
    tokens_per_second: float
    seconds_to_target: float | None
    accuracies: dict[int, float]
    peak_bytes: int
    lines: int


class Start:
    """The model that both begin from, made by a warm start, and the tasks.

    Example::

        start = Start(Path("runs/bench-peers"), seed=0)
        figures = run_ours(start, steps=100, save=20, target=0.35)
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder / f"seed-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seed = seed
        self.model = self.folder / "start"
        self.config = load_config(JOB)
        self.source = ReasoningTasks(self.config.task, seed=seed)
        if not self.model.exists():
            _deltawire("warm-start", str(JOB), "--out", str(self.model), "--seed", str(seed))

    def write_tasks(self, count: int) -> Path:
        """Writes as many tasks as the job draws, none of them held out, as rows for TRL."""
        path = self.folder / "tasks.jsonl"
        with path.open("w") as file:
            for number in range(count):
                task = self.source.draw("peers", number)
                row = {"prompt": self.source.prompt(task), "entry": json.dumps(task.data)}
                file.write(json.dumps(row) + "\n")
        return path


def run_ours(start: Start, *, steps: int, save: int, target: float) -> JobFigures:
    """Runs the job with ``deltawire run``: one trainer and two workers, on one thread each."""
    out = start.folder / OURS
    path = start.folder / "deltawire.toml"
    path.write_text(_configuration(start, steps))
    command = [sys.executable, "-m", "deltawire", "run", str(path), "--out", str(out), "--plain"]
    began = time.perf_counter()
    peak = run_and_watch(command, log=start.folder / "deltawire.log", env={})
    whole = time.perf_counter() - began
    bucket = open_bucket(str(out / "bucket"))
    at = _commit_times(bucket, steps)
    tokens = sum(one.tokens for one in events_of(bucket, "trainer") if isinstance(one, Step))
    accuracies = {}
    for version in (0, *range(save, steps + 1, save)):
        folder = start.folder / "pulled"
        _deltawire("pull", bucket.url, str(folder), "--version", str(version))
        accuracies[version] = accuracy_of(folder, start)
    return _figures(OURS, start, at, tokens, accuracies, target, whole=whole, peak=peak)


def run_theirs(start: Start, *, steps: int, save: int, target: float) -> JobFigures:
    """Runs the job with TRL's `GRPOTrainer`, on one thread for each core."""
    out = start.folder / THEIRS
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), "--model", str(start.model), "--out", str(out)]
    command += ["--tasks", str(start.write_tasks(steps * start.config.train.groups_per_step))]
    command += ["--steps", str(steps), "--save", str(save), "--seed", str(start.seed)]
    threads = {"OMP_NUM_THREADS": str(len(_cores())), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    peak = run_and_watch(command, log=start.folder / "trl.log", env=threads)
    whole = time.perf_counter() - began
    times = json.loads((out / "times.json").read_text())
    at = [times["began"], *times["ended"]]
    accuracies = {0: accuracy_of(start.model, start)}
    for step in range(save, steps + 1, save):
        accuracies[step] = accuracy_of(out / f"checkpoint-{step}", start)
    return _figures(THEIRS, start, at, times["tokens"], accuracies, target, whole=whole, peak=peak)


@torch.no_grad()
def accuracy_of(folder: Path, start: Start) -> float:
    """Pass@1 of a model directory on the held-out problems, by transformers' own sampling."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    problems = start.source.heldout()
    prompts = [str(start.source.prompt(task)) for task in problems for _ in range(SAMPLES)]
    torch.manual_seed(0)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    drawn = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=start.config.rollout.max_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(
        drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    wanted = [start.source.answer(task) for task in problems for _ in range(SAMPLES)]
    right = [text.strip() == answer for text, answer in zip(texts, wanted, strict=True)]
    return float(sum(right)) / len(right)


def lines_of(system: str) -> int:
    """Lines that a user writes, without blank ones, comments and docstrings of one line."""
    if system == OURS:
        return _count(JOB.read_text().splitlines())
    text = SCRIPT.read_text().partition("# job: begin\n")[2].partition("# job: end")[0]
    return _count(text.splitlines())


def _count(lines: Sequence[str]) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith(("#", '"""')) for line in lines)


def _configuration(start: Start, steps: int) -> str:
    """The job's file with the start's directory instead of a model to build and to warm up."""
    raw = tomllib.loads(JOB.read_text())
    text = JOB.read_text()
    for table in ("model.build", "warm_start"):
        head, _, rest = text.partition(f"[{table}]\n")
        text = head + rest.partition("\n\n")[2]
    text = text.replace(f"versions = {raw['train']['versions']}", f"versions = {steps}")
    text += f"\n[model]\npath = {json.dumps(str(start.model.resolve()))}\n"
    return text.replace('name = "peers"\n', f'name = "peers"\nseed = {start.seed}\n')


def _commit_times(bucket: Bucket, steps: int) -> list[float]:
    """When each version was committed, by the trainer's clock, in seconds."""
    run = read_run(bucket)
    manifests = [read_manifest(bucket, run, version) for version in range(steps + 1)]
    return [manifest.created_at for manifest in manifests if manifest is not None]


def _figures(
    system: str,
    start: Start,
    at: Sequence[float],
    tokens: float,
    accuracies: dict[int, float],
    target: float,
    *,
    whole: float,
    peak: int,
) -> JobFigures:
    seconds = at[-1] - at[0]
    reached = [step for step, accuracy in accuracies.items() if accuracy >= target]
    return JobFigures(
        system=system,
        seed=start.seed,
        steps=len(at) - 1,
        seconds=seconds,
        whole_seconds=whole,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        seconds_to_target=at[min(reached)] - at[0] if reached else None,
        accuracies=accuracies,
        peak_bytes=peak,
        lines=lines_of(system),
    )


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def _deltawire(*arguments: str) -> None:
    subprocess.run(  # noqa: S603 - our own words
        [sys.executable, "-m", "deltawire", *arguments], check=True, stdout=subprocess.DEVNULL
    )
