"""A layout comes from a bucket: what it takes in memory is bounded by its size."""

import tracemalloc

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.sync.huggingface.safetensors_layout import (
    SafetensorsLayout,
    WeightFile,
    decode_layout,
    default_layout,
    encode_layout,
)
from deltawire.wire.run import Run, TensorSpec

TENSORS = 3000
TIMES = 8
"""The most bytes of memory for each byte of a layout."""

RUN = Run(
    id="ab" * 16, name="", created_at=0.0, digest="0" * 32,
    tensors=[
        TensorSpec(f"model.layers.{n}.mlp.experts.down_proj.weight", (2048, 7168), "BF16")
        for n in range(TENSORS)
    ],
)  # fmt: skip


def peak_of(data):
    """The most bytes that decoding took, the outcome included."""
    tracemalloc.start()
    try:
        decode_layout(data, table=RUN, run="", key="layout.json")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def one_file(header):
    return msgspec.json.encode(SafetensorsLayout(files=[WeightFile("m.safetensors", header)]))


def test_an_honest_layout_takes_a_few_times_its_size():
    data = encode_layout(default_layout(RUN))
    peak_of(data)  # Types are prepared once.
    assert peak_of(data) < TIMES * len(data)


@pytest.mark.parametrize(
    "header",
    [
        "{" + ",".join(f'"{n}":{{}}' for n in range(20 * TENSORS)) + "}",
        '{"a":{"shape":[' + ",".join("[]" for _ in range(100_000)) + "]}}",
        '{"__metadata__":{"x":[' + ",".join("[]" for _ in range(100_000)) + "]}}",
        '{"a":[' + ",".join("[]" for _ in range(100_000)) + "]}",
    ],
    ids=["many tensors", "a long shape", "metadata", "no tensor"],
)
def test_a_hostile_layout_is_refused_before_it_takes_memory(header):
    data = one_file(header)
    with pytest.raises(CorruptError):
        decode_layout(data, table=RUN, run="", key="layout.json")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="layout"):
            decode_layout(data, table=RUN, run="", key="layout.json")
        assert tracemalloc.get_traced_memory()[1] < TIMES * len(data)
    finally:
        tracemalloc.stop()
