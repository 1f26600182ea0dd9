"""Steps over ranks, on every mesh: the gradients, losses and published bits of one process."""

import numpy as np
import pytest
import rank_steps
import torch

from deltawire import codec
from deltawire.plan.configuration import decode_config
from deltawire.plan.families import describe
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import all_phases
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train.masters import MasterWeights

GRADIENT = 1e-6
LOSS = 1e-4
AXES = {"replicate", "tensor_parallel", "expert_parallel"}
PACKED = {
    "kind": "lora",
    "rank": 4,
    "alpha": 8,
    "targets": ["q_proj", "experts"],
    "packed": "int4-g32",
    "packed_layers": ["o_proj"],
}
LORA = {"kind": "lora", "rank": 4, "alpha": 8, "targets": ["all-linear"]}
MUON = {"kind": "muon", "learning_rate": 1e-3}
GIVEN = {"advantage": "given", "aggregation": "seq_mean_token_mean"}
JUDGED = {
    "dpo": {
        "model": "dense",
        "train": {"loss": {**GIVEN, "preference": {"kind": "dpo"}}, "tensor_parallel": 2},
    },
    "dpo_norm": {
        "model": "moe",
        "train": {
            "loss": {**GIVEN, "policy_coefficient": 0.0, "preference": {"kind": "dpo_norm"}},
            "max_tokens_per_batch": 64,
        },
    },
    "kto": {"model": "llama", "train": {"loss": {**GIVEN, "surrogate": "kto"}}},
}
"""By name, steps on rewards of both signs and better answers, with a sharded reference."""


def single(task):
    """The same task on one rank."""
    train = {key: value for key, value in task["train"].items() if key not in AXES}
    return {key: value for key, value in task.items() if key != "publish"} | {"train": train}


