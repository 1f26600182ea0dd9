"""The training client's examples, in short: each learns what it is meant to, within 60 lines."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "examples" / "training_client"
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(capsys):
    yield
    capsys.readouterr()


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load("small").build(tmp_path_factory.mktemp("small"))


def test_each_example_has_fewer_than_60_lines():
    sizes = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert len(sizes) == 5
    assert max(sizes.values()) < 60, sizes


def test_sft(model, tmp_path):
    assert load("sft").main(str(model), str(tmp_path / "run")) > 0.7


def test_grpo(model, tmp_path):
    rewards = load("grpo").main(str(model), str(tmp_path / "run"), 25)
    assert rewards[-1] > rewards[0] + 0.1


def test_dpo(model, tmp_path):
    assert load("dpo").main(str(model), str(tmp_path / "run"), 8) == 1.0


def test_distill(model, tmp_path):
    load("sft").main(str(model), str(tmp_path / "teacher"), 40)
    student, teacher = str(tmp_path / "student"), str(tmp_path / "teacher")
    divergences = load("distill").main(str(model), student, teacher, 12)
    assert divergences[-1] < divergences[0]
