"""``attack_shift``: the share of the honest gain that liars and a coordinated cohort take away.

The learner's own code (records, join window, rewards, caps, quarantine, advantages) learns from
simulated users in simulated time. In place of the model there is a table of logits, one for each
kind of request and style of answer, which takes the policy gradient of the groups that the learner
makes, or with the loss `KTO` the gradient of that against uniform answers. So true satisfaction is
known without sampling, and a run takes seconds.

Each seed runs honest, attacked by 2 % liars and a cohort of 2 % that asks five times as often, and
attacked without caps and quarantine. The shift is 1 − gain attacked / gain honest, of the sums over
the seeds: the gain of one seed may be small.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config import LossConfig, RunConfig, parse_config
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.records import LiveRecords
from deltawire.store import Bucket, open_bucket
from deltawire.testing.users import ANSWERS, STYLES, Population, UserSettings
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment
from deltawire.wire.lineage import LearnedAnswer

SEEDS = 5
SECONDS = 240
RATE = 20
LEARN_EVERY_S = 4
GROUP = 32
LEARNING_RATE = 0.25
KTO_RATE = 4.0
BEGAN = 1_000_000.0
HONEST = UserSettings(users=200, kinds=4)
ATTACK = {"liars": 0.02, "cohort": 0.02}
KTO = {
    "surrogate": "kto", "advantage": "given", "aggregation": "seq_mean_token_mean",
    "kto": {"beta": 0.5},
}  # fmt: skip
UNLIMITED: dict[str, Any] = {"user_cap": 1.0, "cohort_cap": 1.0, "outlier_limit": 0.0}


@dataclass(frozen=True)
class LearnedPolicy:
    """The end of a run: true satisfaction at first and at last, answers trained on, those of
    attackers, and the users and cohorts that were in quarantine."""

    first: float
    last: float
    trained: int
    of_attackers: int
    users_out: int
    cohorts_out: int

    @property
    def gain(self) -> float:
        """The change of true satisfaction."""
        return self.last - self.first


def config_of(loss: dict[str, Any] | None = None, **live: Any) -> RunConfig:
    """The learner's configuration, with these values in its section."""
    values = {
        "name": "bandit",
        "rollout": {"group_size": GROUP, "max_tokens": 4},
        "train": {"loss": loss or {"advantage": "given"}},
        "trust": {"rescore_share": 0.0},
        "live": {
            "rewards": {"accept": 0.75, "reject": -0.25, "kept_share": 0.5},
            "baseline": "value_tracker", "window_s": 60.0, "settle_s": 3.0, "cohort_cap": 0.25,
            **live,
        },
    }  # fmt: skip
    return parse_config(values, source="bandit")


def learn(settings: UserSettings, config: RunConfig, *, seconds: int = SECONDS) -> LearnedPolicy:
    """Serves the users for some simulated seconds, and learns from them."""
    population, bucket = Population(settings), open_bucket("memory://")
    chance = np.random.default_rng((settings.seed, 23))
    logits = np.zeros((settings.kinds, len(STYLES)))
    records = LiveRecords(bucket)
    maker = GroupMaker(config, records)
    attackers = {_pseudonym(u.name) for u in population.users if u.role in ("liar", "cohort")}
    first = _satisfaction(population, logits)
    waiting: list[tuple[float, int, Feedback]] = []
    version = trained = of_attackers = number = 0
    for second in range(seconds):
        now = BEGAN + second
        rows = []
        for _ in range(RATE):
            row, reports = _serve(population, number, logits, version, now, chance)
            rows.append(row)
            for place, report in enumerate(reports):
                heapq.heappush(waiting, (report.received, 2 * number + place, report))
            number += 1
        due = []
        while waiting and waiting[0][0] <= now:
            due.append(heapq.heappop(waiting)[2])
        _put(bucket, second, rows, due)
        records.poll()
        while second % LEARN_EVERY_S == 0 and (answers := maker.prepare(now, GROUP)) is not None:
            step = _kto_step if config.train.loss.traits.good_or_bad else _step
            step(logits, answers, records, config.train.loss)
            version += 1
            trained += len(answers)
            of_attackers += sum(one.user in attackers for one in answers)
    last = _satisfaction(population, logits)
    return LearnedPolicy(
        first,
        last,
        trained,
        of_attackers,
        len(maker.quarantined.users),
        len(maker.quarantined.cohorts),
    )


