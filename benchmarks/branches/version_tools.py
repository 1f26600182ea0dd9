"""``diff_kl_error`` and ``served_wrong``: ``diff`` and ``bisect --serve`` next to plain models.

A tiny run is trained. Each of its versions is pulled into a directory, and transformers loads it in
float64: the twin shares no code with the tools but the pull. The KL that ``diff --answers``
computes at each token of an answer is compared with that of the twins. The server of ``bisect
--serve`` is moved between versions in a random order, forward and back, and asked over HTTP for a
token's log-probability, which must be nearest to that of the version's twin. The details have the
time of a move.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.branches.planted_groups import PROMPT, planted_run
from benchmarks.training.keys import Measured, Options
from deltawire.launch.branches.answer_differences import divergence
from deltawire.launch.branches.version_server import VersionServer
from deltawire.launch.branches.versioned_model import open_model_of
from deltawire.store import Bucket
from deltawire.sync import Checkout, read_run

VERSIONS = 6
MOVES = 20
TOLERANCE = 1e-5
"""Nats by which float32 may differ from the twin's float64."""
TOKENS = 6


def twins_of(bucket: Bucket, folder: Path) -> list[Any]:
    """Returns a plain model of each version, in float64."""
    found = []
    with Checkout(bucket, read_run(bucket), folder) as checkout:
        for version in range(VERSIONS + 1):
            checkout.bring_to(version)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            found.append(model.eval())
    return found


@torch.inference_mode()
def kl_at_each_token(ours: Any, theirs: Any, ids: list[int], first: int) -> list[float]:
    """Returns KL(ours ‖ theirs) before each of the tokens from place ``first`` on."""
    p, q = (one(input_ids=torch.tensor([ids])).logits[0].softmax(-1) for one in (ours, theirs))
    found: list[float] = (p * (p / q).log()).sum(-1)[first - 1 : -1].tolist()
    return found


def kl_error(bucket: Bucket, twins: list[Any], seed: int) -> float:
    """Returns the largest error of the KL that ``diff`` computes at each token of random answers,
    between version 0 and each later one, as a share of the largest KL."""
    drawn, errors, largest = random.Random(seed), [0.0], 0.0
    with open_model_of(bucket) as old, open_model_of(bucket) as new:
        old.move_to(0)
        prompt = list(new.text.prompt(PROMPT))
        for version in range(1, VERSIONS + 1):
            new.move_to(version)
            answer = [drawn.randrange(256) for _ in range(TOKENS)]
            for ours, theirs, pair in (
                (old, new, (twins[0], twins[version])),
                (new, old, (twins[version], twins[0])),
            ):
                found = divergence(ours.module, theirs.module, prompt, answer, 1.0)
                exact = kl_at_each_token(*pair, prompt + answer, len(prompt))
                errors += [abs(x - y) for x, y in zip(found, exact, strict=True)]
                largest = max(largest, *exact)
    return max(errors) / largest


@torch.inference_mode()
def logprob_of(model: Any, prompt: list[int], token: int) -> float:
    """Returns the log-probability of the token after a prompt."""
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    return float(logits.log_softmax(-1)[token])


def served_wrong(bucket: Bucket, twins: list[Any], seed: int) -> tuple[float, list[float]]:
    """Returns the share of moves after which the server's log-probability is not the twin's, and
    the milliseconds of each move."""
    drawn, wrong, times = random.Random(seed), 0, list[float]()
    with open_model_of(bucket) as model, VersionServer(bucket, base=0) as server:
        prompt, now = list(model.text.prompt(PROMPT)), 0
        for _ in range(MOVES):
            now = drawn.choice([version for version in range(VERSIONS + 1) if version != now])
            start = time.perf_counter()
            url = server.bring_to(now)
            times.append((time.perf_counter() - start) * 1e3)
            token, said = asked(url, server.environment["OPENAI_API_KEY"])
            exact = [logprob_of(one, prompt, token) for one in twins]
            closest = min(range(VERSIONS + 1), key=lambda at: abs(exact[at] - said))
            wrong += closest != now or abs(exact[now] - said) > TOLERANCE
    return wrong / MOVES, times


def asked(url: str, key: str) -> tuple[int, float]:
    """Asks the server for one greedy token; returns it and its log-probability."""
    body = {"model": "planted", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    body |= {"return_token_ids": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/completions", data, headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        found = json.load(answer)["choices"][0]
    return found["token_ids"][0], found["logprobs"]["token_logprobs"][0]


def measure(options: Options) -> Measured:
    """Trains the run, and compares."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bucket = planted_run(folder, options.seed, versions=VERSIONS).bucket
        twins = twins_of(bucket, folder / "pulled")
        error = kl_error(bucket, twins, options.seed)
        wrong, times = served_wrong(bucket, twins, options.seed)
    return Measured(
        {"diff_kl_error": error, "served_wrong": wrong},
        {"moves": MOVES, "move_ms": statistics.median(times)},
    )
