"""``lagged_gain`` and ``lagged_seeds``: what users gain while releases make every answer 6 to 12
versions old.

The model, users and loss of ``examples/live.toml``, without processes and waiting: the model is
warmed up as a run does, `STEPS` steps are taken with the trainer's own loss and schedule, and
simulated users react to what the model draws. With a lag of L versions a candidate is promoted
every L steps, so that the version that serves half of the users is L to 2·L - 1 versions old, and
the candidate, which serves the others, up to L - 1.
The gain is true satisfaction at the end less that at the start. ``lagged_gain`` is the least of
`SEEDS` seeds; ``lagged_seeds`` counts those of the first `SWEEP` seeds that gain at least `WORTH`.
Each seed of the sweep is kept in ``--out``.

``details`` has the same for losses that bound single tokens, and with answers of the newest
version.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.training.keys import Measured, Options
from deltawire.chat.requests import text_of
from deltawire.config import LossConfig, RunConfig
from deltawire.envs.simulated_users import SimulatedUserTasks
from deltawire.envs.templates import prompt_of
from deltawire.export.models import stop_tokens
from deltawire.launch.processes import read_config
from deltawire.live.learning.advantages import ValueTracker, advantages
from deltawire.live.learning.rewards import RewardRules
from deltawire.rl.trainer.warm_start import answer_end, origin
from deltawire.testing.users.population import Population, SimulatedRequest
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.train.optimizer.schedule import rate_factor
from deltawire.train.warm_start import Pair, warm_start

EXAMPLE = Path(__file__).parents[2] / "examples" / "live.toml"
SEEDS, STEPS, LAG = 3, 40, 6
SWEEP, WORTH = 20, 0.1
HELD_OUT, AT_LAST = 512, 10_000_000
LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"surrogate": "cispo"},
    "importance_sampling": {"surrogate": "importance_sampling"},
    "ppo": {"surrogate": "ppo"},
    "dppo": {"surrogate": "dppo"},
}


@dataclass(frozen=True)
class Case:
    """A request as baselines see it."""

    task: str
    cohort: str = ""
    turn: int = 0
    length: int = 10


@dataclass(frozen=True)
class Drawn:
    """Answers of one version: token ids[N, prompt + answer], masks of what is not padding and of
    what the model drew, log-probabilities of the answers[N, answer], and the answers' texts."""

    requests: list[SimulatedRequest]
    ids_NT: Tensor
    seen_NT: Tensor
    drawn_NC: Tensor
    logprobs_NC: Tensor
    texts: list[str]


