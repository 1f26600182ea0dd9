"""The version that serves is measured again with each candidate, and when it begins to serve."""

import time
from types import SimpleNamespace

import pytest
from heartbeats import put_heartbeat

from deltawire.config import parse_config
from deltawire.errors import InputError, RetryError, SignatureError
from deltawire.events import Evaluated, ServingMeasured
from deltawire.launch.live import Releaser
from deltawire.rl.evaluate import serving_scores
from deltawire.rl.evaluate.serving_scores import ServingScores
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
from deltawire.wire.decisions import Decision, ServedVersion

RUN = SimpleNamespace(id="1" * 32, config="")
PROBLEMS, SAMPLES = 3, 2
OLD, NEW = (ServedVersion(n, f"{n:032x}") for n in (0, 4))


def config_of(**release):
    values = {"name": "run", "evaluate": {"samples": SAMPLES}, "live": {"release": release}}
    return parse_config(values, source="test")


def serve(log, verdict, served):
    made = Decision(
        number=log.next_number, run=RUN.id, verdict=verdict, serving=served, at=1.0, by="test"
    )  # fmt: skip
    log.poll()
    assert log.append(made)


class Measured:
    """An evaluator's `ServingScores` over models that only note what is asked of them."""

    def __init__(self, monkeypatch, *, sets=("part",), lost=(), **release):
        self.bucket = open_bucket("memory://", create=True)
        self.log, self.opened, self.closed, self.asked = (
            DecisionLog(self.bucket, RUN.id),
            [],
            [],
            [],
        )
        process = Process(self.bucket, "evaluator", "evaluator", supervised=False)

        def opened(*_, at, seed, **__):
            if at in lost:
                raise InputError("pruned")
            self.opened.append((at, seed))

            async def close():
                self.closed.append(at)

            tasks = SimpleNamespace(heldout=lambda: ["a"] * PROBLEMS)
            live = SimpleNamespace(version=at)
            engine = SimpleNamespace(slots=1, version=at)
            return SimpleNamespace(
                live=live, tasks=tasks, engine=engine, text=None, close=close
            ), None

        async def played(engine, source, text, problems, **options):
            self.asked.append((engine.version, len(problems), options["temperature"]))
            return [
                SimpleNamespace(cause="", solved=float(place % 2)) for place in range(len(problems))
            ]

        monkeypatch.setattr(serving_scores, "POLL_EVERY_S", 0.0)
        monkeypatch.setattr(serving_scores, "serve_policy", opened)
        monkeypatch.setattr(serving_scores, "play_tasks", played)
        own = {name: SimpleNamespace(heldout=lambda: ["a"] * 2) for name in (*sets, "unused")}
        self.scores = ServingScores(process, RUN, config_of(**release), own)

    @property
    def events(self):
        return [e for e in events_of(self.bucket, "evaluator") if isinstance(e, ServingMeasured)]


GATE = {"accuracy": 0.02, "part": 0.02}


def test_each_candidate_and_each_new_serving_version_has_a_measurement(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    run.scores.measure(with_candidate=True)
    assert not run.events, "nothing serves by a decision yet"
    serve(run.log, "serve", OLD)
    run.scores.measure()
    assert not run.events, "a run without decisions is asked for them after evaluations only"
    for _ in range(2):
        run.scores.measure(with_candidate=True)
        run.scores.measure()
    assert [event.version for event in run.events] == [0, 0]
    assert run.asked == [(0, PROBLEMS * SAMPLES, 1.0), (0, 2 * SAMPLES, 1.0)] * 2
    assert run.events[0].correct == [0.5] * PROBLEMS
    assert run.events[0].sets == {"part": [0.5] * 2}, "sets that the gate compares"
    serve(run.log, "promote", NEW)
    run.scores.measure()
    run.scores.measure()
    assert [event.version for event in run.events] == [0, 0, 4]
    assert [version for version, _ in run.opened] == [0, 4], "a model is opened once"
    assert len({seed for _, seed in run.opened}) == 2, "their answers are drawn independently"
    assert run.closed == [0]
    run.scores.close()
    assert run.closed == [0, 4]


@pytest.mark.parametrize("release", [{"measure_again": False}, {"gate": {}}])
def test_without_it_or_without_a_gate_nothing_is_measured_again(monkeypatch, release):
    run = Measured(monkeypatch, **{"gate": GATE, "measure_again": True, **release})
    serve(run.log, "serve", OLD)
    run.scores.measure(with_candidate=True)
    assert not run.opened


def test_a_version_that_is_gone_is_left_out(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True, lost=(0,))
    serve(run.log, "serve", OLD)
    run.scores.measure(with_candidate=True)
    run.scores.measure()
    assert not run.events


@pytest.mark.parametrize("error", [RetryError, SignatureError])
def test_an_outage_or_a_broken_series_of_decisions_ends_no_evaluation(monkeypatch, error):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)

    def failing():
        raise error("no answer")

    whole = run.scores._log.poll
    run.scores._log.poll = failing
    run.scores.measure(with_candidate=True)
    assert not run.events
    run.scores._log.poll = whole
    run.scores.measure()
    assert [event.version for event in run.events] == [0], "the candidate's measurement is made up"


def test_decisions_are_asked_for_now_and_then_while_an_evaluator_waits(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    run.scores.measure(with_candidate=True)
    monkeypatch.setattr(serving_scores, "POLL_EVERY_S", 1e9)
    serve(run.log, "promote", NEW)
    run.scores.measure()
    assert [event.version for event in run.events] == [0]
    run.scores.measure(with_candidate=True)
    assert [event.version for event in run.events] == [0, 4]


def test_the_gate_gets_the_newest_results_and_waits_for_them_while_an_evaluator_works(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    process = Process(run.bucket, "evaluator", "evaluator", supervised=False)
    process.events.record(
        Evaluated(
            process="evaluator", at=1.0, version=0, accuracy=1.0, problems=PROBLEMS, seconds=1.0,
            correct=[1.0] * PROBLEMS,
        )
    )  # fmt: skip
    process.events.flush()
    releaser = Releaser(
        run.bucket, RUN, config_of(gate={"accuracy": 0.02}, measure_again=True), by="g0"
    )
    releaser.log.poll()

    def serving():
        found = releaser._scores(time.time())[0]["accuracy"]
        return found.again, found.awaited

    assert serving() == ((), False), "no evaluator is at work"
    put_heartbeat(run.bucket, "evaluator", role="evaluator", at=time.time())
    assert serving() == ((), True)
    run.scores.measure(with_candidate=True)
    assert serving() == ((0.5,) * PROBLEMS, False)