def assert_alike(one, many):
    (record, gradients), (theirs, others) = one, many
    assert gradients.keys() == others.keys()
    assert (theirs["tokens"], theirs["reward"]) == (record["tokens"], record["reward"])
    apart = sum(np.sum((gradients[k].astype(np.float64) - others[k]) ** 2) for k in gradients)
    size = sum(np.sum(gradients[k].astype(np.float64) ** 2) for k in gradients)
    assert np.sqrt(apart / size) <= GRADIENT
    assert theirs["losses"] == pytest.approx(record["losses"], abs=LOSS)
    # Muon's iterations in bf16 make a rounding of a gradient a larger one of a later step.
    assert theirs["norms"] == pytest.approx(record["norms"], rel=1e-4)
    assert theirs["entropy"] == pytest.approx(record["entropy"], rel=1e-5)
    assert theirs["k3"] == pytest.approx(record["k3"], rel=1e-4)
    assert sorted(theirs["members"]) == sorted(record["members"])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Tasks of one pair of processes, and the same tasks on one rank, in this process.

    ``shards`` has a vocabulary that does not divide: FSDP2 pads the last rank's rows.
    """
    folder = tmp_path_factory.mktemp("meshes")
    tensor, expert = {"tensor_parallel": 2}, {"expert_parallel": 2}
    short = {"groups": 2, "last": 2}
    for name in ("one", "two"):
        (folder / name).mkdir()
    tasks = {
        "shards": {**short, "model": "moe", "sizes": {"vocab_size": 265}, "train": {}},
        "tied": {**short, "model": "dense", "train": tensor, "bucket": str(folder / "two")},
        "adapter": {**short, "model": "llama", "train": {**tensor, "adapter": LORA}},
        "stacks": {**short, "model": "gpt_oss", "train": {**expert, "max_tokens_per_batch": 64}},
        "muon": {**short, "model": "moe", "train": {**tensor, "optimizer": MUON}},
        **{name: {**short, "edited": True, **task} for name, task in JUDGED.items()},
    }
    alone = {name: rank_steps.run_task(single(task)) for name, task in tasks.items()}
    first = {**tasks["tied"], "bucket": str(folder / "one")}
    alone["tied"] = rank_steps.run_task(single(first))
    offload = {**tasks["muon"]["train"], "offload": "optimizer"}
    selective = {**tasks["stacks"]["train"], "activation_checkpointing": "selective"}
    more = {
        "offload": {**tasks["muon"], "train": offload},
        "recomputed": {**tasks["stacks"], "train": selective},
        "taken over": {**first, "first": 2, "publish": str(folder / "published")},
        "of experts": {**tasks["stacks"], "publish": str(folder / "experts")},
        "of shards": {**tasks["shards"], "publish": str(folder / "shards")},
    }
    abandoned = {**tasks["stacks"], "groups": 5, "last": 1, "stopping_rank": 1}
    more["untrained"] = {**abandoned, "last": 0}
    more["abandoned"] = abandoned
    found = rank_steps.run_tasks(folder, 2, tasks | more)
    return folder, tasks, alone, found


def test_all_ranks_abandon_a_step_if_one_is_asked_to_stop(two_ranks):
    found = two_ranks[3]
    record = found["abandoned"][0]
    assert record["abandoned"] == 0
    assert record["digest"] == found["untrained"][0]["digest"]
    assert found["stacks"][0]["digest"] != record["digest"]


@pytest.mark.parametrize("name", ["shards", "tied", "adapter", "stacks", "muon", *JUDGED])
def test_ranks_compute_one_process_step(two_ranks, name):
    _, _, alone, found = two_ranks
    assert_alike(alone[name], found[name])


def planned(task, ranks):
    """Elements of masters and optimizer states on the fullest rank, by the memory model."""
    config = rank_steps.model_of(task).config
    train = task["train"]
    lora = "adapter" in train
    copies, tensor = train.get("replicate", 1), train.get("tensor_parallel", 1)
    layout = TrainingLayout(
        mode="lora" if lora else "full",
        data=ranks // (copies * tensor),
        replicate=copies,
        tensor=tensor,
        expert=train.get("expert_parallel", 1),
        optimizer=train.get("optimizer", {}).get("kind", "adamw"),
        lora_rank=LORA["rank"] if lora else 0,
    )
    described = decode_config(config.to_json_string(use_diff=False).encode(), where="test")
    phase = all_phases(describe(described, name="test"), layout)[-1]
    # Only what is trained is in a rank's state: of an adapter, a master for each pair of moments.
    return 3 * phase.optimizer / 8 if lora else (phase.parameters + phase.optimizer) / 4


@pytest.mark.parametrize("name", ["shards", "tied", "adapter", "stacks", "muon"])
def test_a_rank_stores_what_the_memory_model_plans(two_ranks, name):
    """Each model agrees about which tensors are divided: also adapters, routers and norms."""
    _, tasks, alone, found = two_ranks
    assert alone[name][0]["stored"] == pytest.approx(planned(single(tasks[name]), 1), rel=0.01)
    assert found[name][0]["stored"] == pytest.approx(planned(tasks[name], 2), rel=0.01)


def test_offload_and_recomputation_over_ranks_change_no_bit(two_ranks):
    """Expert choices are replayed, and tokens exchanged, once more in the backward pass."""
    _, _, _, found = two_ranks
    for plain, other in (("muon", "offload"), ("stacks", "recomputed")):
        assert found[other][0] == found[plain][0]
        for name, gradient in found[plain][1].items():
            np.testing.assert_array_equal(found[other][1][name], gradient)


def test_two_ranks_publish_the_bits_that_one_rank_publishes(two_ranks):
    """The masters of one rank's checkpoint, divided by columns, rows and vocabulary."""
    folder, _, alone, found = two_ranks
    assert found["taken over"][0]["digest"] == alone["tied"][0]["digest"]
    bucket = open_bucket(str(folder / "published"))
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=0)
    assert codec.digest_model(mirror.tensors).hex() == alone["tied"][0]["digest"]
    assert [spec.shape for spec in run.tensors if "o_proj" in spec.name] == [(32, 32)] * 2
    assert found["taken over"][0]["loaded"] == alone["tied"][0]["digest"]


