"""Learns from the log of another policy, and estimates what it learned on later rounds of the log.

The learner's own code (records, join window, rewards, baseline, groups) and the trainer's own loss
(importance sampling with a truncated ratio) train a table of logits, one for each position and
item, on the first rounds of a log in the layout of the Open Bandit Dataset. SNIPS on the rounds
after them estimates its clicks a round, by the same code that estimates a candidate before its
canary. ``python -m benchmarks.live.logged FOLDER…`` prints a row for each log.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire.config import RunConfig, parse_config
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.records import LiveRecords
from deltawire.live.release.off_policy import clipped_ratios, effective_answers, self_normalized
from deltawire.store import open_bucket
from deltawire.testing.bandit_logs import CLICK, LoggedRound, read_bandit_log, served_rounds
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.wire import keys
from deltawire.wire.captures import encode_row, encode_segment
from deltawire.wire.lineage import LearnedAnswer

GROUP = 256
HELD_OUT = 0.3
LEARNING_RATE = 10.0
SEGMENT = 5000
CLIP = 10.0


@dataclass(frozen=True)
class LearnedFromLog:
    """Clicks a round on the held-out rounds: those logged, and the SNIPS estimate of what was
    learned from the ``trained`` rounds before; ``effective`` is its effective sample size. The
    difference is in standard errors of the difference, which is that of correlated means."""

    log: str
    trained: int
    held_out: int
    clicks: int
    logged: float
    logged_error: float
    learned: float
    learned_error: float
    effective: float
    difference: float
    difference_error: float

    @property
    def errors(self) -> float:
        """The difference in standard errors."""
        return self.difference / self.difference_error if self.difference_error else 0.0


def config_of() -> RunConfig:
    """The learner's configuration."""
    values = {
        "name": "logged",
        "rollout": {"group_size": GROUP, "max_tokens": 4},
        "train": {
            "loss": {
                "advantage": "given", "surrogate": "cispo", "clip_low": 1.0, "clip_high": 9.0,
            },
        },
        "trust": {"rescore_share": 0.0},
        "live": {
            "rewards": {CLICK: 1.0}, "baseline": "value_tracker", "window_s": 60.0,
            "settle_s": 1.0, "max_age_s": 1e9,
        },
    }  # fmt: skip
    return parse_config(values, source="logged")


def learn_from(rounds: Sequence[LoggedRound], config: RunConfig) -> NDArray[np.float64]:
    """Trains on all rounds, each once, in groups; returns the logits, float64[positions, items]."""
    bucket = open_bucket("memory://")
    for number, start in enumerate(range(0, len(rounds), SEGMENT)):
        answers, reports = served_rounds(rounds[start : start + SEGMENT], first=start)
        for place, rows in ((keys.live_captures, answers), (keys.live_feedback, reports)):
            data = encode_segment("g0", number, [encode_row(row) for row in rows])
            bucket.put(place("g0", number), data)
    records = LiveRecords(bucket)
    records.poll()
    maker = GroupMaker(config, records)
    shape = (max(one.position for one in rounds) + 1, max(one.item for one in rounds) + 1)
    table = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    now = max(one.at for one in rounds) + 100.0
    while (answers_E := maker.prepare(now, GROUP)) is not None:
        _step(table, answers_E, records, config)
    return table.detach().numpy()


def _step(
    table: torch.Tensor, answers: Sequence[LearnedAnswer], records: LiveRecords, config: RunConfig
) -> None:
    captures = [records.answers[one.answer] for one in answers]
    positions = [int(capture.prompt_ids[0]) for capture in captures]
    items = torch.tensor([[int(capture.token_ids[0])] for capture in captures])
    logprobs_NC = table[positions].log_softmax(dim=1).gather(1, items)
    logged = [[float(capture.token_logprobs[0])] for capture in captures]
    inputs = LossInputs(
        logprobs_NC,
        torch.tensor(logged, dtype=torch.float64),
        torch.tensor([one.advantage * one.weight for one in answers], dtype=torch.float64),
        torch.ones_like(logprobs_NC).detach(),
        torch.arange(len(answers)),
    )
    totals = Totals(tokens=float(len(answers)), sequences=len(answers), horizon=1)
    policy_loss(config.train.loss, inputs, totals).loss.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    with torch.no_grad():
        table -= LEARNING_RATE / len(table) * table.grad
        table.grad.zero_()


def evaluate(
    name: str, rounds: Sequence[LoggedRound], *, held_out: float = HELD_OUT
) -> LearnedFromLog:
    """Learns from the first rounds, and estimates the learned policy on the ``held_out`` share."""
    cut = round(len(rounds) * (1 - held_out))
    logits = learn_from(rounds[:cut], config_of())
    later = [one for one in rounds[cut:] if one.position < len(logits)]
    later = [one for one in later if one.item < logits.shape[1]]
    logs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logs -= logits.max(1, keepdims=True)
    ours = np.array([logs[one.position, one.item] for one in later])
    ratios = clipped_ratios(ours - np.log([one.propensity for one in later]), CLIP)
    clicks = np.array([float(one.click) for one in later])
    users = [str(number) for number in range(len(later))]
    learned = self_normalized(ratios, clicks, users)
    logged = self_normalized(np.ones_like(clicks), clicks, users)
    # Both means are of the same rounds: the error of their difference is that of its influences.
    influences = ratios * (clicks - learned.value) / ratios.sum()
    influences -= (clicks - logged.value) / len(clicks)
    return LearnedFromLog(
        name, cut, len(later), int(clicks.sum()), logged.value, logged.error, learned.value,
        learned.error, effective_answers(ratios), learned.value - logged.value,
        float(np.sqrt((influences**2).sum())),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what was learned from each log."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        found = evaluate(str(folder), read_bandit_log(folder))
        if options.json:
            print(json.dumps({**asdict(found), "errors": found.errors}))  # noqa: T201
            continue
        print(  # noqa: T201
            f"{found.log}: logged {found.logged:.5f} ± {found.logged_error:.5f}, learned "
            f"{found.learned:.5f} ± {found.learned_error:.5f} clicks a round on {found.held_out} "
            f"rounds with {found.clicks} clicks; difference {found.errors:+.1f} standard errors"
        )


if __name__ == "__main__":
    main()
