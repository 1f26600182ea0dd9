"""A process handles signals only while it runs, and ends a start of which nothing is kept."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from deltawire.config import parse_config
from deltawire.errors import InputError
from deltawire.events import Life
from deltawire.export import models
from deltawire.rl.evaluate import evaluator
from deltawire.rl.reference import process as reference
from deltawire.rl.rollout import worker
from deltawire.rl.trainer import entry, warm_start
from deltawire.runtime import process as runtime_process
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process, StopAskedError
from deltawire.store import open_bucket


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def new_process(*, supervised):
    return Process(open_bucket("memory://"), "w0", "worker", supervised=supervised)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_stop(number):
    process = new_process(supervised=False)
    with process.running():
        assert not process.stopping
        os.kill(os.getpid(), number)
        process.wait(60)
        assert process.stopping


def test_the_handlers_of_before_return():
    before = handlers()
    with new_process(supervised=False).running():
        assert handlers() != before
    assert handlers() == before


def test_they_return_after_an_error():
    before = handlers()
    with pytest.raises(InputError), new_process(supervised=False).running():
        raise InputError("x")
    assert handlers() == before


def test_a_supervised_process_ends_with_its_own():
    process = new_process(supervised=True)
    with process.handling_signals():
        inside = handlers()
    assert handlers() == inside, "a late SIGTERM would be reported as a failure"


def go_on():
    """Computes for 30 s. A signal that arrives right before a sleep does not shorten it."""
    for _ in range(3000):
        time.sleep(0.01)
    raise AssertionError("it goes on")


def interrupted_twice(cleaned_up):
    """The second signal must not end the cleaning up."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        go_on()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        cleaned_up.append(True)


def test_interruptible_work_ends_where_the_signal_arrives():
    process = new_process(supervised=False)
    cleaned_up = []
    with process.handling_signals():
        with process.interruptible():
            pass
        with pytest.raises(StopAskedError), process.interruptible():
            interrupted_twice(cleaned_up)
        assert cleaned_up
        os.kill(os.getpid(), signal.SIGTERM)  # Other work is not interrupted.
        with pytest.raises(StopAskedError), process.interruptible():
            raise AssertionError("it was asked to stop before")


def test_a_signal_right_after_the_test_for_one_is_not_lost(monkeypatch):
    process = new_process(supervised=False)

    def asked_after(_):
        stopping = process._stop.is_set()
        if not stopping:
            process._on_signal(signal.SIGTERM, None)
        return stopping

    monkeypatch.setattr(Process, "stopping", property(asked_after))
    with process.handling_signals(), pytest.raises(StopAskedError), process.interruptible():
        raise AssertionError("it was asked to stop before")


@pytest.mark.parametrize("library", ["AutoModelForCausalLM", "AutoTokenizer"])
def test_a_signal_ends_the_loading_of_a_model(library, monkeypatch, tmp_path):
    """The library raises any error, which the loading states as one of the directory."""

    def slow(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        go_on()

    loading = {"AutoModelForCausalLM": models.load_model, "AutoTokenizer": models.load_tokenizer}
    monkeypatch.setattr(getattr(models, library), "from_pretrained", slow)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").touch()
    process = new_process(supervised=False)
    with process.handling_signals(), pytest.raises(StopAskedError), process.interruptible():
        loading[library](tmp_path)


NEW = parse_config({"name": "new", "model": {"build": {"family": "qwen3"}}}, source="test")
STARTS = {
    "worker": (worker, lambda p: worker.run_worker(p, patience_s=1, report=print)),
    "evaluator": (evaluator, evaluator.run_evaluator),
    "reference": (reference, reference.run_reference),
    "trainer": (entry, lambda p: entry.run_trainer(p, None)),
    "warm-start": (warm_start, lambda p: warm_start.run_warm_start(p, NEW, Path("none"))),
}


@pytest.mark.parametrize("role", STARTS)
def test_a_slow_start_ends_at_once(role, monkeypatch):
    """Opening the run stands for any part of it, such as loading a model for half a minute."""
    module, run = STARTS[role]
    opened = threading.Event()

    def slow(*_, **__):
        opened.set()
        go_on()

    def ask():
        opened.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    opening = "open_tasks" if role == "warm-start" else "open_run"
    joins = role in ("worker", "evaluator", "reference")
    monkeypatch.setattr(runtime_process if joins else module, opening, slow)
    process = Process(open_bucket("memory://"), "w0", role, supervised=False)
    asking = threading.Thread(target=ask)
    asking.start()
    with process.handling_signals():
        began = time.monotonic()
        run(process)
    asking.join()
    assert time.monotonic() - began < 10
    lives = [event.what for event in events_of(process.bucket, "w0") if isinstance(event, Life)]
    assert lives == ["started", "stopped"]
