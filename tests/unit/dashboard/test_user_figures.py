"""How users fare by arm and version: from answers and reports to what the page shows."""

import asyncio
import json

import msgspec
import pytest
from live_gateway import ADMIN, live_serving, published

from deltawire.dashboard.live_processes import live_processes
from deltawire.dashboard.problems import problems_of
from deltawire.dashboard.release import release_of
from deltawire.dashboard.status import Watch
from deltawire.dashboard.users import share_of, users_of
from deltawire.live.gateway import user_figures
from deltawire.live.gateway.user_figures import LEAST_USERS, AnswerSource, Label, UserFigures
from deltawire.live.release.decider_liveness import DeciderLiveness
from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import Feedback, GatewayState, ServingReplica
from deltawire.wire.decider_state import DeciderState
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.user_windows import (
    MOST_BYTES,
    MOST_LABELS,
    LabelCounts,
    MeanSums,
    UserCounts,
    UserWindow,
    coarsened,
    fitting,
)

RUN = "0" * 32
SERVING = AnswerSource("serving", 4)


def report(answer, user, kind="thumbs", value=1.0, arm="serving", source="client"):
    return Feedback(
        id="x", answer=answer, conversation="c" * 32, user=user, arm=arm, kind=kind, value=value,
        source=source, at=0.0, received=0.0, served_at=0.0,
    )  # fmt: skip


def figures_at(now, ranges=None):
    return UserFigures(ranges or {}, clock=lambda: now[0])


def gateway(windows=(), name="g1", at=1000.0, **more):
    return GatewayState(gateway=name, run=RUN, started=0.0, at=at, windows=list(windows), **more)


def test_a_user_who_reports_much_counts_once():
    now = [10_000.0]
    figures = figures_at(now)
    figures.answered("a" * 32, SERVING, finish="stop", first_s=0.2, tokens=10)
    for _ in range(50):
        figures.reported(report("a" * 32, "u1", value=-1.0))
    for user in ("u2", "u3", "u4"):
        figures.reported(report("a" * 32, user))
    (window,) = figures.windows()
    (counts,) = window.counts
    assert (counts.version, counts.satisfaction.count, counts.reports) == (4, 4, {"thumbs": 53})
    assert counts.satisfaction.mean == pytest.approx(0.75)
    assert counts.kinds["thumbs"].mean == pytest.approx(0.5)
    low, high = counts.satisfaction.interval
    assert low < 0.75 < high


def test_answers_that_failed_have_no_latency_and_signals_are_no_reports():
    figures = figures_at([10_000.0])
    for finish in ("stop", "error", "left", "timeout"):
        figures.answered(finish * 8, SERVING, finish=finish, first_s=9.0, tokens=3)
    figures.reported(report("stop" * 8, "u", kind="detected_retry", source="detector"))
    (window,) = figures.windows()
    (counts,) = window.counts
    assert (counts.answers, counts.errors, counts.left) == (4, 2, 1)
    assert (counts.first_s.count, counts.tokens.count) == (1, 1)
    assert counts.reports == {}


def test_only_kinds_with_a_range_are_satisfaction():
    figures = figures_at([10_000.0], {"score": (0.0, 10.0)})
    figures.reported(report("b" * 32, "u1", kind="score", value=5.0))
    figures.reported(report("b" * 32, "u2", kind="event_bought", value=100.0))
    figures.reported(report("b" * 32, "u3", kind="reject", value=1.0))
    (counts,) = figures.windows()[0].counts
    assert (counts.satisfaction.count, counts.satisfaction.mean) == (2, 0.25)
    assert counts.kinds["event_bought"].mean == 100.0
    assert counts.version == -1, "another gateway gave the answer"


def test_kinds_users_and_sources_that_clients_invent_take_bounded_space(monkeypatch):
    from deltawire.live.gateway import user_figures

    monkeypatch.setattr(user_figures, "MOST_USERS", 5)
    figures = figures_at([10_000.0])
    for number in range(100):
        figures.answered(f"{number:032x}", AnswerSource("serving", number), finish="stop",
                         first_s=0.1, tokens=1)  # fmt: skip
        figures.reported(report("c" * 32, f"u{number}", kind=f"event_{number}"))
    (window,) = figures.windows()
    assert len(window.counts) == 16
    assert max(len(one.reports) for one in window.counts) <= 16
    data = encode_json(gateway([window]))
    assert decode_json(data, GatewayState, run="", key="").windows == [window]


