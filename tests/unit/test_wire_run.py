"""``run.json`` is believed only within its limits."""

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.objects import encode_json
from deltawire.wire.run import MAX_ELEMENTS, ModelFile, Run, TensorSpec, decode_run

HASH = "0123456789abcdef" * 4
SPECS = [TensorSpec("a.weight", (4, 5), "BF16"), TensorSpec("scale", (), "F32")]


def run(**changes):
    fields = {
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
    data = value if isinstance(value, bytes) else encode_json(value)
    with pytest.raises(CorruptError) as caught:
        decode(data)
    assert (caught.value.run, caught.value.key) == ("s3://b", "run.json")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_round_trip():
    assert decode(encode_json(run())) == run()
    assert [spec.count for spec in SPECS] == [20, 1]


def test_no_tensors_and_empty_tensors():
    for specs in ([], [TensorSpec("none", (0, MAX_ELEMENTS), "BF16")]):
        assert decode(encode_json(run(tensors=specs))).tensors == specs


def test_another_format():
    assert "format 2" in refused(run(format=2))


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
    specs = [TensorSpec("a", (MAX_ELEMENTS - 1,), "F32"), TensorSpec("b", (), "F32")]
    assert decode(encode_json(run(tensors=specs))).tensors == specs


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
    data = encode_json(run(config={})).replace(b'"config":{}', b'"config":{"x":%s}' % deep)
    assert "nested too deeply" in refused(data)


def test_a_cut_at_any_place_is_noticed():
    data = encode_json(run()).rstrip()
    for length in range(len(data)):
        refused(data[:length])
