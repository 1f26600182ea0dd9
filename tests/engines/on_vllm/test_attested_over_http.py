"""``vllm serve`` whose weights others update, with their own worker extension, asked over HTTP."""

import json
import threading
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from served import Server
from shapes import build

from deltawire.attest.engine import ask_engine, compare_settled
from deltawire.attest.sides import Side, folder_side
from deltawire.cli.main import main
from deltawire.errors import InputError

pytestmark = pytest.mark.filterwarnings("default")


def checkpoint(family, folder, seed):
    """A checkpoint of which every tensor is another one than with another seed."""
    (file,) = build(family, folder, seed=seed).glob("*.safetensors")
    held = load_file(file)
    moved = {name: one + seed / 8 if one.ndim == 1 else one for name, one in held.items()}
    save_file(moved, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, family, ranks):
    """A server on a checkpoint, and two more checkpoints of the same model."""
    folder = tmp_path_factory.mktemp("models")
    names = ("old", "new", "newer")
    folders = {one: checkpoint(family, folder / one, seed) for seed, one in enumerate(names)}
    patch = pytest.MonkeyPatch()
    patch.setenv("DELTAWIRE_ATTEST", "1")
    arguments = [
        "--worker-extension-cls", "folder_transfer.FolderWorker",
        "--weight-transfer-config", json.dumps({"backend": "folder"}),
        "--tensor-parallel-size", str(ranks),
    ]  # fmt: skip
    with Server(folders["old"], folder / "log", *arguments) as server:
        server.call("/init_weight_transfer_engine", {"init_info": {}})
        url = f"http://127.0.0.1:{server.port}"
        yield SimpleNamespace(server=server, url=url, folders=folders, folder=folder)
    patch.undo()


def look(served, name, *others):
    side = folder_side(served.folders[name])
    report = compare_settled(
        served.url, lambda: ask_engine(served.url, side), side,
        lambda: [folder_side(served.folders[one]) for one in others],
    )  # fmt: skip
    return report, {one.name: one for one in report.tensors if one.verdict != "equal"}


def update(served, name, *, without=(), between=None):
    """vLLM's own calls, the tensors in two halves."""
    file = str(next(served.folders[name].glob("*.safetensors")))
    every = [one.spec.name for one in folder_side(served.folders[name]).digests.tensors]
    half = every[: len(every) // 2]
    served.server.call("/start_weight_update", {})
    for left_out in (every[len(half) :], half):
        info = {"file": file, "without": sorted({*left_out, *without})}
        served.server.call("/update_weights", {"update_info": info})
        if between is not None:
            between()
            between = None
    served.server.call("/finish_weight_update", {})


def test_its_own_checkpoint_is_equal_by_elements_and_by_digests(served, tmp_path):
    report, odd = look(served, "old")
    assert report.equal, odd
    assert not report.untouched
    digests = folder_side(served.folders["old"]).digests
    digests.write(tmp_path)
    assert main(["attest", served.url, "--against", str(tmp_path)]) == 0
    side = Side("digests", digests)
    assert compare_settled(served.url, lambda: ask_engine(served.url, side), side).equal


def test_reloaded_weights_are_those_of_the_other_checkpoint(served):
    for name, before in (("new", "old"), ("old", "new")):
        path = str(served.folders[name])
        body = {"weights_path": path, "is_checkpoint_format": True}
        served.server.call("/collective_rpc", {"method": "reload_weights", "kwargs": body})
        report, odd = look(served, name)
        assert report.equal, odd
        report, odd = look(served, before, name)
        assert {one.cause for one in odd.values()} == {"version"}


def test_an_update_over_http_is_seen_also_if_the_look_comes_in_its_middle(served):
    found = []

    def start():
        def run():
            try:
                found.append(look(served, "new"))
            except Exception as error:
                found.append((error, {}))

        found.append(threading.Thread(target=run))
        found[0].start()
        found[0].join(1.2)  # At least one look happens before the other half.

    update(served, "new", between=start)
    found[0].join(60)
    report, odd = found[1]
    assert getattr(report, "equal", False), (report, odd)


def test_a_tensor_that_an_update_left_out_is_named(served):
    update(served, "new")
    norm = "model.norm.weight"
    update(served, "newer", without=[norm])
    _, odd = look(served, "newer", "new")
    assert list(odd) == [norm]
    assert (odd[norm].verdict, odd[norm].cause) == ("differs", "version")
    update(served, "newer")
    assert look(served, "newer")[0].equal


def test_what_no_update_has_changed_since_loading_is_listed(served):
    update(served, "old")
    report, _ = look(served, "old")
    assert report.equal
    assert not report.untouched  # All are as they were at the start: nothing was updated.
    update(served, "new", without=["model.norm.weight"])
    report, odd = look(served, "new", "old")
    assert list(odd) == ["model.norm.weight"]
    assert report.untouched == ["model.norm.weight"]
    update(served, "new")
    assert look(served, "new")[0].untouched == []


def test_two_that_ask_at_the_same_time_are_both_answered(served):
    found = []

    def ask():
        found.append(look(served, "new")[0].equal)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True, True]
    assert served.server.generate([1, 2, 3])[0]


def test_digests_of_another_model_are_one_clear_error(served):
    import numpy as np

    from deltawire.attest import digests

    other = Side("another", digests({"encoder.weight": np.zeros((4, 4), np.uint16)}))
    with pytest.raises(InputError, match="different models"):
        compare_settled(served.url, lambda: ask_engine(served.url, other), other)
    with pytest.raises(InputError, match="answers 404"):
        ask_engine(f"{served.url}/nowhere", other)