@pytest.mark.parametrize("name", ["taken over", "of experts", "of shards"])
def test_ranks_dither_as_one_process_does(two_ranks, name):
    """Divided by columns, by experts, and by rows that do not divide."""
    folder, tasks, _, found = two_ranks
    own = {"taken over": "tied", "of experts": "stacks", "of shards": "shards"}[name]
    place = {"taken over": "published", "of experts": "experts", "of shards": "shards"}[name]
    task = single(tasks[own])
    bucket = open_bucket(str(folder / place))
    masters = MasterWeights(rank_steps.model_of(task), rank_steps.config_of(task).train)
    masters.reset(load_mirror(bucket, read_run(bucket), at=0))
    assert rank_steps.digests_of(masters) == found[name][0]["masters"]
    since, share, layers = rank_steps.served_after_a_change(masters)
    assert found[name][0]["served"][0] == since == 0
    assert found[name][0]["served"][1] == pytest.approx(share, abs=0.05)
    assert found[name][0]["served"][2] == pytest.approx(layers, abs=0.2)
    assert not all(torch.equal(m, p) for m, p in zip(
        masters._masters.values(), masters.model.parameters(), strict=True
    ))  # fmt: skip


def test_one_rank_continues_what_two_ranks_saved(two_ranks):
    folder, tasks, _, _ = two_ranks
    task = single(tasks["tied"])
    further = rank_steps.run_task({**task, "first": 2, "last": 3, "bucket": str(folder / "two")})
    straight = rank_steps.run_task({**task, "last": 3, "bucket": ""})
    assert further[0]["losses"][0] == pytest.approx(straight[0]["losses"][2], abs=LOSS)


FOUR = {
    "dense": [{}, {"replicate": 2}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "replicate": 2}],
    "llama": [{"tensor_parallel": 2}],
    "moe": [
        {"tensor_parallel": 2},
        {"expert_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2},
        {"expert_parallel": 2, "replicate": 2},
    ],
    "olmoe": [{"tensor_parallel": 2}, {"expert_parallel": 4}],
    "gpt_oss": [{"expert_parallel": 2}],
}


@pytest.fixture(scope="module")
def packed_ranks(tmp_path_factory):
    """Steps of adapters over packed experts: sharded, divided by experts, with a shared factor."""
    folder = tmp_path_factory.mktemp("packed")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    expert = {"expert_parallel": 2}
    common = {"model": "moe", "groups": 2, "last": 2, "sizes": sizes}
    tasks = {
        "sharded": {**common, "train": {"adapter": PACKED}, "bucket": str(folder / "saved")},
        "experts": {**common, "train": {**expert, "adapter": PACKED}},
        "shared": {**common, "train": {**expert, "adapter": {**PACKED, "shared_factor": True}}},
        "bf16": {**common, "train": {"adapter": PACKED, "compute": "bfloat16"}},
    }
    (folder / "saved").mkdir()
    alone = {
        name: rank_steps.run_task({**single(task), "bucket": ""}) for name, task in tasks.items()
    }
    straight = rank_steps.run_task({**single(tasks["sharded"]), "bucket": "", "last": 3})
    more = {
        "resumed": {**tasks["sharded"], "train": tasks["experts"]["train"], "first": 2, "last": 3},
        "published": {**tasks["experts"], "publish": str(folder / "published")},
    }
    return alone, straight, rank_steps.run_tasks(folder, 2, tasks | more)


@pytest.mark.parametrize("name", ["sharded", "experts", "shared"])
def test_ranks_over_packed_experts_compute_one_process_step(packed_ranks, name):
    alone, _, found = packed_ranks
    assert sum("experts.adapters" in one for one in found[name][1]) == 8
    assert_alike(alone[name], found[name])


def test_a_rank_holds_half_of_the_packed_weights(packed_ranks):
    alone, _, found = packed_ranks
    assert alone["sharded"][0]["packed"] > 20_000
    assert found["sharded"][0]["packed"] == alone["sharded"][0]["packed"] / 2
    assert found["experts"][0]["packed"] == alone["experts"][0]["packed"] / 2


