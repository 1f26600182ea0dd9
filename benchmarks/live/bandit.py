"""``attack_shift`` and ``critics_trained``: what liars take away, and whether critics are heard.

The learner's own code (records, join window, rewards, turns, caps, advantages) learns from
simulated users in simulated time. In place of the model there is a table of logits, one for each
kind of request and style of answer, which takes the policy gradient of the groups that the learner
makes, or with the losses `KTO` and `PAIRS` the gradient of those against uniform answers. So true
satisfaction is known without sampling, and a run takes seconds.

The attackers act together: they accept flattery and reject all else, report about every answer,
ask `FACTOR` times as often as others, have answers of `LONG` tokens, which the loss weighs by
tokens, and send another task and another cohort with each request. Each seed runs honest, attacked,
and attacked without limits. The shift is 1 − gain attacked / gain honest, of the sums over the
seeds: the gain of one seed may be small. `SHARES` is the curve over the share of attackers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config import LossConfig, RunConfig, parse_config
from deltawire.live.learning.edits import EditEncoder
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.records import LiveRecords
from deltawire.store import Bucket, open_bucket
from deltawire.testing.users import ANSWERS, STYLES, Population, UserSettings
from deltawire.testing.users.population import style_of
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.train.loss.preference import PairInputs, preference_loss
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment
from deltawire.wire.lineage import LearnedAnswer

SEEDS = 2
SECONDS = 240
RATE = 20
LEARN_EVERY_S = 4
GROUP = 32
LEARNING_RATE = 0.25
KTO_RATE, PAIR_RATE = 4.0, 8.0
BEGAN = 1_000_000.0
HONEST = UserSettings(users=200, kinds=4)
FACTOR, LONG = 5.0, 20
SHARE = 0.05
SHARES = (0.05, 0.1, 0.2, 0.3)
CRITICS, CRITIC_SEEDS, CRITIC_REPORTS = 0.05, 20, 20
KTO = {
    "surrogate": "kto", "advantage": "given", "aggregation": "seq_mean_token_mean",
    "kto": {"beta": 0.5},
}  # fmt: skip
PAIRS = {
    "advantage": "given", "aggregation": "seq_mean_token_mean", "policy_coefficient": 0.0,
    "preference": {"kind": "dpo", "beta": 0.5},
}  # fmt: skip
"""Learns from pairs only: users with `UserSettings.rewrites` send a better answer."""
UNLIMITED: dict[str, Any] = {"user_cap": 1.0, "user_ratio": 0.0}


@dataclass(frozen=True)
class LearnedPolicy:
    """The end of a run: true satisfaction at first and at last, answers trained on, and those of
    attackers."""

    first: float
    last: float
    trained: int
    of_attackers: int

    @property
    def gain(self) -> float:
        """The change of true satisfaction."""
        return self.last - self.first


def config_of(loss: dict[str, Any] | None = None, **live: Any) -> RunConfig:
    """The learner's configuration, with these values in its section."""
    values = {
        "name": "bandit",
        "rollout": {"group_size": GROUP, "max_tokens": LONG},
        "train": {"loss": loss or {"advantage": "given"}},
        "trust": {"rescore_share": 0.0},
        "live": {
            "rewards": {"accept": 0.75, "reject": -0.25, "kept_share": 0.5},
            "baseline": "value_tracker", "window_s": 60.0, "settle_s": 3.0,
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
    pairs = config.train.loss.preference.kind != "none"
    maker = GroupMaker(config, records, edits=_StyleEdits() if pairs else None)
    attackers = {_pseudonym(u.name) for u in population.users if u.role == "cohort"}
    first = _satisfaction(population, logits)
    waiting: list[tuple[float, int, Feedback]] = []
    # Attackers ask on top of what honest users ask.
    rate = RATE * (1 + settings.cohort * (settings.cohort_factor - 1))
    version = trained = of_attackers = number = 0
    for second in range(seconds):
        now = BEGAN + second
        rows = []
        while number < rate * (second + 1):
            row, reports = _serve(population, number, logits, version, now, chance)
            rows.append(row)
            for place, report in enumerate(reports):
                heapq.heappush(waiting, (report.received, 2 * number + place, report))
            number += 1
        due = []
        while waiting and waiting[0][0] <= now:
            due.append(heapq.heappop(waiting)[2])
        store_rows(bucket, second, rows, due)
        records.poll()
        while second % LEARN_EVERY_S == 0 and (answers := maker.prepare(now, GROUP)) is not None:
            if pairs:
                _pair_step(logits, answers, maker, config.train.loss)
            else:
                step = _kto_step if config.train.loss.traits.good_or_bad else _step
                step(logits, answers, records, config.train.loss)
            version += 1
            trained += len(answers)
            of_attackers += sum(one.user in attackers for one in answers)
    return LearnedPolicy(first, _satisfaction(population, logits), trained, of_attackers)


def attacked(seed: int, share: float) -> UserSettings:
    """Returns the users of a seed of whom this share attacks."""
    return msgspec.structs.replace(HONEST, seed=seed, cohort=share, cohort_factor=FACTOR)


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
    evil = request.user.role == "cohort"
    tokens = LONG if evil else 1
    row = Capture(
        **names, turn=0, propensity=1.0, at=now, receipt="r", finish="stop",
        task=f"task-{number}" if evil else request.task,
        cohort=f"cohort-{number % 20}" if evil else request.user.cohort,
        prompt=np.array([request.kind], "<i4").tobytes(),
        tokens=np.full(tokens, style, "<i4").tobytes(),
        logprobs=np.full(tokens, np.log(shares[style]), "<f4").tobytes(),
        spans=[(version, tokens)],
    )  # fmt: skip
    reactions = population.reactions(request, ANSWERS[STYLES[style]], now - BEGAN)
    reports = [
        Feedback(
            **names, id=one.id, kind=one.kind, value=one.value, at=now + one.after_s,
            received=now + one.after_s, served_at=now, text=one.text,
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
    step, total = np.zeros_like(logits), 0
    for one in answers:
        capture = records.answers[one.answer]
        kind, style = int(capture.prompt_ids[0]), int(capture.token_ids[0])
        shares = _softmax(logits[kind])
        ratio = min(2.0, shares[style] / float(np.exp(capture.token_logprobs[0])))
        direction = -shares
        direction[style] += 1.0
        step[kind] += len(capture.token_ids) * one.advantage * one.weight * ratio * direction
        total += len(capture.token_ids)
    logits += LEARNING_RATE * step / total * len(logits)


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


class _StyleEdits(EditEncoder):
    """Encodes the better answer of an edit as its style, the token of this table."""

    def __init__(self) -> None:
        pass

    def tokens(self, capture: Capture, report: Feedback) -> NDArray[np.int32]:
        """Returns the style's number; empty if it is the served answer's."""
        style = style_of(report.text)
        if style is None or style == int(capture.token_ids[0]):
            return np.zeros(0, np.int32)
        return np.array([style], np.int32)


def _pair_step(
    logits: NDArray[np.float64],
    answers: Sequence[LearnedAnswer],
    maker: GroupMaker,
    loss: LossConfig,
) -> None:
    """Takes one step of the trainer's own loss of pairs with a group, against uniform answers."""
    table, count = torch.tensor(logits, requires_grad=True), len(answers)
    captures = [maker.records.answers[one.answer] for one in answers]
    better = [maker.better_answer(one.answer, one.edit) for one in answers]
    kinds = [int(capture.prompt_ids[0]) for capture in captures]
    styles = [int(one[0]) for one in better if one is not None and len(one)]
    assert len(styles) == count, "only answers with an edit are chosen"
    styles += [int(capture.token_ids[0]) for capture in captures]
    logprobs_NC = table[kinds * 2].log_softmax(1).gather(1, torch.tensor(styles)[:, None])
    better_NC = torch.zeros_like(logprobs_NC).detach()
    better_NC[:count] = 1
    weights_N = torch.tensor([one.weight for one in answers] + [0.0] * count)
    pairs = PairInputs(
        logprobs_NC,
        1 - better_NC,
        better_NC,
        weights_N.double(),
        torch.arange(count).repeat(2),
        torch.full_like(logprobs_NC, -float(np.log(logits.shape[1]))).detach(),
    )
    totals = Totals(tokens=float(count), sequences=count, horizon=1)
    preference_loss(loss.preference, pairs, totals).backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    logits -= PAIR_RATE * table.grad.numpy() * len(logits)


def store_rows(bucket: Bucket, number: int, rows: list[Capture], reports: list[Feedback]) -> None:
    """Stores answers and reports as a gateway's ``number``-th segments."""
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


REFUSED = 20
"""Turns of a learner in a row without a group, after which nothing is left to learn."""


def critics_trained(seed: int) -> float:
    """Returns the share of critics' answers that are trained on: 5 % of 200 satisfied users reject
    all of their 20 answers, and all answers are offered at once."""
    chance = np.random.default_rng((seed, 29))
    bucket = open_bucket("memory://")
    critics = set(chance.choice(HONEST.users, round(CRITICS * HONEST.users), replace=False))
    rows, reports = [], []
    for number in range(HONEST.users * CRITIC_REPORTS):
        user = number % HONEST.users
        liked = user not in critics and chance.random() < 0.9
        names: dict[str, Any] = {
            "answer": f"{number:032x}", "conversation": f"{number:032x}", "user": f"{user:032x}",
            "arm": "serving",
        }  # fmt: skip
        rows.append(Capture(
            **names, turn=0, propensity=1.0, at=BEGAN, receipt="r", finish="stop",
            prompt=np.array([0], "<i4").tobytes(), tokens=np.array([0], "<i4").tobytes(),
            logprobs=np.array([-1.0], "<f4").tobytes(), spans=[(0, 1)],
        ))  # fmt: skip
        reports.append(Feedback(
            **names, id=f"r{number}", kind="accept" if liked else "reject", value=1.0,
            at=BEGAN + 1, received=BEGAN + 1, served_at=BEGAN,
        ))  # fmt: skip
    store_rows(bucket, 0, rows, reports)
    records = LiveRecords(bucket)
    records.poll()
    maker, found, refused = GroupMaker(config_of(), records), 0, 0
    for turn in count():
        # As a learner does, which leaves a group whose rewards are alike and looks again.
        answers = maker.prepare(BEGAN + 30 + turn, GROUP)
        if answers is None:
            refused += 1
            if refused == REFUSED:
                break
            continue
        refused = 0
        found += sum(int(one.user, 16) in critics and one.weight > 0 for one in answers)
    return found / (len(critics) * CRITIC_REPORTS)


def measure(options: Options) -> Measured:
    """Measures both keys."""
    seeds = range(options.seed, options.seed + SEEDS)
    capped, unlimited = config_of(), config_of(**UNLIMITED)
    honest = sum(learn(attacked(seed, 0.0), capped).gain for seed in seeds)
    kto = sum(learn(attacked(seed, 0.0), config_of(KTO, baseline="sign")).gain for seed in seeds)
    details: dict[str, Any] = {"honest": honest / SEEDS, "honest_kto": kto / SEEDS}
    for share in SHARES:
        for name, config in (("limited", capped), ("unlimited", unlimited)):
            runs = [learn(attacked(seed, share), config) for seed in seeds]
            details[f"{name}_{share:g}"] = {
                "shift": 1 - sum(one.gain for one in runs) / honest,
                "attackers_share": sum(r.of_attackers for r in runs) / sum(r.trained for r in runs),
            }
    shifts = {name: details[f"{name}_{SHARE:g}"]["shift"] for name in ("limited", "unlimited")}
    details["attack_shift_without_limits"] = shifts["unlimited"]
    critics = [critics_trained(seed) for seed in range(CRITIC_SEEDS)]
    values: dict[str, bool | float] = {
        "attack_shift": shifts["limited"], "critics_trained": min(critics)
    }  # fmt: skip
    return Measured(values, details)
