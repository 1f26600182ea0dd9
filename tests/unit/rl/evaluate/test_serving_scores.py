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
from deltawire.runtime import process as process_module
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_archive import EventArchiver
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
from deltawire.wire.decisions import Decision, ServedVersion

RUN = SimpleNamespace(id="1" * 32, config="", name="run")
PROBLEMS, SAMPLES = 3, 2
OLD, NEW, NEXT = (ServedVersion(n, f"{n:032x}") for n in (0, 4, 8))


def config_of(**release):
    values = {"name": "run", "evaluate": {"samples": SAMPLES}, "live": {"release": release}}
    return parse_config(values, source="test")


def serve(log, verdict, served, *, candidate=None):
    made = Decision(
        number=log.next_number, run=RUN.id, verdict=verdict, serving=served, candidate=candidate,
        at=1.0, by="test",
    )  # fmt: skip
    log.poll()
    assert log.append(made)


class Measured:
    """An evaluator's `ServingScores` over models that only note what is asked of them."""

    def __init__(self, monkeypatch, *, sets=("part",), lost=(), **release):
        self.bucket = open_bucket("memory://", create=True)
        self.log = DecisionLog(self.bucket, RUN.id)
        self.opened, self.closed, self.asked, self.lost = [], [], [], dict.fromkeys(lost, GONE)

        def opened(process, *_, at, seed, **__):
            assert process.heartbeat._progress.doing == "start", "it may take longer than a stall"
            self.opened.append((at, seed))
            if at in self.lost:
                raise self.lost[at]

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
        self._sets, self._config = sets, config_of(**release)
        self.scores = self.another_life()

    def another_life(self):
        own = {name: SimpleNamespace(heldout=lambda: ["a"] * 2) for name in (*self._sets, "unused")}
        self.process = Process(self.bucket, "evaluator", "evaluator", supervised=False)
        self.process.heartbeat.progress("wait")
        return ServingScores(self.process, RUN, self._config, own)

    @property
    def events(self):
        return [e for e in events_of(self.bucket, "evaluator") if isinstance(e, ServingMeasured)]

    @property
    def pairs(self):
        return sorted((e.version, e.candidate) for e in self.events if not e.failed)


GONE = InputError("pruned")
GATE = {"accuracy": 0.02, "part": 0.02}


