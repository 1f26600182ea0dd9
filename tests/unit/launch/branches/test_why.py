"""``why``: the steps that moved a behavior by an integral, the groups by replay without them."""

import json

import pytest
import torch

from benchmarks.branches.planted_groups import ANSWER, PROMPT, asked_about
from deltawire.cli.main import main
from deltawire.errors import InputError, UnreadableError
from deltawire.launch.branches import group_effects
from deltawire.launch.branches.behavior import (
    layer_behavior,
    probe_behavior,
    read_behavior,
    read_rows,
)
from deltawire.launch.branches.path_integral import StepPart, integrate, without_momentum
from deltawire.launch.branches.versioned_model import open_model_of
from deltawire.launch.branches.why import Question, explain, parse_range
from deltawire.runtime.trusted import ANY
from deltawire.wire import keys

VERSIONS = 4


def asked(capsys, *words):
    assert main(["why", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_planted_group_is_found_and_the_parts_add_up(planted, tmp_path, capsys):
    file = asked_about(tmp_path)
    found = asked(capsys, planted.bucket.url, "--on", str(file), "--steps", "1")
    assert found["steps"][0]["version"] == planted.version
    top = found["groups"][0]
    assert (top["worker"], top["sequence"]) == ("w0", planted.sequence)
    assert top["effect"] > 2 * abs(found["groups"][1]["effect"])
    # The step with all groups comes out exactly, after it was made without each of them.
    assert all(one["exact"] for one in found["groups"])
    parts = [one["part"] for one in found["parts"]]
    assert abs(found["residual"]) < 0.05 * sum(map(abs, parts))
    change = found["after"] - found["before"]
    assert sum(parts) + found["residual"] == pytest.approx(change)
    assert sum(found["layers"].values()) == pytest.approx(sum(parts))


def test_text_and_a_coarse_path(planted, tmp_path, capsys):
    file = asked_about(tmp_path)
    words = [f"{planted.bucket.url}@1..{VERSIONS}", "--on", str(file), "--steps", "0"]
    assert main(["why", *words, "--every", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 to 3" in shown
    assert "residual" in shown


def test_a_coarse_part_is_divided_into_its_steps(planted, tmp_path):
    question = Question(file=str(asked_about(tmp_path)))
    fine = explain(planted.bucket, None, None, question, steps=0)
    coarse = explain(planted.bucket, None, None, question, every=VERSIONS, steps=1)
    assert [(one.base, one.version) for one in coarse.parts] == [(0, VERSIONS)]
    assert coarse.steps == [max(fine.parts, key=lambda one: abs(one.fresh))]


class Squares:
    """A behavior with a curved path, of which the trapezoid takes the exact parts."""

    unit = "square"

    def measure(self, module, *, gradient):
        total = 0.0
        for parameter in module.parameters():
            total += float(parameter.detach().double().square().sum())
            if gradient:
                parameter.grad = 2 * parameter.detach()
        return total


def test_the_trapezoid_is_exact_for_squares(planted):
    with open_model_of(planted.bucket) as model:
        found = integrate(model, Squares(), [0, VERSIONS])
    (step,) = found.steps
    assert step.part == pytest.approx(step.change, rel=1e-3)


class ManyVersions:
    """A model of one weight, which has another value in each version."""

    def __init__(self, values):
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.values = values

    @torch.no_grad()
    def move_to(self, version):
        self.module.weight.fill_(self.values[version])

    def trained(self):
        return dict(self.module.named_parameters())

    def forget(self):
        self.module.weight.grad = None


class FarVersions(ManyVersions):
    """Version 1 is far from version 0, and version 2 near it."""

    def __init__(self):
        super().__init__((0.0, 2.0, 2.1))


class FourthPower:
    """A behavior of which the trapezoid takes twice the part of the first step."""

    unit = "fourth power"

    def measure(self, module, *, gradient):
        if gradient:
            module.weight.grad = 4 * module.weight.detach() ** 3
        return float(module.weight.detach() ** 4)


def test_a_very_large_step_is_integrated_along_its_line():
    found = integrate(FarVersions(), FourthPower(), [0, 1, 2])
    first, second = found.steps
    assert first.part == pytest.approx(16, rel=1e-5)
    assert second.part == pytest.approx((32 + 4 * 2.1**3) / 2 * 0.1, rel=1e-5)  # The trapezoid.
    assert abs(found.residual) < 0.01
    assert sum(found.layers.values()) == pytest.approx(first.part + second.part)


class Jump:
    """A behavior that changes on a short part of the way between two versions."""

    unit = "nats"

    def __init__(self, steepness):
        self.steepness, self.measured = steepness, 0

    def measure(self, module, *, gradient):
        self.measured += 1
        height = torch.tanh(self.steepness * (module.weight.detach() - 1.0))
        if gradient:
            module.weight.grad = self.steepness * (1 - height**2)
        return float(height)


@pytest.mark.parametrize(("steepness", "most"), [(2, 9), (20, 65)])
def test_a_jump_is_integrated_with_as_many_gradients_as_it_takes(steepness, most):
    behavior = Jump(steepness)
    found = integrate(FarVersions(), behavior, [0, 1])
    assert abs(found.residual) < 0.01 * abs(found.change)
    assert behavior.measured <= 2 + most


class ThereAndBack(FourthPower):
    """A behavior that the last step undoes; each step is a small part of its way."""

    def measure(self, module, *, gradient):
        found = super().measure(module, gradient=gradient)
        self.measured = getattr(self, "measured", 0) + 1
        return found


def test_steps_that_cancel_each_other_take_no_more_gradients():
    behavior = ThereAndBack()
    versions = ManyVersions((2.0, 2.01, 2.02, 2.01, 2.0))
    found = integrate(versions, behavior, [*range(5)])
    assert found.change == 0
    assert behavior.measured == 5


def test_a_change_that_no_line_shows_ends_after_the_most_gradients():
    behavior = Jump(1e6)
    found = integrate(FarVersions(), behavior, [0, 1])
    assert abs(found.residual) > 0.1 * abs(found.change)
    assert behavior.measured == 2 + 65


def test_momentum_is_not_taken_for_a_step():
    """A gradient that enters at version 3 goes on to move the weights."""
    momentum, held, parts = 0.9, 0.0, []
    for version in range(1, 9):
        held = momentum * held + (1 - momentum) * (version == 3)
        part = held / (1 - momentum**version)
        parts.append(StepPart(base=version - 1, version=version, part=part, change=part))
    fresh = [one.fresh for one in without_momentum(parts, momentum)]
    assert fresh[2] > 0.3
    assert [one for number, one in enumerate(fresh) if number != 2] == pytest.approx([0] * 7)


def test_the_distance_of_a_layer_adds_up_exactly(planted, capsys):
    found = asked(capsys, planted.bucket.url, "--layer", "1", "--steps", "0")
    assert found["before"] == 0
    assert found["residual_share"] < 1e-6
    assert {name for name, part in found["layers"].items() if part} == {"layer 1"}


def test_groups_that_are_gone_are_named(planted, tmp_path):
    question = Question(layer="0")
    key = keys.rollout("w0", 0)
    data = planted.bucket.get(key, limit=1 << 20)
    planted.bucket.delete(key)
    try:
        found = explain(planted.bucket, 0, VERSIONS, question, steps=VERSIONS)
    finally:
        planted.bucket.put(key, data)
    assert not found.groups
    assert {one.version for one in found.unexplained} == set(range(1, VERSIONS + 1))
    assert "missing" in found.unexplained[0].reason


def test_a_probe_is_the_score_function_of_its_mean(planted):
    with open_model_of(planted.bucket) as model:
        model.move_to(0)
        groups = [
            group_effects.read_consumed(planted.bucket, meta)[0].group for meta in metas(model)
        ]
        behavior = probe_behavior("reward", groups)
        with pytest.raises(InputError, match="no stored answer has the probe 'unknown'"):
            probe_behavior("unknown", groups)
    weights = [sum(one.weights) for one in behavior.answers]
    assert sum(weights) == pytest.approx(0)
    assert {round(one * len(weights) / 6, 6) for one in weights} == {-0.5, 0.5}


def metas(model):
    bucket, run = model.bucket, model.run
    return [group_effects.metadata_at(bucket, run, version)[0] for version in (1, 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', "answer is no text"),
        ('{"prompt": 3, "answer": "b"}', "neither a text nor a list"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "a message of prompt"),
        ("[]", "line 1"),
        ("", "has 0 rows"),
    ],
)
def test_rows_that_are_wrong(planted, tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with open_model_of(planted.bucket) as model, pytest.raises(InputError, match=message):
        read_behavior(file, model.text)


def test_lines_are_numbered_as_in_the_file_and_end_at_newlines_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [number for number, _ in read_rows(file)] == [2, 4]


def test_a_layer_that_the_trainer_names_otherwise_has_no_effects(planted):
    """Such as a LoRA whose exporter publishes it merged."""
    with open_model_of(planted.bucket) as model:
        behavior = layer_behavior("1", model, 0, VERSIONS)
        with pytest.raises(InputError, match="under other names"):
            behavior.measure(torch.nn.Sequential(model.module), gradient=False)


def test_steps_that_cannot_be_read_are_unexplained(planted, monkeypatch):
    def unreadable(*_, **__):
        raise UnreadableError("an object cannot be read")

    monkeypatch.setattr(group_effects, "resume", unreadable)
    found = explain(planted.bucket, 0, 2, Question(layer="1"), steps=1)
    assert [one.reason for one in found.unexplained] == ["an object cannot be read"]


def test_an_answer_is_measured_against_another(planted, tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": PROMPT, "answer": ANSWER}
    with open_model_of(planted.bucket) as model:
        model.move_to(0)
        values = []
        for extra in ({}, {"answer": "four ok"}, {"instead": "four ok"}):
            file.write_text(json.dumps(row | extra) + "\n")
            values.append(read_behavior(file, model.text).measure(model.module, gradient=False))
    assert values[2] == pytest.approx(values[0] - values[1], abs=1e-6)


@pytest.mark.parametrize("words", ["3", "2..2", "9..10", "3..1"])
def test_ranges_without_a_change(planted, words):
    def ask():
        bucket, first, last = parse_range(f"{planted.bucket.url}@{words}", ANY)
        explain(bucket, first, last, Question(layer="0"), steps=0)

    with pytest.raises(InputError):
        ask()


@pytest.mark.parametrize("layer", ["7", "no_such"])
def test_a_layer_that_is_not_there(planted, layer):
    with pytest.raises(InputError, match="no trained tensor"):
        explain(planted.bucket, None, None, Question(layer=layer), steps=0)