def test_windows_become_longer_and_stay_within_a_size():
    day = 86_400.0
    windows = [
        UserWindow(since=900.0 * n, seconds=900.0, counts=[UserCounts(arm="serving", answers=1)])
        for n in range(4 * 24 * 5)
    ]
    found = coarsened(windows, 5 * day)
    assert sum(one.counts[0].answers for one in found) == len(windows)
    assert {one.seconds for one in found} == {900.0, 3600.0, day}
    assert len(found) < 80
    assert coarsened(found, 5 * day) == found
    assert coarsened(found, 500 * day) == []
    wide = [
        UserCounts(arm="serving", version=n, reports={f"k{i}": 1 for i in range(16)})
        for n in range(16)
    ]
    large = [UserWindow(since=900.0 * n, seconds=900.0, counts=wide) for n in range(300)]
    kept = fitting(large)
    assert kept == large[-len(kept) :]
    assert 0 < len(encode_json(gateway(kept))) < MOST_BYTES + 1000


def test_the_view_adds_up_gateways_and_compares_with_the_hold_back_version():
    now, held = [10_000.0], AnswerSource("hold_back", 0)
    both = [figures_at(now), figures_at(now)]
    for number in range(40):
        for figures in both:
            figures.answered(f"{number:032x}", SERVING, finish="stop", first_s=0.2, tokens=10)
            figures.answered(f"{number:031x}h", held, finish="stop", first_s=0.4, tokens=20)
            figures.reported(report(f"{number:032x}", f"u{number}", value=1.0 - number % 2))
            figures.reported(report(f"{number:031x}h", f"h{number}", value=-1.0, arm="hold_back"))
    view = users_of([gateway(one.windows(), name=f"g{n}") for n, one in enumerate(both)], None, 1e4)
    assert [(one.arm, one.version, one.answers) for one in view.points] == [
        ("serving", 4, 80), ("hold_back", 0, 80)
    ]  # fmt: skip
    assert (view.effect.mean, view.effect.low) == (pytest.approx(0.75), None)
    assert view.points[0].satisfaction.low is None, "the same users may be at both gateways"
    alone = users_of([gateway(both[0].windows())], None, 1e4)
    assert alone.points[0].satisfaction.low < 0.75 < alone.points[0].satisfaction.high
    assert alone.points[0].kinds["thumbs"].low is not None
    assert view.points[0].first_s.mean == pytest.approx(0.2)
    assert users_of([gateway()], None, 1e4) is None


def of(arm, count, total, **more):
    return UserCounts(arm=arm, satisfaction=MeanSums(count, total, total), **more)


def test_users_who_come_back_are_not_many_users():
    """One user reports in each of 40 windows: that says nothing of how others fare."""
    day, now = 86_400.0, 80 * 86_400.0
    windows = [
        UserWindow(since=day * (40 + n), seconds=day, counts=[of("serving", 1, n % 2)])
        for n in range(40)
    ]
    view = users_of([gateway(windows)], None, now)
    (total,) = view.total
    assert (total.satisfaction.count, total.satisfaction.low) == (40, None)
    assert total.seconds == 40 * day
    assert {one.satisfaction.low for one in view.points} == {None}


def test_the_difference_to_the_hold_back_version_compares_the_same_times():
    """Users were happier before there was a hold-back version, in both arms alike."""
    windows = [
        UserWindow(since=0.0, seconds=900.0, counts=[of("serving", 100, 100.0)]),
        UserWindow(
            since=900.0, seconds=900.0, counts=[of("serving", 100, 60.0), of("hold_back", 10, 6.0)]
        ),
        UserWindow(
            since=1800.0, seconds=900.0,
            counts=[of("serving", 10, 4.0), of("serving", 10, 4.0, version=3),
                    of("hold_back", 30, 6.0)],
        ),
    ]  # fmt: skip
    effect = users_of([gateway(windows)], None, 2700.0).effect
    assert (effect.mean, effect.count, effect.low) == (pytest.approx(0.75 * 0.2), 40, None)
    assert users_of([gateway(windows[:1])], None, 2700.0).effect is None


def test_versions_beyond_the_most_of_a_day_count_together():
    day = 86_400.0
    windows = [
        UserWindow(
            since=900.0 * n, seconds=900.0,
            counts=[UserCounts(arm=arm, version=n, answers=100 if n == 29 else 1 + n % 3)
                    for arm in ("serving", "candidate")],
        )
        for n in range(30)
    ]  # fmt: skip
    (found,) = coarsened(windows, 3 * day)
    assert len(found.counts) <= 16
    for arm in ("serving", "candidate"):
        rows = {one.version: one.answers for one in found.counts if one.arm == arm}
        assert sum(rows.values()) == sum(w.counts[0].answers for w in windows)
        assert rows[29] == 100
        assert rows[-1] > 0
    assert coarsened([found], 3 * day) == [found]


