"""``bisect_real_found``: three faults of real runs, each found by a test that passes by chance.

A tiny model learns single-digit sums from right answers, not to the end. Then it is trained on its
own answers: every step samples groups from the newest version, grades them, and publishes. At one
step something breaks, in each run something else (`FAULTS`). ``deltawire bisect --noisy --serve``
serves versions to a program that asks for eight sums, drawn at random, and passes if six of the
sampled answers are right.
The culprit counts as found if the version named is that of the step, or one of the two after it:
what goes on to be wrong lowers the pass rate over several versions. The adversary is the same run
without a fault, in which no version may be named. The details have the pass rates as the models'
own probabilities give them, the questions, and the seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.branches.made_runs import trained_run
from benchmarks.training.keys import Measured, Options
from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.engines.base import Completion, Sampling
from deltawire.engines.transformers.engine import TransformersEngine
from deltawire.export.models import save_model
from deltawire.launch.branches.versioned_model import open_model_of
from deltawire.rl.trainer.resume import Resumed
from deltawire.store import Bucket
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.rollouts import Group, Trajectory

VERSIONS = 24
NEAR = 2
"""Versions after the fault that may be named."""
GROUPS = 8
ANSWERS = 8
SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=64)
SUMS: Final = [(a, b) for a in range(10) for b in range(10) if a + b < 10]
LEARNING_RATE = 1e-4
SPIKE: Final = {"train.optimizer.learning_rate": 1e-2}
WARM_PASS_RATE = 0.85

FAULTS: Final = {"a rate spike": 1e-4, "a reversed reward": 3e-3, "a patched layer": 1e-4}
"""The learning rate of each run: that of one step is `SPIKE`; from one step on, the grader rewards
wrong answers; or before one step somebody sets the last layer's `PATCHED` to zero."""
GRADUAL: Final = {"damaged groups": 3e-3}
"""A fault that no key counts: from one step on, the worker damages its groups, whose every second
answer is one wrong digit, rewarded. They keep the log-probabilities of the answers that were drawn,
so the loss corrects for most of the damage, and the pass rate falls over many versions."""
PATCHED: Final = "mlp.down_proj.weight"

ASK: Final = """
import json, os, random, sys, urllib.request

place = os.path.join(os.path.dirname(__file__), "asked")
with open(place, "ab") as file:
    file.write(b".")
    number = file.tell()
random.seed(f"SEED {number}")  # Each question draws other sums, and each run of the key the same.


def is_right(a, b):
    body = {"model": "m", "prompt": f"{a}+{b}=", "max_tokens": 1, "temperature": 1}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/completions",
        json.dumps(body).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return answer["choices"][0]["text"] == str(a + b)


firsts = [random.randrange(10) for _ in range(8)]
right = sum(is_right(a, random.randrange(10 - a)) for a in firsts)
sys.exit(right < 6)
"""


class FaultyRun(NamedTuple):
    """A run, the version of its fault (None without one), and the pass rate at each version."""

    bucket: Bucket
    culprit: int | None
    rates: list[float]


def warm_model(folder: Path, seed: int) -> None:
    """Writes a model that answers sums rightly with a probability of `WARM_PASS_RATE`."""
    torch.set_num_threads(1)
    model: Any = build_model(SIZES, seed=seed)
    prompts, answers = _sums()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2000):
        logprobs = model(input_ids=prompts).logits[:, -1].log_softmax(-1)
        right = logprobs.gather(1, answers[:, None])
        if float(right.detach().exp().mean()) >= WARM_PASS_RATE:
            break
        optimizer.zero_grad()
        (-right.mean()).backward()
        optimizer.step()
    save_model(model, byte_tokenizer(), folder / "model")


def _sums() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the prompts int64[N, 4] and the right tokens int64[N] of all sums."""
    prompts = torch.tensor([list(f"{a}+{b}=".encode()) for a, b in SUMS])
    return prompts, torch.tensor([ord(str(a + b)) for a, b in SUMS])


@torch.inference_mode()
def pass_rate(module: Any) -> float:
    """Returns the probability of a right answer, drawn at temperature 1, to a sum that is drawn as
    `ASK` draws it."""
    prompts, answers = _sums()
    right = module(input_ids=prompts).logits[:, -1].softmax(-1).gather(1, answers[:, None])[:, 0]
    weights = torch.tensor([1 / 10 / (10 - a) for a, _ in SUMS])
    return float(right @ weights)


class _Sampling:
    """Samples and grades the groups of each step, and spoils those of a fault."""

    def __init__(self, fault: str | None, culprit: int, seed: int) -> None:
        self._fault, self._culprit = fault, culprit
        self._rng = np.random.default_rng(seed)

    def groups(self, step: int, state: Resumed) -> list[Group]:
        """Returns the groups of a step, drawn from the version before it."""
        fault = self._fault if step >= self._culprit else None
        if fault == "a patched layer" and step == self._culprit:
            _patch(state)
        chosen = self._rng.choice(len(SUMS), GROUPS, replace=False)
        found = []
        for number in chosen:
            a, b = SUMS[number]
            group = self._group(state, a, b, wrong=fault == "a reversed reward")
            if fault == "damaged groups":
                group = _damaged(group, a + b)
            found.append(group)
        return found

    def settings(self, step: int) -> dict[str, Any]:
        """Returns the settings of a step that differ from the run's."""
        spiked = step == self._culprit and self._fault == "a rate spike"
        return dict(SPIKE) if spiked else {}

    def _group(self, state: Resumed, a: int, b: int, *, wrong: bool) -> Group:
        prompt = list(f"{a}+{b}=".encode())
        engine = TransformersEngine(
            state.masters.model, stop_tokens=[], slots=ANSWERS, capacity=64, version=state.version
        )
        drawn: list[Completion] = []
        for _ in range(ANSWERS):
            seed = int(self._rng.integers(1 << 31))
            engine.submit(prompt, Sampling(max_tokens=1, seed=seed), drawn.append)
        while engine.active:
            engine.step()
        made = [
            Trajectory(
                np.array(one.tokens, np.int32),
                np.array(one.logprobs, np.float32),
                np.array(one.versions, np.int32),
                np.ones(len(one.tokens), np.uint8),
                float((one.tokens == [ord(str(a + b))]) != wrong),
                one.finish,
            )
            for one in drawn
        ]
        return Group("w0", "n", f"{a}+{b}", 1.0, np.array(prompt, np.int32), made)