def test_packed_weights_stay_bytes_where_layers_compute_in_bf16(packed_ranks):
    alone, _, found = packed_ranks
    assert found["bf16"][0]["losses"] == pytest.approx(alone["bf16"][0]["losses"], abs=1e-2)
    assert found["bf16"][0]["packed"] == alone["bf16"][0]["packed"] / 2


def test_adapters_over_packed_experts_resume_on_another_mesh(packed_ranks):
    """Sharded ranks saved them; ranks of expert parallelism continue."""
    _, straight, found = packed_ranks
    record = found["resumed"][0]
    assert record["losses"] == pytest.approx(straight[0]["losses"][2:], abs=LOSS)


def test_ranks_publish_and_load_packed_experts(packed_ranks):
    _, _, found = packed_ranks
    record = found["published"][0]
    assert record["loaded"] == record["digest"] == found["experts"][0]["digest"]


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize("model", list(FOUR))
def test_four_ranks_in_every_arrangement_compute_the_same(tmp_path, model):
    """Ten steps on each mesh; the first mesh twice, to the same bits."""
    tasks = {
        str(number): {"model": model, "last": 10, "train": train}
        for number, train in enumerate([*FOUR[model], FOUR[model][0]])
    }
    found = rank_steps.run_tasks(tmp_path, 4, tasks)
    alone = rank_steps.run_task(single(tasks["0"]))
    for name, many in found.items():
        assert_alike(alone, many)
        if model != "llama":  # Its vocabulary does not divide, which no real one is planned for.
            planned_here = planned(tasks[name], 4)
            assert many[0]["stored"] == pytest.approx(planned_here, rel=0.02)
    first, again = found["0"], found[str(len(tasks) - 1)]
    assert again[0] == first[0], "a repetition gives the same bits"


@pytest.mark.drills
@pytest.mark.parametrize("model", [pytest.param("dense", marks=pytest.mark.long), "moe"])
def test_two_ranks_compute_ten_steps_alike_and_a_sharded_process_to_the_bit(tmp_path, model):
    axes = [{}, {"replicate": 2}, {"tensor_parallel": 2}]
    axes += [{"expert_parallel": 2}] if model == "moe" else []
    tasks = {
        str(number): {"model": model, "last": 10, "train": train}
        for number, train in enumerate([*axes, axes[2]])
    }
    alone = rank_steps.run_task(single(tasks["0"]))
    twin = rank_steps.run_steps(tmp_path / "twin", 1, **tasks["0"], sharded=True)
    assert twin[0] == alone[0]
    found = rank_steps.run_tasks(tmp_path, 2, tasks)
    for many in found.values():
        assert_alike(alone, many)
    assert found["2"][0] == found[str(len(axes))][0], "a repetition gives the same bits"


@pytest.mark.drills
@pytest.mark.long
def test_a_mixed_mesh_resumes_on_any_other(tmp_path):
    """Muon, over tensor × expert ranks, then other axes; and to the bit on the same mesh."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    mixed = {"tensor_parallel": 2, "expert_parallel": 2, "optimizer": MUON}
    task = {"model": "moe", "groups": 3, "train": mixed}
    others = {
        "same": mixed,
        "experts": {"expert_parallel": 4, "optimizer": MUON},
        "tensor": {"tensor_parallel": 2, "replicate": 2, "optimizer": MUON},
        "shards": {"optimizer": MUON},
    }
    tasks = {
        "straight": {**task, "last": 3},
        "first": {**task, "last": 2, "bucket": str(bucket)},
    } | {
        name: {**task, "train": train, "first": 2, "last": 3, "bucket": str(bucket)}
        for name, train in others.items()
    }
    found = rank_steps.run_tasks(tmp_path, 4, tasks)
    straight = found["straight"][0]
    assert found["same"][0]["losses"] == straight["losses"][2:]
    assert found["same"][0]["digest"] == straight["digest"]
    for name in others:
        assert found[name][0]["losses"] == pytest.approx(straight["losses"][2:], abs=LOSS)
    last = {**single(task), "first": 2, "last": 3, "bucket": str(bucket)}
    assert rank_steps.run_task(last)[0]["losses"] == pytest.approx(straight["losses"][2:], abs=LOSS)
