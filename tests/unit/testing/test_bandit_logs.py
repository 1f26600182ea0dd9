"""Logs of a recommender become answers and reports; what is no log is refused."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from deltawire.errors import InputError
from deltawire.testing.bandit_logs import (
    CLICK,
    LoggedRound,
    read_bandit_log,
    served_rounds,
    write_bandit_log,
)

ROUNDS = [
    LoggedRound(1_574_553_793.5, item=14, position=2, click=False, propensity=1 / 34),
    LoggedRound(1_574_553_794.25, item=3, position=0, click=True, propensity=0.5),
    LoggedRound(1_574_640_000.0, item=0, position=1, click=False, propensity=1.0),
]
HEAD = ",timestamp,item_id,position,click,propensity_score,user_feature_0\n"
ROW = "0,2019-11-24 00:03:13.442536+00:00,14,3,0,0.0294,cef3\n"


def test_a_log_survives_its_file(tmp_path):
    write_bandit_log(tmp_path / "log", reversed(ROUNDS))
    (tmp_path / "log" / "item_context.csv").write_text(",item_id\n")
    assert read_bandit_log(tmp_path / "log") == ROUNDS


def test_rounds_are_answers_of_one_token_and_reports():
    answers, reports = served_rounds(ROUNDS, first=7)
    assert [one.token_ids.tolist() for one in answers] == [[14], [3], [0]]
    assert [one.prompt_ids.tolist() for one in answers] == [[2], [0], [1]]
    assert [one.task for one in answers] == ["position-2", "position-0", "position-1"]
    for answer, one in zip(answers, ROUNDS, strict=True):
        assert not answer.fault()
        assert answer.token_logprobs[0] == np.float32(math.log(one.propensity))
    assert [(one.kind, one.value) for one in reports] == [(CLICK, 0.0), (CLICK, 1.0), (CLICK, 0.0)]
    assert [one.answer for one in reports] == [one.answer for one in answers]
    assert answers[0].answer == f"{7:032x}"
    assert len({one.user for one in answers}) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds 0 logs"),
        ({"a.csv": HEAD, "b.csv": HEAD}, "holds 2 logs"),
        ({"a.csv": "item_id,click\n1,0\n"}, "no column position, propensity_score, timestamp"),
        ({"a.csv": HEAD + ROW + ROW.replace("14", "x")}, "row 3 is no round"),
        ({"a.csv": HEAD + ROW.replace(",3,0,", ",3,2,")}, "row 2 is no round"),
        ({"a.csv": HEAD + ROW.replace("0.0294", "0")}, "row 2 is no round"),
        ({"a.csv": HEAD + ROW.replace("0.0294", "nan")}, "row 2 is no round"),
        ({"a.csv": HEAD + "0,today\n"}, "row 2 is no round"),
        ({"a.csv": b"\xff\xfe\x00"}, "cannot read"),
    ],
)
def test_a_folder_that_is_no_log_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        read_bandit_log(tmp_path)


def test_the_logs_of_obp_are_read():
    """Its files only: to import the package, scikit-learn is needed too."""
    found = importlib.util.find_spec("obp")
    if found is None:
        pytest.skip("obp is not installed: its logs take 25 MB, and it needs scikit-learn")
    for campaign, items in (("men", 34), ("women", 46), ("all", 80)):
        package = Path(next(iter(found.submodule_search_locations)))
        rounds = read_bandit_log(package / "dataset" / "obd" / "random" / campaign)
        assert len(rounds) == 10_000
        assert {one.position for one in rounds} == {0, 1, 2}
        assert {round(1 / one.propensity) for one in rounds} == {items}
        assert {one.item for one in rounds} <= set(range(items))
