"""Logs of a recommender as served answers and feedback: the CSV layout of the Open Bandit Dataset.

A log is a folder with one CSV file of rounds, as the package ``obp`` ships them and as the whole
data set has them: ``timestamp``, ``item_id``, ``position``, ``click`` and ``propensity_score``; all
other columns are left out. A round becomes an answer of one token, the item, to a prompt of one
token, the position, drawn with the logged probability; the click is a report about it. Source:
Saito et al. 2021, "Open Bandit Dataset and Pipeline", section 3.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltawire.errors import InputError
from deltawire.wire.captures import Capture, Feedback

CLICK = "event_click"
"""The kind of feedback that a round's click becomes: 1 for a click, 0 for none."""
MAX_ROUNDS = 10_000_000
_COLUMNS = ("timestamp", "item_id", "position", "click", "propensity_score")


class LoggedRound(NamedTuple):
    """One round: when (seconds since 1970), which item at which position from 0, whether it was
    clicked, and the probability with which the logging policy chose the item.

    Example::

        LoggedRound(1_574_553_793.4, item=14, position=2, click=False, propensity=1 / 34)
    """

    at: float
    item: int
    position: int
    click: bool
    propensity: float


def read_bandit_log(folder: Path) -> list[LoggedRound]:
    """Reads the rounds of a log, the oldest first; positions are numbered from 0.

    Raises `InputError` if the folder does not hold one file of rounds, and for a row that is none.

    Example::

        rounds = read_bandit_log(Path("obd/random/men"))
    """
    files = [path for path in sorted(folder.glob("*.csv")) if path.name != "item_context.csv"]
    if len(files) != 1:
        raise InputError(
            f"{folder} holds {len(files)} logs of rounds",
            hint="give a folder with one CSV file besides item_context.csv",
        )
    try:
        with files[0].open(newline="", encoding="utf-8") as file:
            found = list(_rounds(csv.DictReader(file), files[0]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {files[0]}: {reason}") from error
    first = min((one.position for one in found), default=0)
    return sorted(one._replace(position=one.position - first) for one in found)


def _rounds(rows: csv.DictReader[str], path: Path) -> Iterable[LoggedRound]:
    if missing := set(_COLUMNS) - set(rows.fieldnames or ()):
        raise InputError(
            f"{path} has no column {', '.join(sorted(missing))}",
            hint=f"a log has the columns {', '.join(_COLUMNS)}",
        )
    for number, row in enumerate(rows, 2):
        if number > MAX_ROUNDS + 1:
            raise InputError(f"{path} has more than {MAX_ROUNDS} rounds", hint="divide the file")
        try:
            when = datetime.fromisoformat(row["timestamp"])
            at = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
            item, position = int(row["item_id"]), int(row["position"])
            click, propensity = int(row["click"]), float(row["propensity_score"])
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: row {number} is no round: {error}") from error
        if item < 0 or position < 0 or click not in (0, 1) or not 0 < propensity <= 1:
            raise InputError(
                f"{path}: row {number} is no round",
                hint="items and positions are numbers from 0, a click is 0 or 1, and a propensity "
                "lies above 0 and at most at 1",
            )
        yield LoggedRound(at, item, position, bool(click), propensity)


def write_bandit_log(folder: Path, rounds: Iterable[LoggedRound], *, name: str = "log") -> None:
    """Writes rounds in the same layout, for tests that must not depend on the data set.

    Example::

        write_bandit_log(Path("logs/random/made-up"), rounds)
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("", *_COLUMNS))
        for number, one in enumerate(rounds):
            when = datetime.fromtimestamp(0, UTC) + timedelta(seconds=one.at)
            table.writerow(
                (number, when.isoformat(sep=" "), one.item, one.position + 1, int(one.click),
                 one.propensity)
            )  # fmt: skip


def served_rounds(
    rounds: Iterable[LoggedRound], *, first: int = 0
) -> tuple[list[Capture], list[Feedback]]:
    """Returns the answers and the reports of these rounds, numbered from ``first``.

    Each round has a user, because the data set does not say which rounds are one person's.

    Example::

        answers, reports = served_rounds(read_bandit_log(folder))
    """
    answers, reports = [], []
    for number, one in enumerate(rounds, first):
        name = f"{number:032x}"
        answers.append(
            Capture(
                answer=name, conversation=name, turn=0, user=name, arm="serving", propensity=1.0,
                at=one.at, receipt="log", finish="stop", task=f"position-{one.position}",
                prompt=np.array([one.position], "<i4").tobytes(),
                tokens=np.array([one.item], "<i4").tobytes(),
                logprobs=np.array([math.log(one.propensity)], "<f4").tobytes(), spans=[(0, 1)],
            )
        )  # fmt: skip
        reports.append(
            Feedback(
                id=f"click-{number}", answer=name, conversation=name, user=name, arm="serving",
                kind=CLICK, value=float(one.click), source="webhook", at=one.at, received=one.at,
                served_at=one.at,
            )
        )  # fmt: skip
    return answers, reports
