"""Verdicts on each tensor, and the names of the causes, with elements on either side or neither."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltawire.attest import causes, digests
from deltawire.attest.causes import CAUSES
from deltawire.attest.engine import compare_engine
from deltawire.attest.places import Place
from deltawire.attest.sides import Side, folder_side
from deltawire.attest.statement import Digests, TensorDigest
from deltawire.attest.verdicts import compare
from deltawire.cli import attest
from deltawire.cli.main import main
from deltawire.codec.reference import digest_bits_reference
from deltawire.engines.live_parts import LivePart, RankParts
from deltawire.errors import InputError, RetryError
from deltawire.launch import attest as launched
from deltawire.runtime.trusted import ReaderTrust
from deltawire.store import open_bucket
from deltawire.sync import open_publisher


def model(seed=0):
    drawn = np.random.default_rng(seed)
    shapes = {
        "q.weight": (8, 8), "k.weight": (8, 8), "up.weight": (12, 8),
        "experts.weight": (3, 4, 6), "up.weight_scale": (12,), "norm": (5,),
    }  # fmt: skip
    return {name: drawn.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def side(tensors, name="found", elements=True):
    flat = {key: one.reshape(-1).view(np.uint32) for key, one in tensors.items()}
    return Side(name, digests(tensors), flat.__getitem__ if elements else None)


def verdicts(found, reference=None, *, others=(), found_elements=False, elements=True):
    reference = model() if reference is None else reference
    report = compare(
        side(found, elements=found_elements),
        side(reference, "the reference", elements=elements),
        lambda: [side(one, name) for name, one in others],
    )
    return report, {one.name: one for one in report.tensors if one.verdict != "equal"}


def changed(**tensors):
    return model() | {name.replace("_weight", ".weight"): one for name, one in tensors.items()}


def contiguous(array):
    return np.ascontiguousarray(array)


Q, K, UP, EXPERTS = (model()[f"{name}.weight"] for name in ("q", "k", "up", "experts"))
WHOLE = {
    "zeros": ("zeros", changed(up_weight=np.zeros_like(UP))),
    "transposed": ("transposed", changed(q_weight=contiguous(Q.T))),
    "transposed in another shape": ("transposed", changed(up_weight=contiguous(UP.T))),
    "transposed in its own shape": (
        "transposed",
        changed(up_weight=contiguous(UP.T).reshape(UP.shape)),
    ),
    "experts transposed": (
        "transposed",
        changed(experts_weight=contiguous(np.swapaxes(EXPERTS, 1, 2)).reshape(EXPERTS.shape)),
    ),
    "scaled twice": ("scaled", changed(q_weight=Q * np.float32(2))),
    "turned over": ("scaled", changed(q_weight=-Q)),
    "exchanged": ("exchanged", changed(q_weight=K, k_weight=Q)),
    "a copy of another": ("tensor", changed(q_weight=K)),
    "experts of the next rank": ("rank", changed(experts_weight=np.roll(EXPERTS, -1, 0))),
    "columns of the other rank": ("rank", changed(up_weight=np.roll(UP, 4, 1))),
}


@pytest.mark.parametrize("elements_at", ["reference", "found"])
@pytest.mark.parametrize("case", WHOLE)
def test_a_cause_is_named_from_the_elements_of_one_side(case, elements_at):
    cause, found = WHOLE[case]
    at_found = elements_at == "found"
    report, odd = verdicts(found, found_elements=at_found, elements=not at_found)
    assert {one.cause for one in odd.values()} == {cause}
    assert all(one.verdict == "differs" and one.text for one in odd.values())
    assert report.differs
    assert not report.equal
    assert cause in CAUSES


def test_rank_zeros_rows_on_every_rank_are_named():
    _, odd = verdicts(changed(up_weight=contiguous(np.tile(UP[:4], (3, 1)))))
    assert odd["up.weight"].text == "each of 3 ranks has the rows of rank 0"


def test_a_range_of_rows_is_named_from_one_digest():
    earlier = model(1)
    mixed, cleared, single = UP.copy(), UP.copy(), UP.copy()
    mixed[3:7] = earlier["up.weight"][3:7]
    cleared[5:8] = 0
    single[11] = earlier["up.weight"][11]
    others = [("version 6", earlier)]
    for found, cause, rows, text in (
        (mixed, "version", (3, 7), "rows 3 to 6 are those of version 6"),
        (cleared, "zeros", (5, 8), "rows 5 to 7 are zero"),
        (single, "version", (11, 12), "row 11 are those of version 6"),
    ):
        _, odd = verdicts(changed(up_weight=found), others=others)
        one = odd["up.weight"]
        assert (one.cause, one.rows, one.text) == (cause, rows, text)


def test_another_version_and_stale_scales_need_no_elements():
    earlier = model(1)
    others = [("version 6", earlier)]
    for elements in (True, False):
        _, odd = verdicts(earlier, others=others, elements=elements)
        assert {one.cause for one in odd.values()} == {"version"}
        found = model() | {"up.weight_scale": earlier["up.weight_scale"]}
        _, odd = verdicts(found, others=others, elements=elements)
        assert odd.keys() == {"up.weight_scale"}
        assert odd["up.weight_scale"].cause == "scales"


def test_without_elements_it_says_what_was_not_tried():
    report, odd = verdicts(WHOLE["transposed"][1], elements=False)
    assert odd["q.weight"].cause == ""
    assert any("neither side has elements" in note for note in report.notes)
    assert not verdicts(model(), elements=False)[0].notes


def test_a_difference_without_a_cause_is_counted_not_guessed():
    found = Q.copy()
    found[0, 0] += 1
    found[7, 7] += 1
    _, odd = verdicts(changed(q_weight=found), found_elements=True)
    assert (odd["q.weight"].cause, odd["q.weight"].changed) == ("", 2)


def test_a_missing_tensor_another_dtype_and_more_tensors():
    found = model()
    del found["norm"]
    found["q.weight"] = Q.astype(np.float16)
    found["more"] = Q
    report, odd = verdicts(found)
    assert {name: one.verdict for name, one in odd.items()} == {
        "norm": "not readable", "q.weight": "not readable",
    }  # fmt: skip
    assert report.unexpected == ["more"]
    assert not report.equal
    assert not report.differs


def tied(untie=False):
    weight = Q.copy()
    return {"embed": weight, "head": weight.copy() + 1 if untie else weight}


def test_tied_tensors():
    assert verdicts(tied(), tied())[0].equal
    report, odd = verdicts({"embed": Q, "head": Q.copy()}, tied(), found_elements=True)
    assert report.equal
    _, odd = verdicts(tied(untie=True), tied(), found_elements=True)
    assert (odd["head"].verdict, odd["head"].cause) == ("differs", "untied")
    report, odd = verdicts(tied(untie=True), tied(), elements=False)
    assert odd["head"].verdict == "not readable"
    assert not report.equal


def stated(elements):
    """A side of digests that states this many elements of ``w``."""
    one = TensorDigest("w", (elements,), "F32", "1" * 32)
    return Side("stated", Digests(digest="1" * 32, tensors=[one]))


def test_a_size_that_is_only_stated_takes_no_memory(monkeypatch):
    asked = []
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda *given: asked.append(given[0]) or zeros(*given))
    report = compare(stated(1 << 46), side({"w": Q.reshape(-1)}, elements=False))
    assert report.counts["differs"] == 1
    assert not asked
    ranks = [RankParts(rank=0, parts=[LivePart(0, 0, (4,), (1,), "0" * 32)])]
    report = compare_engine("engine", ranks, stated(1 << 46))
    assert report.counts["not readable"] == 1
    assert not asked


def test_zeros_are_digested_in_parts(monkeypatch):
    monkeypatch.setattr(causes, "CHUNK_ELEMENTS", 30)
    _, odd = verdicts(changed(q_weight=np.zeros_like(Q)), elements=False)
    assert odd["q.weight"].cause == "zeros"


def test_places_are_parts_of_the_digest():
    bits = np.arange(60, dtype=np.uint16)
    place = Place(7, (2, 3, 2), (20, 5, 1))
    taken = place.take(bits)
    assert taken.tolist() == [7, 8, 12, 13, 17, 18, 27, 28, 32, 33, 37, 38]
    rest = np.setdiff1d(bits, taken)
    held = [digest_bits_reference("w", bits[at : at + 1], int(at)) for at in rest]
    total = sum(held, place.digest("w", taken))
    assert total == digest_bits_reference("w", bits)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").mkdir()
    publisher = open_publisher(open_bucket("bucket", create=True), model(1))
    publisher.publish(model(2))
    publisher.publish(model())
    publisher.close()
    save_file(model(), "engine/model.safetensors")
    assert main(["attest", "engine", "--against", "bucket@2"]) == 0
    assert "6 equal" in capsys.readouterr().out
    digests("engine").write("engine.json")
    assert main(["attest", "engine.json", "--against", "bucket"]) == 0
    save_file(model(2) | {"norm": model(1)["norm"]}, "engine/model.safetensors")
    capsys.readouterr()
    assert main(["attest", "engine", "--against", "bucket@2", "--json"]) == 5
    answer = json.loads(capsys.readouterr().out)
    texts = {one["name"]: one["text"] for one in answer["tensors"]}
    assert texts.pop("norm") == "these are the weights of version 0"
    assert set(texts.values()) == {"these are the weights of version 1"}
    save_file({"norm": model()["norm"]}, "engine/model.safetensors")
    assert main(["attest", "engine", "--against", "engine.json"]) == 11
    assert main(["attest", "engine", "--against", "engine.json", "--also", "bucket@1"]) == 11
    assert "does not have it" in capsys.readouterr().out


def test_a_watch_goes_on_after_a_failed_look_and_loads_the_reference_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with open_publisher(open_bucket("bucket", create=True), model(1)) as publisher:
        publisher.publish(model(), wait=True)
    found, loaded = digests(model()), []
    found.write("engine.json")
    load = launched.version_side
    monkeypatch.setattr(
        launched, "version_side", lambda *given: loaded.append(given[2]) or load(*given)
    )

    def unreachable(*_, **__):
        raise RetryError("the store does not answer")

    def steps():
        Path("engine.json").write_bytes(found.encode()[:-9])
        yield
        found.write("engine.json")
        monkeypatch.setattr(launched, "open_version", unreachable)
        yield
        monkeypatch.setattr(launched, "open_version", open_version)
        yield
        assert loaded == [1]
        with open_publisher(open_bucket("bucket"), model()) as publisher:
            publisher.publish(model(2), wait=True)
        yield

    sleeping = steps()

    def sleep(_):
        if next(sleeping, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(attest, "time", SimpleNamespace(sleep=sleep))
    open_version = launched.open_version
    assert main(["attest", "engine.json", "--against", "bucket", "--watch", "9"]) == 5
    shown = capsys.readouterr()
    assert loaded[:2] == [1, 2]  # The others explain the difference.
    assert shown.out.count("against version") == 2
    assert shown.err.count("\n") == 2
    assert "seal" in shown.err
    assert "the store does not answer" in shown.err


def test_a_reference_that_is_read_again(tmp_path):
    trust = ReaderTrust()
    save_file({"a": Q}, tmp_path / "model.safetensors")
    folder = launched.KeptReference(str(tmp_path), trust)
    assert folder.side() is folder.side()
    file = launched.KeptReference(str(tmp_path / "digests.json"), trust)
    for tensors in ({"a": Q}, {"a": K}):
        digests(tensors).write(tmp_path)
        assert file.side().digests == digests(tensors)


class Counted(list):
    """A list that counts how many of its elements are looked at, of all lists together."""

    seen, most = 0, 0

    def __iter__(self):
        for tensor in super().__iter__():
            Counted.seen += 1
            assert Counted.seen < Counted.most
            yield tensor

    def __contains__(self, name):
        return any(name == element for element in self)


@pytest.mark.parametrize("differing", [False, True])
def test_the_work_is_in_proportion_to_the_tensors(differing, monkeypatch):
    count = 20_000
    monkeypatch.setattr(Counted, "seen", 0)
    monkeypatch.setattr(Counted, "most", 8 * count)

    def stated_side(digit):
        tensors = [
            TensorDigest(f"layer.{number}", (number % 97 + 1,), "F32", digit * 32)
            for number in range(count)
        ]
        disagree = Counted(f"layer.{number}" for number in range(1, count, 2))
        found = Digests(digest=digit * 32, tensors=Counted(tensors), copies_disagree=disagree)
        return Side("stated", found)

    monkeypatch.setattr(causes, "MAX_ALIKE", 4)
    report = compare(stated_side("2" if differing else "1"), stated_side("1"))
    assert report.counts["differs" if differing else "equal"] == count // 2
    assert report.counts["copies disagree"] == count // 2


def test_what_cannot_be_compared_gets_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({"a": Q}, "model.safetensors")
    with pytest.raises(InputError, match="different models"):
        compare(folder_side(tmp_path), side(model()))
    (tmp_path / "digests.json").write_bytes(digests({"a": Q}).encode()[:-9])
    for found, against, text in (
        ("nowhere", ".", "no folder of safetensors files"),
        (".", "http://127.0.0.1:1/x", "does not answer"),
        (".", "digests.json", "seal"),
    ):
        assert main(["attest", found, "--against", against]) in (2, 3, 75)
        errors = capsys.readouterr().err
        assert text in errors
        assert len(errors.strip().splitlines()) == 1
