"""``show`` and ``diff``: what a version was made of, and which of its weights changed."""

import json
import time

import numpy as np
import pytest
from test_dataset import Trained

from deltawire import codec
from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.events import Evaluated, Step, encode_lines
from deltawire.launch.branches.differences import compare_bits
from deltawire.store import open_bucket
from deltawire.sync import Mirror, Publisher, create_run, read_run
from deltawire.testing.tiny import weights
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec

SPECS = [
    TensorSpec("model.embed_tokens.weight", (6, 4), "BF16"),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", (8, 4), "F32"),
    TensorSpec("model.layers.1.self_attn.q_proj.weight", (8, 4), "F32"),
    TensorSpec("model.layers.1.self_attn.q_proj.bias", (8,), "F32"),
    TensorSpec("model.steps", (2,), "I64"),
]


def made(place, *versions):
    """A run of these versions, each a dict of tensors that differ from zeros and ones."""
    bucket = open_bucket(str(place), create=True)
    zeros = {spec.name: np.zeros(spec.count, codec.unsigned_of(spec.dtype)) for spec in SPECS}
    first = bits_of(versions[0])
    run = create_run(
        bucket,
        Run(
            id="ab" * 16,
            name="made",
            created_at=time.time(),
            tensors=SPECS,
            digest=codec.digest_model(first).hex(),
        ),
    )
    with Publisher(bucket, run, Mirror(zeros, -1, codec.ZERO), epoch=0) as publisher:
        for values in versions:
            tensors = bits_of(values)
            publisher.publish({s.name: tensors[s.name].reshape(s.shape) for s in SPECS})
            publisher.flush()
    return bucket


def bits_of(values):
    found = {}
    for spec in SPECS:
        array = values.get(spec.name, np.ones(spec.shape))
        if spec.dtype == "BF16":
            bits = (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif spec.dtype == "F32":
            bits = np.asarray(array, np.float32).view(np.uint32)
        else:
            bits = np.asarray(array, np.int64).view(np.uint64)
        found[spec.name] = bits.reshape(-1).copy()
    return found


FIRST, SECOND = SPECS[1].name, SPECS[2].name


def difference(tmp_path, new):
    bucket = made(tmp_path / "run", {}, new)
    run = read_run(bucket)
    return compare_bits((bucket, run, 0), (bucket, run, 1))


def test_changes_are_counted_by_layer_and_kind(tmp_path):
    moved = np.ones((8, 4))
    moved[2, :3] = 3.0
    found = difference(tmp_path, {SECOND: moved, SPECS[4].name: [1, 2]})
    assert (found.count, found.changed) == (24 + 32 + 32 + 8 + 2, 4)
    layers = {one.name: (one.count, one.changed) for one in found.layers}
    assert layers["layer 0"] == (32, 0)
    assert layers["layer 1"] == (40, 3)
    assert layers["steps"] == (2, 1)
    kinds = {one.name: (one.count, one.changed, round(one.norm, 6)) for one in found.kinds}
    assert kinds["self_attn.q_proj"] == (72, 3, round(12**0.5, 6))
    (mover,) = found.movers
    assert (mover.name, mover.changed) == (SECOND, 3)
    assert mover.relative == pytest.approx(12**0.5 / 32**0.5)
    assert found.norm == pytest.approx(12**0.5)


def test_the_rank_of_an_update_is_the_number_of_its_directions(tmp_path):
    one = np.ones((8, 4)) + np.outer(np.arange(8), [1, 2, 3, 4])
    three = np.ones((8, 4))
    three[0, 0] = three[3, 1] = three[5, 2] = 2.0
    ranks = {m.name: m.rank for m in difference(tmp_path, {FIRST: one, SECOND: three}).movers}
    assert ranks[FIRST] == pytest.approx(1, abs=1e-3)
    assert ranks[SECOND] == pytest.approx(3, abs=1e-3)


def test_two_runs_are_compared(tmp_path, capsys):
    old = made(tmp_path / "a", {}, {})
    new = made(tmp_path / "b", {FIRST: np.full((8, 4), 2.0)})
    assert main(["diff", f"{old.url}@1", f"{new.url}@0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == 32
    assert main(["diff", f"{old.url}@0", old.url]) == 0
    assert "changed: 0 of 98 weights" in capsys.readouterr().out
    assert main(["diff", f"{old.url}@1", f"{new.url}@0"]) == 0
    shown = capsys.readouterr().out
    assert "layer 0" in shown
    assert "self_attn.q_proj" in shown


def test_other_models_are_refused(tmp_path):
    bucket = made(tmp_path / "run", {})
    run = read_run(bucket)
    other = Trained(tmp_path / "other", versions=1)
    with pytest.raises(InputError, match="the two hold different models"):
        compare_bits((bucket, run, 0), (other.bucket, other.run, 0))


@pytest.fixture
def trained(tmp_path):
    trained = Trained(tmp_path / "run", versions=2)
    step = Step(
        process="trainer", at=1.0, version=2, groups=2, dropped=0, reward_mean=0.5, loss=0.125,
        grad_norm=1.5, k3=0.0, ratio_max=1.0, clipped=0.0, staleness=[1], tokens=9, seconds=1.0,
    )  # fmt: skip
    scored = Evaluated(
        process="evaluator", at=1.0, version=2, accuracy=0.75, problems=8, seconds=1.0
    )
    for event in (step, scored):
        trained.bucket.put(keys.events(event.process, 0), encode_lines([event]))
    return trained


def test_a_version_is_described(trained, capsys):
    assert main(["show", f"{trained.bucket.url}@2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["base"], found["run"]) == (2, 1, "tiny")
    assert [(one["worker"], one["sequence"]) for one in found["groups"]] == [("w0", 2), ("w1", 2)]
    rewards = [reward for group in found["groups"] for reward in group["rewards"]]
    assert len(rewards) == 14
    assert found["reward"] == pytest.approx(sum(rewards) / 14)
    assert found["step"]["grad_norm"] == 1.5
    assert found["heldout"]["accuracy"] == 0.75
    old, new = (
        {name: bits.reshape(-1) for name, bits in weights(version).items()} for version in (1, 2)
    )
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    assert found["bits"]["changed"] == changed > 0


def test_a_version_is_printed(trained, capsys):
    assert main(["show", trained.bucket.url]) == 0
    shown = capsys.readouterr().out
    for text in ("tiny@2", "loss 0.125", "held-out: 0.750 of 8", "w0/2", "embed", "mean reward"):
        assert text in shown
    assert main(["show", f"{trained.bucket.url}@0"]) == 0
    assert "it has no base" in capsys.readouterr().out
    assert main(["show", f"{trained.bucket.url}@9"]) == 2
    assert "the run has no version 9" in capsys.readouterr().err


def test_groups_that_cannot_be_read_are_named(trained, capsys):
    trained.bucket.delete(keys.rollout("w0", 2))
    trained.bucket.put(keys.rollout("w1", 2), b"x")
    assert main(["show", f"{trained.bucket.url}@2", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [bool(one["fault"]) for one in groups] == [True, True]
    assert main(["show", f"{trained.bucket.url}@2"]) == 0
    assert "not in the bucket any more" in capsys.readouterr().out
