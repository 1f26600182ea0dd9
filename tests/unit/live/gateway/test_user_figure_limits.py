"""Names and values of users, clients and products take bounded space in the figures of users."""

import dataclasses

import pytest

from deltawire.chat.requests import RequestDefaults
from deltawire.live.gateway import user_figures
from deltawire.live.gateway.answer_rows import ServedRequest
from deltawire.live.gateway.requests import read_asked
from deltawire.live.gateway.user_figures import AnswerSource, Label, UserFigures
from deltawire.wire.captures import Feedback
from deltawire.wire.decisions import assign
from deltawire.wire.user_windows import MOST_LABEL

SERVING = AnswerSource("serving", 4)


@pytest.fixture
def figures():
    return UserFigures({}, clock=lambda: 10_000.0)


def answered(figures, answer, *, tokens=10, labels=(), user=""):
    figures.answered(
        answer, SERVING, finish="stop", first_s=0.2, tokens=tokens, labels=labels, user=user
    )


def report(answer, user, value=1.0, kind="thumbs", arm="serving"):
    return Feedback(
        id="x", answer=answer, conversation="c" * 32, user=user, arm=arm, kind=kind, value=value,
        at=0.0, received=0.0, served_at=0.0,
    )  # fmt: skip


def test_tasks_are_counted_only_of_users_whose_answers_may_be_stored():
    asked = read_asked({"model": "m", "messages": []}, chat=True, defaults=RequestDefaults())
    served = ServedRequest(
        asked, "c" * 32, "u" * 32, True, assign(None, ""), task="t" * 300, client="web"
    )
    assert served.labels == [Label("client", "web"), Label("task", "t" * MOST_LABEL)]
    refused = dataclasses.replace(served, capture=False)
    assert refused.labels == [Label("client", "web")]
    assert dataclasses.replace(refused, client="").labels == []


def test_labels_beyond_the_most_count_together(figures, monkeypatch):
    monkeypatch.setattr(user_figures, "MOST_OPEN_LABELS", 3)
    for number in range(20):
        labels = [Label("task", f"t{number}"), Label("client", f"c{number}")]
        answered(figures, f"{number}", labels=labels, user=f"u{number}")
    assert len(figures._labeled) <= 3 + 2
    (window,) = figures.windows()
    assert sum(one.counts.answers for one in window.labels if one.by == "task") == 20


def test_users_beyond_the_most_are_not_told_apart(figures, monkeypatch):
    monkeypatch.setattr(user_figures, "MOST_USERS", 5)
    for number in range(20):
        figures.reported(report(f"{number}", f"u{number}"))
    figures.reported(report("0", "u0", value=-1.0))
    (counts,) = figures.windows()[0].counts
    assert counts.kinds["thumbs"].count == 5
    assert counts.kinds["thumbs"].mean == pytest.approx(0.8), "one who is known counts further"
    assert counts.reports == {"thumbs": 21}


def test_answers_beyond_the_most_are_not_remembered(figures, monkeypatch):
    monkeypatch.setattr(user_figures, "MOST_REMEMBERED", 3)
    for number in range(20):
        answered(figures, f"{number}")
    assert list(figures._places) == ["17", "18", "19"]


def test_values_that_nobody_could_mean_count_as_the_largest(figures):
    answered(figures, "a", tokens=10**18)
    for user, value in (("u1", 1e300), ("u2", -1e300)):
        figures.reported(report("a", user, value=value, kind="event_x"))
    (counts,) = figures.windows()[0].counts
    assert counts.tokens.mean == 1e9
    assert (counts.kinds["event_x"].mean, counts.kinds["event_x"].count) == (0.0, 2)
    assert counts.kinds["event_x"].squares == pytest.approx(2e18)
    assert figures.stated() == figures.windows()


def test_windows_that_two_threads_sum_up_count_once(monkeypatch):
    now = [10_000.0]
    figures = UserFigures({}, clock=lambda: now[0])
    answered(figures, "a")
    now[0] += 900
    real, met = user_figures._window, []

    def meets(*one):
        if not met:  # Another thread asks while this one sums up.
            met.append(one[0])
            figures.windows()
        return real(*one)

    monkeypatch.setattr(user_figures, "_window", meets)
    assert sum(one.answers for w in figures.windows() for one in w.counts) == 1
    assert met
    assert sum(one.answers for w in figures.windows() for one in w.counts) == 1


def test_windows_that_no_reader_would_take_are_left_out_of_the_state(figures, caplog):
    """The rest of the state is needed."""
    answered(figures, "a", labels=[Label("client", "x\udcff")])
    assert figures.stated() == []
    assert "figures of users are left out" in caplog.text
