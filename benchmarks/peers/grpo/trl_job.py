# ruff: noqa: ARG001, ARG002  (TRL passes arguments by name)
"""The job in TRL: its `GRPOTrainer`, as its documentation shows it, with the settings of job.toml.

This file is a program. The code between the two marks is what a user writes; only it is counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

# job: begin
from datasets import Dataset
from reasoning_gym import get_score_answer_fn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP, GROUPS = 16, 16


def reward(prompts: list[str], completions: list[str], entry: list[str], **_: Any) -> list[float]:
    """Scores each answer as its dataset does."""
    score = get_score_answer_fn("spell_backward")
    return [
        float(score(answer.strip(), json.loads(one)))
        for answer, one in zip(completions, entry, strict=True)
    ]


def train(
    model: str, tasks: Dataset, out: str, steps: int, save: int, seed: int, report: Any
) -> Any:
    """Train, and save a checkpoint every ``save`` steps."""
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        train_dataset=tasks,
        callbacks=[report],
        args=GRPOConfig(
            output_dir=out,
            seed=seed,
            per_device_train_batch_size=GROUP * GROUPS,
            num_generations=GROUP,
            max_completion_length=8,
            learning_rate=3e-4,
            adam_beta2=0.99,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            epsilon=0.2,
            epsilon_high=0.28,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            max_steps=steps,
            save_steps=save,
            save_only_model=True,
            logging_steps=1,
            report_to=[],
        ),
    )
    trainer.train()
    return trainer


# job: end


class Clock(TrainerCallback):
    """Notes when training began, when each step ended, and how many tokens were answered."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ended: list[float] = []
        self.tokens = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock: models and data are loaded."""
        self.began = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the time."""
        self.ended.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Adds the step's tokens."""
        self.tokens += (logs or {}).get("completions/mean_length", 0.0) * GROUP * GROUPS


def main() -> None:
    """Runs the job and write ``times.json``."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--tasks", "--out"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--save", "--seed"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    rows = [json.loads(line) for line in Path(given.tasks).read_text().splitlines()]
    clock = Clock()
    train(
        given.model, Dataset.from_list(rows), given.out, given.steps, given.save, given.seed, clock
    )
    times = {"began": clock.began, "ended": clock.ended, "tokens": clock.tokens}
    Path(given.out, "times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