def test_the_serving_version_is_measured_once_for_each_candidate(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    run.scores.measure(candidate=1)
    assert not run.events, "nothing serves by a decision yet"
    serve(run.log, "serve", OLD)
    run.scores.measure()
    assert not run.events, "a run without decisions is asked for them after evaluations only"
    for candidate in (0, 2, 2, 4):
        run.scores.measure(candidate=candidate)
        run.scores.measure()
    assert run.pairs == [(0, 2), (0, 4)], "never twice for one, and not for itself"
    assert run.asked == [(0, PROBLEMS * SAMPLES, 1.0), (0, 2 * SAMPLES, 1.0)] * 2
    assert run.events[0].correct == [0.5] * PROBLEMS
    assert run.events[0].sets == {"part": [0.5] * 2}, "sets that the gate compares"
    serve(run.log, "promote", NEW)
    run.scores.measure()
    assert [version for version, _ in run.opened] == [0], "no candidate waits for it"
    run.scores.measure(candidate=8)
    assert run.pairs == [(0, 2), (0, 4), (4, 8)]
    assert [version for version, _ in run.opened] == [0, 4], "a model is opened once"
    assert run.closed == [0]
    run.scores.close()
    assert run.closed == [0, 4]


def test_a_candidate_at_the_gate_that_was_evaluated_before_is_measured_for(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    run.scores.measure(candidate=8)
    serve(run.log, "promote", NEW)
    serve(run.log, "gate", NEW, candidate=NEXT)
    run.scores.measure()
    run.scores.measure()
    assert run.pairs == [(0, 8), (4, 8)]
    serve(run.log, "rollback", NEXT, candidate=NEW)
    serve(run.log, "gate", NEXT, candidate=OLD)
    run.scores.measure()
    assert run.pairs[-1] == (8, 0), "the gate waits for any candidate, an older one too"


def test_another_life_repeats_neither_measurements_nor_draws(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    run.scores.measure(candidate=2)
    again = run.another_life()
    again.measure(candidate=2)
    assert len(run.opened) == 1
    again.measure(candidate=4)
    assert run.pairs == [(0, 2), (0, 4)]
    assert len({seed for _, seed in run.opened}) == 2, "their answers are drawn independently"


@pytest.mark.parametrize("error", [GONE, MemoryError(), RuntimeError("can't allocate memory")])
def test_a_second_model_that_cannot_be_opened_is_recorded_once(monkeypatch, error):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    run.lost[0] = error
    serve(run.log, "serve", OLD)
    for candidate in (2, 4):
        run.scores.measure(candidate=candidate)
    run.another_life().measure(candidate=6)
    assert len(run.opened) == 1
    (event,) = run.events
    assert event.failed
    assert not event.correct
    serve(run.log, "promote", NEW)
    run.another_life().measure(candidate=8)
    assert run.pairs == [(4, 8)], "another version is tried"


class Killed(BaseException):
    """The process is ended for its memory."""


@pytest.mark.parametrize("asked", [True, False])
def test_a_second_model_that_ends_its_process_twice_is_left_out(monkeypatch, asked):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    run.lost[0] = Killed()
    serve(run.log, "serve", OLD)
    for _ in range(2):
        with pytest.raises(Killed):
            run.another_life().measure(candidate=2)
        if asked:
            run.process.record_life("stopped")
            run.process.events.flush()
    run.lost.clear()
    run.another_life().measure(candidate=2)
    assert run.pairs == ([(0, 2)] if asked else [])
    assert [bool(event.failed) for event in run.events] == [not asked]


def test_as_many_results_are_kept_of_the_serving_version_as_of_a_candidate(monkeypatch):
    monkeypatch.setattr(serving_scores, "MOST_RESULTS", 6)
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    run.scores.measure(candidate=2)
    assert len(run.events[0].correct) == 2, "of all sets: two named ones, and the whole"


@pytest.mark.parametrize("release", [{"measure_again": False}, {"gate": {}}])
def test_without_it_or_without_a_gate_nothing_is_measured_again(monkeypatch, release):
    run = Measured(monkeypatch, **{"gate": GATE, "measure_again": True, **release})
    serve(run.log, "serve", OLD)
    run.scores.measure(candidate=2)
    assert not run.opened


@pytest.mark.parametrize("error", [RetryError, SignatureError])
def test_an_outage_or_a_broken_series_of_decisions_ends_no_evaluation(monkeypatch, error):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)

    def failing():
        raise error("no answer")

    whole = run.scores._log.poll
    run.scores._log.poll = failing
    run.scores.measure(candidate=2)
    assert not run.events
    run.scores._log.poll = whole
    run.scores.measure()
    assert run.pairs == [(0, 2)], "the candidate's measurement is made up"


def test_decisions_are_asked_for_now_and_then_while_an_evaluator_waits(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    run.scores.measure(candidate=2)
    monkeypatch.setattr(serving_scores, "POLL_EVERY_S", 1e9)
    serve(run.log, "gate", OLD, candidate=NEXT)
    run.scores.measure()
    assert run.pairs == [(0, 2)]
    run.scores.measure(candidate=4)
    assert run.pairs == [(0, 2), (0, 4), (0, 8)]


def releaser_of(run, *, candidate):
    process = Process(run.bucket, "evaluator", "evaluator", supervised=False)
    process.events.record(
        Evaluated(
            process="evaluator", at=1.0, version=0, accuracy=1.0, problems=PROBLEMS, seconds=1.0,
            correct=[1.0] * PROBLEMS,
        )
    )  # fmt: skip
    process.events.flush()
    serve(run.log, "gate", OLD, candidate=candidate)
    config = config_of(gate={"accuracy": 0.02}, measure_again=True)
    releaser = Releaser(run.bucket, RUN, config, by="g0")
    releaser.log.poll()
    return releaser


def serving(releaser):
    found = releaser._scores(time.time())[0]["accuracy"]
    return found.again, found.awaited


def test_the_gate_waits_for_the_results_of_its_candidate_while_an_evaluator_works(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    releaser = releaser_of(run, candidate=NEXT)
    assert serving(releaser) == ((), False), "no evaluator is at work"
    put_heartbeat(run.bucket, "evaluator", role="evaluator", at=time.time())
    assert serving(releaser) == ((), True)
    measured(run, at=2.0, candidate=4, correct=0.0)
    measured(run, at=2.0, candidate=-1, correct=0.0)
    assert serving(releaser) == ((), True), "those of another candidate, or of an earlier release"
    run.scores.measure(candidate=8)
    assert serving(releaser) == ((0.5,) * PROBLEMS, False)


def test_the_gate_does_not_wait_for_a_version_that_cannot_be_measured(monkeypatch):
    run = Measured(monkeypatch, gate=GATE, measure_again=True, lost=(0,))
    serve(run.log, "serve", OLD)
    put_heartbeat(run.bucket, "evaluator", role="evaluator", at=time.time())
    releaser = releaser_of(run, candidate=NEXT)
    run.scores.measure(candidate=8)
    assert serving(releaser) == ((), False)


def measured(run, *, at, candidate=8, correct):
    process = Process(run.bucket, "evaluator", "evaluator", supervised=False)
    process.events.record(
        ServingMeasured(
            process="evaluator", at=at, version=0, candidate=candidate, seconds=1.0,
            correct=[correct] * PROBLEMS,
        )
    )  # fmt: skip
    process.events.flush()


def test_the_gate_keeps_to_the_first_results_in_time_whatever_life_wrote_them(monkeypatch):
    """Streams of lives are listed by random names, and archives come after all of them."""
    run = Measured(monkeypatch, gate=GATE, measure_again=True)
    serve(run.log, "serve", OLD)
    releaser = releaser_of(run, candidate=NEXT)
    for nonce, at, correct in (("f", 2.0, 0.5), ("b", 4.0, 0.75), ("c", 3.0, 0.25)):
        monkeypatch.setattr(process_module.secrets, "token_hex", lambda _, nonce=nonce: nonce * 16)
        measured(run, at=at, correct=correct)
        if nonce == "f":
            EventArchiver(run.bucket, after_s=0.0).archive()
    assert [event.at for event in run.events] == [4.0, 3.0, 2.0], "in no order of time"
    assert serving(releaser)[0][0] == 0.5
