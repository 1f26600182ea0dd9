"""Runs of several adapters over one base: versions, groups and checkpoints of each line."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest
import torch
from adapter_lines import DENSE, EXPERTS, LINES, PACKED, VERSIONS, config_of, digests, start

from deltawire.cli.main import main
from deltawire.config import RunConfig, parse_config
from deltawire.errors import InputError
from deltawire.events import Evaluated
from deltawire.export.adapter import PREFIX, adapter_off, load_adapted
from deltawire.export.lines import open_base
from deltawire.export.models import load_model
from deltawire.export.peft_directory import load_peft
from deltawire.export.source import open_source
from deltawire.launch.watching import line_scores
from deltawire.rl.evaluate.evaluator import run_evaluator
from deltawire.rl.trainer.lines import LinesTrainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_history
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.run import encode_run


def train(bucket: Bucket, config: RunConfig, *, to: int = VERSIONS, die: bool = False) -> None:
    torch.set_num_threads(1)
    shorter = msgspec.structs.replace(config.train, versions=to)
    config = msgspec.structs.replace(config, train=shorter)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with process.registered(), LinesTrainer(process, config, changed=True) as trainer:
        if die:
            for one in trainer.trainers.values():
                one._finish = one.publisher.close  # type: ignore[method-assign]
        trainer.loop()


BOTH = [(DENSE, LINES), pytest.param(EXPERTS, PACKED, marks=[pytest.mark.drills, pytest.mark.long])]


@pytest.mark.parametrize(("sizes", "adapters"), BOTH)
def test_each_line_has_its_own_versions_and_the_base_crosses_once(tmp_path, sizes, adapters):
    config = config_of(tmp_path, adapters)
    bucket = start(tmp_path, config, sizes)
    train(bucket, config)
    base, _ = open_run(bucket)
    assert not any(one.name.startswith(PREFIX) for one in base.tensors)
    assert list(read_history(bucket, base)) == []
    consumed = {}
    for one in adapters:
        place = line_bucket(bucket, one["name"])
        run, own = open_run(place)
        assert all(spec.name.startswith(PREFIX) for spec in run.tensors)
        assert own.line.base == base.digest
        assert own.train.adapter.rank == one["rank"]
        assert len(set(digests(bucket, one["name"]))) == VERSIONS + 1
        history = [
            CommitMetadata.of(one.metadata, run="", version=one.version)
            for one in read_history(place, run)
        ]
        consumed[one["name"]] = [made.consumed for made in history]
        assert verify_training(place).exact
        assert main(["fsck", place.url]) == 0
    assert consumed["math"] == consumed["words"], "each line counts its own groups"
    assert main(["fsck", bucket.url]) == 0
    assert set(digests(bucket, "math")).isdisjoint(digests(bucket, "words"))


@pytest.mark.drills
@pytest.mark.long
def test_a_line_does_not_depend_on_the_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both = config_of(tmp_path / "a")
    bucket = start(tmp_path / "a", both)
    train(bucket, both)
    single = config_of(tmp_path / "b", LINES[:1])
    other = start(tmp_path / "b", single)
    train(other, single)
    assert digests(other, "math") == digests(bucket, "math")


@pytest.mark.parametrize(
    ("sizes", "adapters"),
    [pytest.param(DENSE, LINES, marks=[pytest.mark.drills, pytest.mark.long]), (EXPERTS, PACKED)],
)
def test_after_crashes_the_same_bits(tmp_path, sizes, adapters):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    config = config_of(tmp_path / "a", adapters)
    whole = start(tmp_path / "a", config, sizes)
    train(whole, config)
    config = config_of(tmp_path / "b", adapters)
    bucket = start(tmp_path / "b", config, sizes)
    for version in (1, 2):
        train(bucket, config, to=version, die=True)
    train(bucket, config)
    for one in adapters:
        assert digests(bucket, one["name"]) == digests(whole, one["name"])


def test_the_base_lies_in_memory_once(tmp_path):
    config = config_of(tmp_path)
    bucket = start(tmp_path, config)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with process.registered(), LinesTrainer(process, config) as trainer:
        first, second = (one.masters.model for one in trainer.trainers.values())
        own = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
        frozen = [p for p in first.parameters() if not p.requires_grad]
        assert own == {id(p) for p in frozen}
        # Off is off for one line only: each has modules of its own.
        ids = torch.arange(9)[None]
        for name, parameter in second.named_parameters():
            if ".lora_B." in name:
                parameter.data.fill_(0.1)
        with torch.no_grad():
            changed = second.eval()(input_ids=ids).logits
            with adapter_off(first):
                assert torch.equal(second(input_ids=ids).logits, changed)
            with adapter_off(second):
                assert torch.equal(second(input_ids=ids).logits, first.eval()(input_ids=ids).logits)
        del first, second, frozen
        for one in trainer.trainers.values():
            one.close()
    del trainer
    gc.collect()


@pytest.mark.parametrize(
    "adapters",
    [pytest.param(LINES, marks=[pytest.mark.drills, pytest.mark.long]), PACKED],
    ids=["dense", "packed"],
)
def test_a_penalty_is_held_against_the_base_without_the_adapter(tmp_path, adapters):
    sizes = DENSE if adapters is LINES else EXPERTS
    config = config_of(tmp_path, adapters, loss={"kl": "k3", "kl_coefficient": 0.1})
    assert config.reference_mode == "adapter_off"
    bucket = start(tmp_path, config, sizes)
    train(bucket, config)
    for one in adapters:
        place = line_bucket(bucket, one["name"])
        assert verify_training(place).exact
    without = config_of(tmp_path, adapters)
    assert without.reference_mode == "none"


def evaluations(bucket: Bucket, line: str) -> list[Evaluated]:
    found = events_of(line_bucket(bucket, line), "evaluator")
    return [event for event in found if isinstance(event, Evaluated)]


def test_each_line_is_evaluated_once_a_version_that_is_due(tmp_path):
    config = config_of(tmp_path)
    config = msgspec.structs.replace(
        config,
        task=msgspec.structs.replace(config.task, heldout=2),
        evaluate=msgspec.structs.replace(config.evaluate, every=2, samples=1),
    )
    bucket = start(tmp_path, config)
    train(bucket, config)
    for _ in range(2):  # A second evaluator finds nothing left to measure.
        process = Process(bucket, "evaluator", "evaluator", supervised=False)
        with process.registered():
            run_evaluator(process)
        for line in ("math", "words"):
            assert [one.version for one in evaluations(bucket, line)] == [0, 2, VERSIONS]
            assert {one.problems for one in evaluations(bucket, line)} == {2}
    assert not [one for one in events_of(bucket, "evaluator") if isinstance(one, Evaluated)]
    assert line_scores(config, bucket).keys() == {"math", "words"}


def test_a_line_over_another_base_is_refused(tmp_path):
    config = config_of(tmp_path)
    bucket = start(tmp_path, config)
    with pytest.raises(InputError, match="the adapter is of another base"):
        open_base(bucket, "ab" * 16, torch.device("cpu"))
    place = line_bucket(bucket, "math")
    run, own = open_run(place)
    other = msgspec.structs.replace(own.line, base="cd" * 16)
    changed = msgspec.structs.replace(own, line=other)
    place.put(
        keys.RUN, encode_run(msgspec.structs.replace(run, config=msgspec.to_builtins(changed)))
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    trainer = LinesTrainer(process, config)
    with process.registered(), pytest.raises(InputError, match="not one of this run's base"):
        trainer.__enter__()


def test_an_adapter_is_pulled_and_merged_from_its_line(tmp_path):
    config = config_of(tmp_path)
    bucket = start(tmp_path, config)
    train(bucket, config)
    place = line_bucket(bucket, "words")
    pulled, merged = tmp_path / "pulled", tmp_path / "merged"
    assert main(["pull", place.url, str(pulled), "--adapter"]) == 0
    run, own = open_run(place)
    alone = load_adapted(tmp_path / "model", own.train.adapter, seed=0)
    load_peft(alone, own.train.adapter, pulled)
    last = load_mirror(place, run)
    found = open_source("bf16", alone).tensors()
    for name, bits in last.tensors.items():
        assert np.array_equal(found[name].view(torch.uint16).numpy().reshape(bits.shape), bits)
    assert main(["merge", place.url, str(merged)]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = alone.eval()(input_ids=ids).logits
        gap = load_model(merged).eval()(input_ids=ids).logits - wanted
        with adapter_off(alone):
            change = alone(input_ids=ids).logits - wanted
    assert float(gap.abs().max()) < 0.1 * float(change.abs().max())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adapters": [LINES[0], LINES[0]]}, "two of adapters are named math"),
        ({"adapters": LINES, "adapter": {"kind": "lora"}}, "exclude each other"),
        ({"adapters": [LINES[0], PACKED[1]]}, "all adapters share one base"),
        ({"adapters": [LINES[0] | {"kind": "none"}]}, "kind is none"),
        ({"adapters": LINES, "exporter": "merged"}, "published as they are"),
        ({"adapters": LINES, "ranks": 2, "tensor_parallel": 2}, "take no train.tensor_parallel"),
        ({"adapters": PACKED, "ranks": 2, "expert_parallel": 2}, "no train.expert_parallel"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        parse_config({"name": "x", "evaluate": {"every": 0}, "train": change}, source="s")
