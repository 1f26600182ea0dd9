"""Quantized weights from several ranks: the names, shapes and bits that one rank publishes."""

import pytest
from quantized_ranks import MOVES, run_ranks, run_task

DENSE = {
    "model": "llama",
    "sizes": {
        "hidden_size": 96,
        "intermediate_size": 416,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "num_hidden_layers": 1,
    },
}
"""160, 80 and 416 rows: blocks of 128 cross the borders of 2 and of 4 ranks."""
EXPERTS = {
    "model": "moe",
    "sizes": {"hidden_size": 160, "moe_intermediate_size": 128, "num_hidden_layers": 1},
}
AXES = {"replicate", "tensor_parallel", "expert_parallel"}
TWO = {
    "fp8": (DENSE, "fp8-block-f32-ct", {}),
    "experts": (EXPERTS, "fp8-block", {"expert_parallel": 2}),
}
MORE = {
    "powers of two": (DENSE, "fp8-block", {"tensor_parallel": 2}),
    "int4": (DENSE, "int4-g32", {"tensor_parallel": 2}),
    "mxfp4": (DENSE, "mxfp4", {}),
    "expert tensors": (EXPERTS, "int4-g32", {"tensor_parallel": 2}),
    "bf16": (DENSE, "fp8-block", {"compute": "bfloat16"}),
}
FOUR = {
    "fp8": (DENSE, "fp8-block", {}),
    "copies": (DENSE, "fp8-block-f32", {"replicate": 2}),
    "tensor": (DENSE, "fp8-block", {"tensor_parallel": 2}),
    "int4": (DENSE, "int4-g32", {"tensor_parallel": 2}),
    "experts": (EXPERTS, "fp8-block", {"tensor_parallel": 2, "expert_parallel": 2}),
    "expert codes": (EXPERTS, "mxfp4", {"expert_parallel": 2, "replicate": 2}),
}


def tasks_of(cases):
    return {
        name: {**model, "train": {"exporter": exporter, **axes}}
        for name, (model, exporter, axes) in cases.items()
    }


def alone(task, folder):
    """The same task on one rank, in this process."""
    folder.mkdir()
    train = {key: value for key, value in task["train"].items() if key not in AXES}
    return run_task({**task, "train": train, "bucket": str(folder)})


def compare(folder, ranks, cases):
    tasks = tasks_of(cases)
    expected = {name: alone(task, folder / f"{name} alone") for name, task in tasks.items()}
    found = run_ranks(folder / "ranks", ranks, tasks)
    for name, one in expected.items():
        many = found[name]
        assert many["tensors"] == one["tensors"], name
        assert many["digests"] == one["digests"], name
        assert len(set(many["digests"])) == len(MOVES), "each version moves something"
        assert many["resumed"] == many["digests"][-1], name
        assert many["restored"] == many["digests"][-1], name
        assert many["chosen"] == one["chosen"], name
    return expected, found


def test_two_ranks_publish_the_bits_of_one(tmp_path):
    expected, found = compare(tmp_path, 2, TWO)
    assert any(one["chosen"] != one["resumed"] for one in found.values()), "scales are sticky"
    # A rank reads the scales of its own rows, widened to chunks and whole blocks.
    assert found["experts"]["read_scales"] < 0.6 * expected["experts"]["read_scales"]
    assert found["experts"]["read"] < 0.6 * expected["experts"]["read"]


@pytest.mark.drills
def test_two_ranks_in_other_arrangements_publish_the_bits_of_one(tmp_path):
    compare(tmp_path, 2, MORE)


@pytest.mark.drills
@pytest.mark.long
def test_four_ranks_in_every_arrangement_publish_the_bits_of_one(tmp_path):
    compare(tmp_path, 4, FOUR)
