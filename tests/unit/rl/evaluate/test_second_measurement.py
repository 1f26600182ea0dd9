"""With ``live.release.measure_again`` an evaluator answers each problem as often once more."""

import asyncio
from types import SimpleNamespace

import pytest

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import open_tasks
from deltawire.rl.evaluate import evaluator
from deltawire.rl.evaluate.evaluator import measure_all
from deltawire.train.build import build_model

PROBLEMS, SAMPLES = 6, 2


def measured(monkeypatch, byte_tokenizer, **release):
    """Returns the scores, and the number of answers and the temperature of each call."""
    values = {
        "name": "run",
        "model": {"build": {"layers": 1, "hidden_size": 32}},
        "task": {"heldout": PROBLEMS},
        "rollout": {"max_tokens": 4, "context": 160},
        "evaluate": {"samples": SAMPLES},
        "live": {"release": release},
    }
    config = parse_config(values, source="test")
    model = build_model(config.model.build, seed=1).float().eval()
    engine = TransformersEngine(model, stop_tokens=[256], slots=16, capacity=160, seed=1)
    tasks = open_tasks(config.task, seed=1)
    served = SimpleNamespace(engine=engine, text=Text(byte_tokenizer), tasks=tasks)
    asked, play = [], evaluator.play_tasks

    async def counted(engine, source, text, problems, **options):
        asked.append((len(problems), options["temperature"]))
        episodes = await play(engine, source, text, problems, **options)
        for place, episode in enumerate(episodes):  # A small model solves nothing.
            episodes[place] = SimpleNamespace(
                cause="", solved=float(len(asked) == 1), trajectory=episode.trajectory
            )
        return episodes

    monkeypatch.setattr(evaluator, "play_tasks", counted)
    whole, named = asyncio.run(measure_all(served, config, {"part": tasks}))
    return whole, named["part"], asked


def test_a_second_measurement_is_of_other_answers(monkeypatch, byte_tokenizer):
    whole, part, asked = measured(monkeypatch, byte_tokenizer, measure_again=True)
    answers = PROBLEMS * SAMPLES
    assert asked == [(answers, 1.0), (answers, 1.0), (PROBLEMS, 0.0)] * 2
    assert whole.correct == [1.0] * PROBLEMS
    assert whole.again == [0.0] * PROBLEMS, "it is a copy of the first one"
    assert whole.accuracy == 1.0, "the accuracy is that of the first one"
    assert len(part.again) == PROBLEMS


@pytest.mark.parametrize("release", [{}, {"measure_again": True, "gate": {}}])
def test_without_it_or_without_a_gate_nothing_is_answered_twice(
    monkeypatch, byte_tokenizer, release
):
    whole, part, asked = measured(monkeypatch, byte_tokenizer, **release)
    assert asked == [(PROBLEMS * SAMPLES, 1.0), (PROBLEMS, 0.0)] * 2
    assert whole.again == part.again == []


def test_both_measurements_fit_into_one_event(monkeypatch, byte_tokenizer):
    monkeypatch.setattr(evaluator, "MOST_RESULTS", 12)
    whole, part, _ = measured(monkeypatch, byte_tokenizer, measure_again=True)
    kept = [len(one) for one in (whole.correct, whole.again, part.correct, part.again)]
    assert kept == [3, 3, 3, 3]
