"""``run.json`` is believed only within its limits."""

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.run import (
    CHUNK_ELEMENTS,
    LARGEST_CHUNK,
    MAX_CHUNKS,
    MAX_CONFIG_BYTES,
    MAX_ELEMENTS,
    MAX_RUN_BYTES,
    MAX_TENSORS,
    ModelFile,
    Run,
    TensorSpec,
    chunk_for,
    decode_run,
    encode_run,
)
from deltawire.wire.seal import seal_json

HASH = "0123456789abcdef" * 4
SPECS = [TensorSpec("a.weight", (4, 5), "BF16"), TensorSpec("scale", (), "F32")]


def run(**changes):
    fields = {
        "id": "ab" * 16,
        "chunk": 1 << 30,
        "name": "tiny",
        "created_at": 1.0,
        "tensors": SPECS,
        "digest": "0" * 32,
        "model_files": [ModelFile("config.json", HASH, 10)],
        "config": {"seed": 1, "deep": {"list": [1, None]}},
    }
    return Run(**{**fields, **changes})


def decode(data):
    return decode_run(data, run="s3://b", key="run.json")


def refused(value):
    data = seal_json(value, key="k") if isinstance(value, bytes) else encode_run(value)
    with pytest.raises(CorruptError) as caught:
        decode(data)
    assert (caught.value.run, caught.value.key) == ("s3://b", "run.json")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_round_trip():
    assert decode(encode_run(run())) == run()
    assert [spec.count for spec in SPECS] == [20, 1]


def test_no_tensors_and_empty_tensors():
    for specs in ([], [TensorSpec("none", (0, MAX_ELEMENTS), "BF16")]):
        assert decode(encode_run(run(tensors=specs))).tensors == specs


def test_another_format():
    data = msgspec.json.encode(run()).replace(b'"format":1', b'"format":2', 1)
    assert "format 2" in refused(data)


def test_a_tensor_twice():
    assert "listed twice" in refused(run(tensors=[*SPECS, TensorSpec("scale", (3,), "F32")]))


@pytest.mark.parametrize(
    "shapes",
    [
        [(MAX_ELEMENTS, 2)],
        [(MAX_ELEMENTS, MAX_ELEMENTS)],
        [(MAX_ELEMENTS,) * 16],
        [(MAX_ELEMENTS,), (1,)],
        [(1 << 32, 1 << 32)],
    ],
)
def test_sizes_that_overflow(shapes):
    specs = [TensorSpec(str(number), shape, "F32") for number, shape in enumerate(shapes)]
    assert "exceeds the largest model" in refused(run(tensors=specs))


def test_the_largest_model_is_still_one():
    specs = [TensorSpec("a", ((1 << 47) - 1,), "F32"), TensorSpec("b", (), "F32")]
    assert decode(encode_run(run(tensors=specs))).tensors == specs


@pytest.mark.parametrize(
    "spec",
    [
        ("", (1,), "F32"),
        ("a" * 1025, (1,), "F32"),
        ("a", (-1,), "F32"),
        ("a", (MAX_ELEMENTS + 1,), "F32"),
        ("a", (1 << 80,), "F32"),
        ("a", (1,) * 17, "F32"),
        ("a", (1.5,), "F32"),
        ("a", (1,), "F" * 17),
    ],
)
def test_specs_outside_their_limits(spec):
    assert "not a valid run" in refused(run(tensors=[TensorSpec(*spec)]))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "n" * 65},
        {"digest": "0" * 31},
        {"digest": "0" * 32 + "\n"},
        {"model_files": [ModelFile("a", HASH + "\n", 1)]},
        {"model_files": [ModelFile("a", HASH, -1)]},
        {"model_files": [ModelFile("a" * 129, HASH, 1)]},
        {"model_files": [ModelFile("a", HASH, 1)] * 65},
        {"config": [1]},
        {"created_at": None},
    ],
)
def test_values_outside_their_limits(changes):
    plain = {**msgspec.to_builtins(run()), **msgspec.to_builtins(changes)}
    assert "not a valid run" in refused(msgspec.json.encode(plain))


def test_deep_nesting():
    deep = b"[" * 10_000 + b"]" * 10_000
    plain = msgspec.json.encode(run(config={}))
    data = plain.replace(b"{", b'{"config":{"x":%s},' % deep, 1)
    assert "nested too deeply" in refused(data)


def test_a_cut_at_any_place_is_noticed():
    data = encode_run(run())
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:length])


def test_limits_hold_before_memory_is_taken():
    """A table that fits into the limit of bytes must not become gigabytes of objects."""
    many = [TensorSpec(str(number), (), "F32") for number in range(MAX_TENSORS + 1)]
    assert "not a valid run" in refused(run(tensors=many))
    big = [TensorSpec("a", (MAX_CHUNKS + 1,), "F32")]
    assert "chunks of 1 elements" in refused(run(tensors=big, chunk=1))
    assert "config has" in refused(run(config={"a": [[]] * MAX_CONFIG_BYTES}))


@pytest.mark.parametrize("aliases", [{"scale": "a.weight"}, {"b": "c"}, {"a.weight": "a.weight"}])
def test_aliases_point_at_tensors(aliases):
    assert "alias" in refused(run(aliases=aliases))


def test_tied_names_are_kept():
    assert decode(encode_run(run(aliases={"lm_head": "a.weight"}))).aliases["lm_head"] == "a.weight"


def test_chunks_of_large_models_are_large():
    experts = {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}
    specs = [
        TensorSpec(f"model.layers.{layer}.mlp.experts.{number}.{name}_proj.weight", shape, "BF16")
        for layer in range(58)
        for number in range(256)
        for name, shape in experts.items()
    ]
    assert chunk_for([TensorSpec("a", (1 << 36,), "BF16")]) == CHUNK_ELEMENTS
    assert CHUNK_ELEMENTS < chunk_for(specs) <= LARGEST_CHUNK


def test_a_checkpoint_of_91864_tensors_is_a_run():
    """As many as DeepSeek-V3's has, with names as long as its own."""
    names = (f"model.layers.{i % 61}.mlp.experts.{i // 61}.gate_proj.weight_scale_inv"
             for i in range(91_864))  # fmt: skip
    large = run(tensors=[TensorSpec(name, (56, 16), "F32") for name in names], aliases={})
    data = encode_run(large)
    assert len(data) < MAX_RUN_BYTES
    assert len(decode(data).tensors) == 91_864