class LaggedLearning:
    """Learning from users' reactions to answers of older versions."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.tasks = SimulatedUserTasks(config.task, seed=config.seed)
        self.users: Population = self.tasks.population
        self.start, self._tokenizer = origin(config)
        self._text = text_of(config, self._tokenizer, bucket="")
        self._stops = sorted(stop_tokens(self.start, self._tokenizer))
        self._rules = RewardRules(config.live.rewards, None)
        self._warm()

    def gain(self, loss: LossConfig, *, seed: int, lag: int) -> float:
        """Returns the change of true satisfaction after `STEPS` steps."""
        torch.manual_seed(seed)
        chance, optimizer = np.random.default_rng((seed, 41)), self.config.train.optimizer
        schedule, share = self.config.train.schedule, self.config.live.release.stages[0]
        model = copy.deepcopy(self.start)
        steps = torch.optim.AdamW(
            model.parameters(), lr=optimizer.learning_rate, weight_decay=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
        )  # fmt: skip
        tracker = ValueTracker(*self._rules.bounds)
        serving = candidate = self.start
        number = 1_000_003 * seed
        for step in range(STEPS):
            if lag and step % lag == 0:
                serving, candidate = candidate, copy.deepcopy(model)
            sources = (serving, candidate) if lag else (model, model)
            size = self.config.rollout.group_size
            shown = min(max(int(chance.binomial(size, share)), 1), size - 1)
            parts = []
            for source, count in zip(sources, (size - shown, shown), strict=True):
                number, drawn, rewards = self._reported(source, number, count)
                parts.append((drawn, rewards))
            for group in steps.param_groups:
                group["lr"] = optimizer.learning_rate * rate_factor(schedule, step + 1)
            self._step(model, steps, loss, parts, tracker, step)
        return self.satisfaction(model) - self.satisfaction(self.start)

    def satisfaction(self, model: Any) -> float:
        """Returns the mean true satisfaction with answers to requests that are not trained on."""
        drawn = self._draw(model, [self.users.request(AT_LAST + n) for n in range(HELD_OUT)])
        return statistics.fmean(
            self.users.satisfaction(request.kind, text)
            for request, text in zip(drawn.requests, drawn.texts, strict=True)
        )

    def _warm(self) -> None:
        end = answer_end(self._text, self._stops)
        batch = self.config.warm_start.batch

        def draw(step: int) -> list[Pair]:
            tasks = [self.tasks.draw("warm-start", step * batch + n) for n in range(batch)]
            return [
                (
                    self._text.prompt(self.tasks.prompt(task)),
                    [*self._text.encode(self.tasks.answer(task)), end],
                )
                for task in tasks
            ]

        warm_start(
            self.start, self.config.warm_start, draw=draw, check=lambda: 0.0,
            report=lambda _: None, stopping=lambda: False,
        )  # fmt: skip
        self.start.eval()

    def _reported(self, model: Any, number: int, count: int) -> tuple[int, Drawn, list[float]]:
        """Draws answers until users reported on ``count`` of them; returns the next request's
        number, these answers and their rewards."""
        requests: list[SimulatedRequest] = []
        while len(requests) < count:
            request = self.users.request(number)
            number += 1
            # A user who is silent about one answer is silent about all others too.
            if self.users.reactions(request, "yes"):
                requests.append(request)
        drawn = self._draw(model, requests)
        rewards = []
        for request, text in zip(requests, drawn.texts, strict=True):
            said = self.users.reactions(request, text)[0]
            rewards.append(self.config.live.rewards[said.kind] * said.value)
        return number, drawn, rewards

    @torch.no_grad()
    def _draw(self, model: Any, requests: list[SimulatedRequest]) -> Drawn:
        prompts = [
            self._text.prompt(prompt_of(self.config.task, {"question": one.text.rstrip("\n")}))
            for one in requests
        ]
        longest = max(map(len, prompts), default=0)
        ids_NP = torch.zeros(len(prompts), longest, dtype=torch.long)
        seen_NP = torch.zeros_like(ids_NP)
        for row, prompt in enumerate(prompts):
            ids_NP[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen_NP[row, longest - len(prompt) :] = 1
        answer = self.config.rollout.max_tokens
        ids_NT = model.generate(
            input_ids=ids_NP, attention_mask=seen_NP, do_sample=True, top_k=0, top_p=1.0,
            temperature=1.0, max_new_tokens=answer, eos_token_id=self._stops, pad_token_id=0,
        )  # fmt: skip
        ids_NT = torch.nn.functional.pad(ids_NT, (0, longest + answer - ids_NT.shape[1]))
        ends_NC = torch.isin(ids_NT[:, longest:], torch.tensor(self._stops))
        drawn_NC = (ends_NC.cumsum(1) - ends_NC.long() == 0).float()
        seen_NT = torch.cat([seen_NP, drawn_NC.long()], 1)
        texts = [
            self._tokenizer.decode(
                [token for token in row[keep].tolist() if token not in self._stops],
                skip_special_tokens=True,
            )
            for row, keep in zip(ids_NT[:, longest:], drawn_NC.bool(), strict=True)
        ]
        logprobs_NC = _logprobs(model, ids_NT, seen_NT, drawn_NC)
        return Drawn(requests, ids_NT, seen_NT, drawn_NC, logprobs_NC, texts)

    def _step(
        self,
        model: Any,
        steps: torch.optim.Optimizer,
        loss: LossConfig,
        parts: Sequence[tuple[Drawn, list[float]]],
        tracker: ValueTracker,
        version: int,
    ) -> None:
        """Takes one step with the answers of all ``parts``, whose prompts differ in length."""
        cases = [Case(one.task) for drawn, _ in parts for one in drawn.requests]
        rewards_E = np.array([reward for _, rewards in parts for reward in rewards])
        given_E = advantages(tracker, cases, rewards_E, np.ones(len(cases)))
        for case, reward in zip(cases, rewards_E.tolist(), strict=True):
            tracker.add(case, reward, version)
        tokens = sum(float(drawn.drawn_NC.sum()) for drawn, _ in parts)
        totals = Totals(tokens=tokens, sequences=len(cases), horizon=1)
        steps.zero_grad()
        first = 0
        for drawn, rewards in parts:
            given_N = torch.tensor(given_E[first : first + len(rewards)], dtype=torch.float32)
            first += len(rewards)
            logprobs_NC = _logprobs(model, drawn.ids_NT, drawn.seen_NT, drawn.drawn_NC)
            inputs = LossInputs(
                logprobs_NC, drawn.logprobs_NC, given_N, drawn.drawn_NC, torch.arange(len(rewards))
            )
            policy_loss(loss, inputs, totals).loss.backward()  # type: ignore[no-untyped-call]
        limit = self.config.train.optimizer.max_grad_norm
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        steps.step()


def _logprobs(model: Any, ids_NT: Tensor, seen_NT: Tensor, drawn_NC: Tensor) -> Tensor:
    """Returns the log-probabilities of the drawn tokens, 0 elsewhere: float[N, C]."""
    places_NT = (seen_NT.cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=ids_NT, attention_mask=seen_NT, position_ids=places_NT, use_cache=False
    ).logits
    answer = drawn_NC.shape[1]
    every = logits[:, -answer - 1 : -1].float().log_softmax(-1)
    found: Tensor = every.gather(2, ids_NT[:, -answer:, None])[..., 0] * drawn_NC
    return found


def kept_gain(seed: int, out: str, gain: Callable[[int], float]) -> float:
    """Returns the gain of a seed of the sweep: measured once, then read from ``out``."""
    path = Path(out) / f"lagged-{seed}.json"
    if out and path.is_file():
        return float(json.loads(path.read_text()))
    found = gain(seed)
    if out:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return found


def measure(options: Options) -> Measured:
    """Measures the keys."""
    torch.set_num_threads(1)
    learning = LaggedLearning(read_config(EXAMPLE, seed=None))
    own = learning.config.train.loss
    rows = {"example": own, "example_newest_version": own} | {
        name: msgspec.convert({**values, "advantage": "given"}, LossConfig)
        for name, values in LOSSES.items()
    }
    details: dict[str, Any] = {}
    for name, loss in rows.items():
        lag = 0 if name == "example_newest_version" else LAG
        seeds = range(options.seed, options.seed + SEEDS)
        gains = [learning.gain(loss, seed=seed, lag=lag) for seed in seeds]
        details[name] = {"gains": gains, "mean": statistics.fmean(gains)}
    sweep = [
        kept_gain(seed, options.out, partial(_example_gain, learning)) for seed in range(SWEEP)
    ]
    details["sweep"] = sweep
    values = {
        "lagged_gain": min(details["example"]["gains"]),
        "lagged_seeds": sum(gain >= WORTH for gain in sweep),
    }
    return Measured(values, details)


def _example_gain(learning: LaggedLearning, seed: int) -> float:
    return learning.gain(learning.config.train.loss, seed=seed, lag=LAG)
