"""Pairs of weights: what is written is read back, and nothing else is taken for a pair."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.pairs import find_pairs, load_pair, save_pair
from benchmarks.synthetic import COLUMNS, synthetic_pair
from deltawire.errors import InputError


def two_models(seed=0):
    rng = np.random.default_rng(seed)
    old = {"a": rng.integers(0, 1 << 16, (5, 7), np.uint16), "b": np.zeros(3, np.uint16)}
    new = {name: bits.copy() for name, bits in old.items()}
    new["a"][1, 2] ^= 1
    new["a"][4, 6] ^= 0x8000
    return old, new


def test_a_pair_comes_back_bit_for_bit(tmp_path):
    old, new = two_models()
    assert save_pair(tmp_path / "x.npz", old, new) == pytest.approx(2 / 38)
    pair = load_pair(tmp_path / "x.npz")
    assert (pair.name, pair.elements, pair.bytes, pair.changed) == ("x", 38, 76, 2)
    for name, tensor in pair.tensors.items():
        assert tensor.old.dtype == tensor.new.dtype == np.uint16
        assert np.array_equal(tensor.old, old[name])
        assert np.array_equal(tensor.new, new[name])
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_the_layout_on_disk_is_the_documented_one(tmp_path):
    old, new = two_models()
    save_pair(tmp_path / "x.npz", old, new)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {
            f"{part}/{name}" for part in ("old", "idx", "new") for name in "ab"
        }
        assert archive["old/a"].dtype == archive["new/a"].dtype == np.int16
        assert archive["old/a"].shape == (5, 7)
        assert archive["idx/a"].dtype == np.uint32
        assert archive["idx/a"].tolist() == [9, 34]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("idx/a", np.array([9, 35], np.uint32), "outside"),
        ("idx/a", np.array([9], np.uint32), "positions"),
        ("idx/a", np.array([9, 34], np.int64), "dtypes"),
        ("old/a", np.zeros((5, 7), np.float32), "dtypes"),
        ("idx/a", None, "idx/a"),
        ("old/a", np.array([object()]), "pickle"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path, key, value, says):
    old, new = two_models()
    path = tmp_path / "x.npz"
    save_pair(path, old, new)
    with np.load(path) as archive:
        arrays = dict(archive)
    if value is None:
        del arrays[key]
    else:
        arrays[key] = value
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=says):
        load_pair(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a pair"):
        load_pair(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", other=np.zeros(3))
    with pytest.raises(InputError, match="no pair"):
        load_pair(tmp_path / "y.npz")


def test_places_are_files_and_folders(tmp_path):
    for name in ("b.npz", "a.npz", "c.part.npz", "d.txt"):
        (tmp_path / name).touch()
    found = find_pairs([str(tmp_path / "b.npz"), str(tmp_path)])
    assert [path.name for path in found] == ["b.npz", "a.npz", "b.npz"]
    with pytest.raises(InputError, match="no file or folder"):
        find_pairs([str(tmp_path / "z.npz")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.npz files"):
        find_pairs([str(tmp_path / "empty")])


@pytest.mark.parametrize("density", [0.003, 0.03, 0.3])
def test_synthetic_weights_change_as_often_as_asked(density):
    pair = synthetic_pair(3 << 20, density)
    assert pair.elements == 3 << 20
    assert pair.changed / pair.elements == pytest.approx(density, rel=0.03)
    assert pair.tensors["weight"].old.shape == (3 << 8, COLUMNS)


def test_synthetic_weights_depend_only_on_their_arguments():
    first, again, other = (synthetic_pair(5000, 0.02, seed=seed) for seed in (3, 3, 4))
    left, right = first.tensors["weight"], again.tensors["weight"]
    assert np.array_equal(left.old, right.old)
    assert np.array_equal(left.new, right.new)
    assert not np.array_equal(left.old, other.tensors["weight"].old)


def test_a_synthetic_step_moves_small_weights_more_often():
    """The law that real steps follow: about twice as often for every smaller exponent."""
    tensor = synthetic_pair(4 << 20, 0.02).tensors["weight"]
    exponents = (tensor.old.reshape(-1) >> 7) & 0xFF
    changed = (tensor.old != tensor.new).reshape(-1)
    shares = [changed[exponents == exponent].mean() for exponent in (121, 120, 119, 118)]
    for larger, smaller in pairwise(shares):
        assert 1.5 < smaller / larger < 2.5


def test_synthetic_rounding_is_torchs():
    torch = pytest.importorskip("torch")
    from benchmarks.synthetic import _round

    values = np.random.default_rng(0).standard_normal(100_000, np.float32)
    values[:4] = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0], np.uint32).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(_round(values), expected.view(np.uint16))


@pytest.mark.parametrize(("elements", "density"), [(0, 0.1), (1 << 31, 0.1), (8, 0.0), (8, 0.6)])
def test_impossible_synthetic_weights_are_refused(elements, density):
    with pytest.raises(InputError):
        synthetic_pair(elements, density)
