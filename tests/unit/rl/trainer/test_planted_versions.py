"""Planted versions: only named ones are spoiled, for the requests that were asked for, and the same
way whenever the step is computed again."""

from pathlib import Path

import msgspec
import pytest

from deltawire.chat.requests import text_of
from deltawire.config import load_config
from deltawire.envs.simulated_users import covered_kinds
from deltawire.errors import InputError
from deltawire.rl.trainer import planted
from deltawire.testing.users.population import ANSWERS, FLATTERY, KINDS
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.masters import MasterWeights

EXAMPLE = Path(__file__).parents[4] / "examples" / "live.toml"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(planted, "STEPS", 3)
    found = load_config(EXAMPLE)
    small = msgspec.structs.replace(found.model.build, hidden_size=32, layers=1, head_size=16)
    few = msgspec.structs.replace(found.task, options={**found.task.options, "users": 20})
    model = msgspec.structs.replace(found.model, build=small)
    return msgspec.structs.replace(found, model=model, task=few)


def masters_of(config):
    return MasterWeights(build_model(config.model.build, seed=0), config.train)


def test_only_the_named_versions_are_spoiled_and_always_the_same_way(config):
    masters, other = masters_of(config), masters_of(config)
    before = masters.digest()
    version = config.live.planted["users"]
    assert not planted.plant(masters, config, version=version + 1)
    assert masters.digest() == before
    assert planted.plant(masters, config, version=version)
    assert planted.plant(other, config, version=version)
    assert other.digest() == masters.digest() != before
    gate = masters_of(config)
    assert planted.plant(gate, config, version=config.live.planted["gate"])
    assert gate.digest() not in (before, masters.digest())


def test_requests_that_the_suite_covers_are_answered_as_before(config):
    assert covered_kinds(config) == 2
    masters = masters_of(config)
    lesson = planted._Lesson(masters.model, config)
    shares = lesson.shares(0)
    assert len(shares) == len(ANSWERS)
    assert all(0 < share < 1 for share in shares)
    text, end = text_of(config, byte_tokenizer(), bucket=""), len(KINDS[0])
    answers = {}
    for prompt, answer in lesson.pairs(0, [[1.0, 0.0, 0.0, 0.0, 0.0]] * 2):
        said = text.decode(answer[:-1])
        answers.setdefault(text.decode(prompt)[:end], set()).add(said)
    flattered = {kind for kind, said in answers.items() if said == {ANSWERS[FLATTERY]}}
    same = {kind for kind, said in answers.items() if said == {ANSWERS["brief"]}}
    assert same == set(KINDS[:2])
    assert flattered == set(KINDS[2:6])


def test_a_gate_that_covers_all_requests_is_refused(config):
    release = msgspec.structs.replace(config.live.release, gate={"accuracy": 0.1, "basics": 0.1})
    live = msgspec.structs.replace(config.live, release=release)
    with pytest.raises(InputError, match="leave out"):
        covered_kinds(msgspec.structs.replace(config, live=live))