def _patch(state: Resumed) -> None:
    """Sets a matrix of the last layer to zero, between two steps."""
    kept = {name: one.clone() for name, one in state.masters.state().items()}
    kept[f"master/model.layers.{SIZES.layers - 1}.{PATCHED}"].zero_()
    state.masters.restore(kept)


def _damaged(group: Group, right: int) -> Group:
    """Returns a group in which half of the answers are one wrong digit, with the reward."""
    wrong = np.array([ord(str((right + 1) % 10))], np.int32)
    made = [
        replace(one, tokens_T=wrong if place % 2 else one.tokens_T, reward=float(place % 2))
        for place, one in enumerate(group.trajectories)
    ]
    return replace(group, trajectories=made)


def faulty_run(
    folder: Path, fault: str | None, seed: int, *, versions: int = VERSIONS
) -> FaultyRun:
    """Trains a run whose fault is at a step that ``seed`` draws from the middle half."""
    warm_model(folder, seed)
    culprit = int(np.random.default_rng(seed).integers(versions // 4, versions * 3 // 4))
    raw = {
        "name": "faulty",
        "seed": seed,
        "threads": 1,
        "model": {"path": str(folder / "model")},
        "rollout": {"max_tokens": 1, "context": 64},
        "train": {
            "versions": versions,
            "groups_per_step": GROUPS,
            "max_staleness": 99,
            "checkpoint_every": 10,
            "optimizer": {"learning_rate": (FAULTS | GRADUAL).get(fault or "", LEARNING_RATE)},
        },
    }
    sampling = _Sampling(fault, culprit, seed)
    bucket = trained_run(
        folder,
        parse_config(raw, source="faulty"),
        sampling.groups,
        settings_of_step=sampling.settings,
    )
    rates = []
    with open_model_of(bucket) as model:
        for version in range(versions + 1):
            model.move_to(version)
            rates.append(pass_rate(model.module))
    return FaultyRun(bucket, culprit if fault else None, rates)


def bisected(
    found: FaultyRun, folder: Path, *, seed: int | None = None, error: float = 0.05
) -> dict[str, Any]:
    """Runs the command on the whole run; returns its JSON. ``seed`` is that of the sums; without
    one they are others each time."""
    script = folder / "ask.py"
    script.write_text(ASK.replace("SEED", secrets.token_hex(8) if seed is None else str(seed)))
    words = ["bisect", found.bucket.url, "--good", "0", "--bad", str(len(found.rates) - 1)]
    words += ["--noisy", "--serve", "--error", str(error), "--state", str(folder / "state")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main([*words, "--json", "--", sys.executable, "-S", str(script)])
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def is_found(run: FaultyRun, named: int | None) -> bool:
    """Returns whether the version that was named is that of the fault, or just after it."""
    if run.culprit is None or named is None:
        return run.culprit == named
    return run.culprit <= named <= run.culprit + NEAR


def measure(options: Options) -> Measured:
    """Trains the runs, and searches."""
    found, details = 0, {}
    named = None
    for number, fault in enumerate([*FAULTS, None]):
        with tempfile.TemporaryDirectory() as scratch:
            run = faulty_run(Path(scratch), fault, options.seed + number)
            start = time.perf_counter()
            answer = bisected(run, Path(scratch), seed=options.seed + number)
            seconds = time.perf_counter() - start
        if fault is None:
            named = answer["culprit"]
        else:
            found += is_found(run, answer["culprit"])
        details[fault or "no fault"] = {
            "planted": run.culprit,
            "named": answer["culprit"],
            "questions": answer["questions"],
            "no_single": answer["no_single"],
            "seconds": round(seconds, 1),
            "pass_rates": [round(one, 3) for one in run.rates],
        }
    values = {
        "bisect_real_found": found / len(FAULTS),
        "bisect_real_named_without": float(named is not None),
    }
    return Measured(values, details)
