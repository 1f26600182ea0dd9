"""Which problems a warm start validates with and trains on, for tasks that have few."""

from zlib import crc32

import pytest

from deltawire.config import RunConfig, WarmStartConfig
from deltawire.envs import Task
from deltawire.errors import InputError
from deltawire.rl.trainer import warm_start


class Few:
    """A task of ``count`` problems, drawn in turn, as a dataset draws its rows."""

    def __init__(self, count):
        self.count = count

    def draw(self, stream, index):
        number = (index + crc32(stream.encode())) % self.count
        return Task(f"few/{number}", {}, family="few")

    def heldout(self):
        return []

    def open(self, task):
        raise NotImplementedError

    def question(self, task):
        return task.identity

    def prompt(self, task):
        return task.identity

    def answer(self, task):
        return "1"


class Letters:
    end = None

    def prompt(self, text):
        return list(text.encode())

    encode = prompt


def drawn(monkeypatch, count):
    """The problems for validation and those of each batch, as the loop gets them."""
    found = {}

    def record(_model, config, *, draw, **_):
        found["batches"] = [draw(step) for step in range(config.max_steps)]

    monkeypatch.setattr(warm_start, "warm_start", record)
    monkeypatch.setattr(warm_start, "text_of", lambda *_, **__: Letters())
    monkeypatch.setattr(warm_start, "stop_tokens", lambda *_: [256])
    config = RunConfig(name="r", warm_start=WarmStartConfig(max_steps=6, batch=4))
    tasks = Few(count)

    class Model:
        def train(self):
            pass

    warm_start._warm(None, config, tasks, Model(), None, lambda _: None, 0.0)
    held = {tasks.question(one) for one in warm_start._validation(tasks)}
    trained = {bytes(prompt).decode() for batch in found["batches"] for prompt, _ in batch}
    return held, trained, found["batches"]


@pytest.mark.parametrize("count", [2, 5, 99, 100, 150])
def test_few_problems_are_shared_between_validation_and_training(monkeypatch, count):
    held, trained, batches = drawn(monkeypatch, count)
    assert len(held) <= max(count // 5, 1)
    assert trained
    assert not trained & held
    assert all(batches), "no step is without a problem"


def test_many_problems_give_a_hundred(monkeypatch):
    held, trained, _ = drawn(monkeypatch, 5_000)
    assert len(held) == warm_start.VALIDATION
    assert not trained & held


def test_one_problem_is_refused(monkeypatch):
    with pytest.raises(InputError, match="no problem but the 1 that a warm start validates with"):
        drawn(monkeypatch, 1)