def test_results_by_task_and_client_add_up_to_those_of_the_arm():
    now = [10_000.0]
    figures = figures_at(now)
    for number in range(4 * LEAST_USERS):
        task, client = ("billing", "web") if number % 2 else ("search", "app")
        answer, user = f"{number:032x}", f"u{number}"
        figures.answered(
            answer, SERVING, finish="error" if number == 1 else "stop", first_s=0.5, tokens=10,
            labels=[Label("client", client), Label("task", task)], user=user,
        )  # fmt: skip
        figures.reported(report(answer, user, value=1.0 if task == "search" else -1.0))
    now[0] += 900  # Of a window that is over, and of the present one.
    figures.answered(
        "f" * 32, SERVING, finish="stop", first_s=0.5, tokens=10,
        labels=[Label("client", "web"), Label("task", "ask.of.ann@example.com")], user="ann",
    )  # fmt: skip
    found = users_of([gateway(figures.windows())], None, now[0])
    rows = {(one.by, one.name): one.figures for one in found.labels}
    assert {place: row.answers for place, row in rows.items()} == {
        ("client", "web"): 11,
        ("client", "app"): 10,
        ("task", "billing"): 10,
        ("task", "search"): 10,
        ("task", ""): 1,
    }, "a task of one user may name the user"
    assert rows["task", "search"].satisfaction.mean == 1.0
    assert rows["task", "billing"].satisfaction.mean == 0.0
    assert rows["client", "web"].errors.mean == pytest.approx(1 / 11)
    assert "ann" not in json.dumps([str(one) for one in figures.stated()])


def test_labels_that_clients_invent_take_bounded_space_and_no_history():
    now = [1e6]
    figures = figures_at(now)
    for day in range(60):
        for number in range(700):
            name = f"task-{day}-{number // LEAST_USERS}-" + "x" * 40
            figures.answered(
                f"{day}-{number}", SERVING, finish="stop", first_s=0.5, tokens=10,
                labels=[Label("task", name)], user=f"u{number}",
            )  # fmt: skip
        now[0] += 3600
    stated = figures.stated()
    assert all(len(one.labels) <= MOST_LABELS for one in stated)
    assert len(msgspec.json.encode(stated)) <= MOST_BYTES
    assert sum(c.answers for one in stated for c in one.counts) == 60 * 700, "history comes first"
    assert stated[-1].labels
    for one in stated:
        if one.labels:
            assert sum(row.counts.answers for row in one.labels) == sum(
                row.answers for row in one.counts
            )
    assert msgspec.json.decode(msgspec.json.encode(stated), type=list[UserWindow]) == stated


def test_labels_take_only_the_room_that_windows_leave():
    counts = [UserCounts(arm="serving", version=n, answers=1) for n in range(16)]
    labels = [
        LabelCounts(by="task", name=f"{n}" + "x" * 60, counts=UserCounts(arm="serving"))
        for n in range(MOST_LABELS)
    ]
    windows = [
        UserWindow(since=900.0 * n, seconds=900.0, counts=counts, labels=labels) for n in range(256)
    ]
    found = fitting(windows)
    assert [one.since for one in found] == [one.since for one in windows]
    assert found[-1].labels
    assert not found[0].labels
    assert len(msgspec.json.encode(found)) <= MOST_BYTES


def test_windows_are_summed_up_by_the_thread_that_asks(monkeypatch):
    now, summed = [10_000.0], []
    figures = figures_at(now)
    real = user_figures._window
    monkeypatch.setattr(
        user_figures, "_window", lambda *one: (summed.append(one[0]), real(*one))[1]
    )
    for number in range(4):
        figures.answered(f"{number}", SERVING, finish="stop", first_s=0.2, tokens=10)
        now[0] += 900
    figures.answered("x", SERVING, finish="stop", first_s=0.2, tokens=10)
    assert not summed, "answers wait for no sums"
    assert sum(c.answers for one in figures.windows() for c in one.counts) == 5
    assert sum(c.answers for one in figures.windows() for c in one.counts) == 5
    for number in range(20):  # Nobody asks: memory stays bounded.
        figures.answered(f"y{number}", SERVING, finish="stop", first_s=0.2, tokens=10)
        now[0] += 900
    assert len(figures._over) <= user_figures.MOST_OVER
    assert sum(c.answers for one in figures.windows() for c in one.counts) == 25


def test_a_share_near_zero_has_an_interval():
    found = share_of(0, 100)
    assert (found.mean, found.low) == (0.0, pytest.approx(0.0, abs=1e-12))
    assert 0.03 < found.high < 0.04