def _serve(
    population: Population,
    number: int,
    logits: NDArray[np.float64],
    version: int,
    now: float,
    chance: np.random.Generator,
) -> tuple[Capture, list[Feedback]]:
    request = population.request(number)
    shares = _softmax(logits[request.kind])
    style = int(chance.choice(len(shares), p=shares))
    names: dict[str, Any] = {
        "answer": f"{number:032x}", "conversation": f"{number:032x}",
        "user": _pseudonym(request.user.name), "arm": "serving",
    }  # fmt: skip
    row = Capture(
        **names, turn=0, propensity=1.0, at=now, receipt="r", finish="stop", task=request.task,
        cohort=request.user.cohort, prompt=np.array([request.kind], "<i4").tobytes(),
        tokens=np.array([style], "<i4").tobytes(),
        logprobs=np.array([np.log(shares[style])], "<f4").tobytes(), spans=[(version, 1)],
    )  # fmt: skip
    reactions = population.reactions(request, ANSWERS[STYLES[style]], now - BEGAN)
    reports = [
        Feedback(
            **names, id=one.id, kind=one.kind, value=one.value, at=now + one.after_s,
            received=now + one.after_s, served_at=now,
        )
        for one in reactions
    ]  # fmt: skip
    return row, reports


def _step(
    logits: NDArray[np.float64],
    answers: Sequence[LearnedAnswer],
    records: LiveRecords,
    _loss: LossConfig,
) -> None:
    """Takes one policy-gradient step with a group, with ratios to the drawing policy up to 2."""
    step = np.zeros_like(logits)
    for one in answers:
        capture = records.answers[one.answer]
        kind, style = int(capture.prompt_ids[0]), int(capture.token_ids[0])
        shares = _softmax(logits[kind])
        ratio = min(2.0, shares[style] / float(np.exp(capture.token_logprobs[0])))
        direction = -shares
        direction[style] += 1.0
        step[kind] += one.advantage * one.weight * ratio * direction
    logits += LEARNING_RATE * step / len(answers) * len(logits)


def _kto_step(
    logits: NDArray[np.float64],
    answers: Sequence[LearnedAnswer],
    records: LiveRecords,
    loss: LossConfig,
) -> None:
    """Takes one step of the trainer's own KTO with a group, against uniform answers."""
    table = torch.tensor(logits, requires_grad=True)
    captures = [records.answers[one.answer] for one in answers]
    kinds = [int(capture.prompt_ids[0]) for capture in captures]
    styles = torch.tensor([[int(capture.token_ids[0])] for capture in captures])
    logprobs_NC = table[kinds].log_softmax(dim=1).gather(1, styles)
    reference_NC = torch.full_like(logprobs_NC, -float(np.log(logits.shape[1]))).detach()
    inputs = LossInputs(
        logprobs_NC,
        logprobs_NC.detach(),
        torch.tensor([one.advantage * one.weight for one in answers], dtype=torch.float64),
        torch.ones_like(logprobs_NC).detach(),
        torch.arange(len(answers)),
        reference_NC=reference_NC,
        reference_point=max(0.0, float((logprobs_NC.detach() - reference_NC).mean())),
    )
    totals = Totals(tokens=float(len(answers)), sequences=len(answers), horizon=1)
    policy_loss(loss, inputs, totals).loss.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    # The gradient of the loss is at most beta / 4 of a policy gradient's.
    logits -= KTO_RATE * table.grad.numpy() * len(logits)


def _put(bucket: Bucket, number: int, rows: list[Capture], reports: list[Feedback]) -> None:
    for place, found in ((keys.live_captures, rows), (keys.live_feedback, reports)):
        if found:
            data = encode_segment("g0", number, [encode_row(row) for row in found])
            bucket.put(place("g0", number), data)


def _satisfaction(population: Population, logits: NDArray[np.float64]) -> float:
    shares = np.array([_softmax(row) for row in logits])
    return float((shares * population.tastes()).sum(axis=1).mean())


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum(), np.float64)


def _pseudonym(name: str) -> str:
    return f"{int(name.removeprefix('user-')):032x}"


def measure(options: Options) -> Measured:
    """Measures the key."""
    capped, unlimited = config_of(), config_of(**UNLIMITED)
    kto = config_of(KTO, baseline="sign")
    found: dict[str, list[LearnedPolicy]] = {
        name: [] for name in ("honest", "attacked", "unlimited", "honest_kto")
    }
    for seed in range(options.seed, options.seed + SEEDS):
        honest = msgspec.structs.replace(HONEST, seed=seed)
        attacked = msgspec.structs.replace(honest, **ATTACK)
        found["honest"].append(learn(honest, capped))
        found["attacked"].append(learn(attacked, capped))
        found["unlimited"].append(learn(attacked, unlimited))
        found["honest_kto"].append(learn(honest, kto))
    gains = {name: sum(one.gain for one in runs) for name, runs in found.items()}
    details: dict[str, Any] = {
        name: {
            "gain": gains[name] / SEEDS,
            "last": float(np.mean([one.last for one in runs])),
            "attackers_share": sum(r.of_attackers for r in runs) / sum(r.trained for r in runs),
            "users_out": float(np.mean([one.users_out for one in runs])),
            "cohorts_out": float(np.mean([one.cohorts_out for one in runs])),
        }
        for name, runs in found.items()
    }
    details["attack_shift_without_limits"] = 1 - gains["unlimited"] / gains["honest"]
    return Measured({"attack_shift": 1 - gains["attacked"] / gains["honest"]}, details)