def test_the_table_of_processes_has_gateways_replicas_and_the_decider():
    replicas = [
        ServingReplica(name="r1", version=4), ServingReplica(name="r2", fault="no answer"),
        ServingReplica(name="upstream openai", upstream="openai"),
    ]  # fmt: skip
    states = [
        gateway(name="g1", at=1000.0, replicas=replicas), gateway(name="g2", at=900.0),
        gateway(name="g3", at=990.0, ended=True), gateway(name="old", at=-1e6),
    ]  # fmt: skip
    decider = DeciderState(run=RUN, by="ann", at=800.0)
    found = {one.name: (one.role, one.state) for one in live_processes(states, decider, 1001.0)}
    assert found == {
        "g1": ("gateway", "alive"), "g2": ("gateway", "silent"), "g3": ("gateway", "ended"),
        "r1": ("replica", "alive"), "r2": ("replica", "stalled"),
        "upstream openai": ("replica", "alive"), "decide (ann)": ("decider", "silent"),
    }  # fmt: skip


def test_no_problems_is_not_said_with_rollbacks_a_hold_or_a_dead_decider():
    bucket = published()
    run = read_run(bucket)
    status = Watch(bucket).poll()
    assert problems_of(status) == []
    served = [ServedVersion(n, f"{n:032x}") for n in range(3)]
    log = DecisionLog(bucket, run.id)
    common = {"run": run.id, "by": "ann", "at": status.at}

    def decide(verdict, candidate=None, **more):
        decision = Decision(
            number=log.next_number, verdict=verdict, serving=served[0], candidate=candidate,
            **common | more,
        )  # fmt: skip
        assert log.append(decision)

    decide("serve")
    decide("gate", served[1])
    decide("rollback", served[1], reason="worse: thumbs")
    decide("gate", served[2])
    decide("hold", served[2], waits_for="data", reason="undecided")
    DeciderLiveness(bucket, run.id, by="ann").beat()
    texts = [one.text for one in problems_of(Watch(bucket).poll())]
    assert any("waits for data" in text for text in texts)
    assert any("1 rollbacks within a day, the last: worse: thumbs" in text for text in texts)
    assert not any("decider" in text for text in texts)
    dead = DeciderState(run=run.id, by="ann", at=status.at - 3600)
    bucket.put(keys.LIVE_DECIDER, encode_json(dead))
    found = problems_of(Watch(bucket).poll())
    assert any(one.severity == "alarm" and "decider" in one.text for one in found)
    assert release_of(log).rollbacks == 1


def test_a_candidate_that_a_timer_looks_at_is_no_problem():
    bucket = published()
    run, now = read_run(bucket), Watch(bucket).poll().at
    log = DecisionLog(bucket, run.id)
    for number, verdict in enumerate(("serve", "gate")):
        candidate = ServedVersion(1, f"{1:032x}") if number else None
        decision = Decision(
            number=number, run=run.id, verdict=verdict, serving=ServedVersion(0, f"{0:032x}"),
            candidate=candidate, at=now - 1200.0, by="ann",
        )  # fmt: skip
        assert log.append(decision)

    def found(looked_at):
        state = DeciderState(run=run.id, by="ann", at=looked_at, ended=True)
        bucket.put(keys.LIVE_DECIDER, encode_json(state))
        return [one.text for one in problems_of(Watch(bucket).poll()) if "undecided" in one.text]

    assert found(now - 1800.0) == []
    assert found(now - 7200.0)
    bucket.delete(keys.LIVE_DECIDER)
    assert any("undecided" in one.text for one in problems_of(Watch(bucket).poll()))


def test_a_gateway_states_its_figures_and_goes_on_from_them(tmp_path, monkeypatch):
    bucket = published()

    async def serve(asks):
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            for number in range(asks):
                receipt = await at.receipt(user=f"u{number}")
                assert (await at.report(receipt, value="up"))[0] == 200
            await at.receipt(user="refuses", capture="false")
            _, data, _ = await at.call("GET", "/live/state", ADMIN)
            state = json.loads(data)
            assert [one["name"] for one in state["replicas"]]
            return state["windows"]

    (window,) = asyncio.run(serve(3))
    (counts,) = window["counts"]
    assert (counts["arm"], counts["version"], counts["answers"]) == ("serving", 0, 4)
    assert counts["reports"] == {"thumbs": 3}
    assert "u0" not in json.dumps(window)

    async def later():
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            async with asyncio.timeout(30):
                while not at.recorder.figures.windows():
                    await asyncio.sleep(0.01)
            return at.recorder.figures.windows()

    assert sum(one.answers for w in asyncio.run(later()) for one in w.counts) == 4
    users = Watch(bucket).poll().users
    assert sum(one.answers for one in users.points) == 4
