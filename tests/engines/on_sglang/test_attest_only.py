"""SGLang as typed, whose weights its own calls change: attested over HTTP, without a run."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from server import Server
from shapes import build

from deltawire.attest import digests
from deltawire.attest.engine import ask_engine, compare_settled
from deltawire.attest.sides import Side, folder_side
from deltawire.cli.main import main
from deltawire.errors import InputError, RetryError

pytestmark = pytest.mark.filterwarnings("default")

NORM = "model.norm.weight"


class Attested(Server):
    """A server on a TCP port, with SGLang's own command."""

    def __init__(self, model, *arguments, attests="1"):
        self.folder = tempfile.TemporaryDirectory(prefix="dw-sglang-test-")
        self.log = Path(self.folder.name) / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {**os.environ, "DELTAWIRE_ATTEST": attests}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "sglang.launch_server", "--model-path", str(model),
                    "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu",
                    "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                    "--grammar-backend", "none", "--cuda-graph-backend-decode", "disabled",
                    "--cuda-graph-backend-prefill", "disabled", "--skip-tokenizer-init",
                    "--skip-server-warmup", "--max-total-tokens", "4096", "--dtype", "bfloat16",
                    "--max-running-requests", "16", "--mem-fraction-static", "0.2",
                    "--random-seed", "0", "--sleep-on-idle", "--log-level", "warning", *arguments,
                ],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip

    def call(self, path, body=None, *, method="POST"):
        request = urllib.request.Request(
            self.url + path,
            data=None if method == "GET" else json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json", "Authorization": "Bearer admin"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
        return json.loads(text) if text.strip() else None


def checkpoint(family, folder, seed, **changed):
    """A checkpoint of which every tensor is another one than with another seed."""
    (file,) = build(family, folder, seed=seed).glob("*.safetensors")
    held = load_file(file)
    moved = {name: one + seed / 8 if one.ndim == 1 else one for name, one in held.items()}
    save_file(moved | changed, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, family, arguments):
    folder = tmp_path_factory.mktemp("models")
    folders = {
        one: checkpoint(family, folder / one, seed) for seed, one in enumerate(("old", "new"))
    }
    (file,) = folders["old"].glob("*.safetensors")
    stale = {NORM: load_file(file)[NORM]}
    folders["dropped"] = checkpoint(family, folder / "dropped", 1, **stale)
    with Attested(folders["old"], "--admin-api-key", "admin", *arguments) as server:
        yield SimpleNamespace(server=server, url=server.url, folders=folders)


def look(served, name, *others):
    side = folder_side(served.folders[name])
    ask = lambda: ask_engine(served.url, side, token="admin")  # noqa: E731
    more = lambda: [folder_side(served.folders[one]) for one in others]  # noqa: E731
    report = compare_settled(served.url, ask, side, more)
    return report, {one.name: one for one in report.tensors if one.verdict != "equal"}


def update(served, name):
    body = {"model_path": str(served.folders[name]), "flush_cache": True}
    assert served.server.call("/update_weights_from_disk", body)["success"]


def test_its_own_checkpoint_is_equal_by_elements_and_by_digests(
    served, tmp_path, monkeypatch, ranks
):
    report, odd = look(served, "old")
    assert report.equal, odd
    assert not report.untouched
    side = folder_side(served.folders["old"])
    side.digests.write(tmp_path)
    monkeypatch.setenv("DELTAWIRE_TOKEN", "admin")
    assert main(["attest", served.url, "--against", str(tmp_path)]) == 0
    assert len(ask_engine(served.url, side, token="admin")) == ranks


def test_weights_that_its_own_call_loads_are_those_of_the_other_checkpoint(served):
    for name, before in (("new", "old"), ("old", "new")):
        update(served, name)
        report, odd = look(served, name)
        assert report.equal, odd
        report, odd = look(served, before, name)
        assert {one.cause for one in odd.values()} == {"version"}


def test_a_tensor_that_an_update_left_out_is_named(served):
    update(served, "old")
    update(served, "dropped")
    report, odd = look(served, "new", "old")
    assert list(odd) == [NORM]
    assert (odd[NORM].verdict, odd[NORM].cause) == ("differs", "version")
    assert report.untouched == [NORM]


def test_weights_are_not_read_while_sglang_updates_them(served):
    served.server.call("/begin_weight_update")
    with pytest.raises(RetryError, match="middle of an update"):
        look(served, "old")
    served.server.call("/end_weight_update")
    update(served, "old")
    assert look(served, "old")[0].equal


def test_its_own_weights_checker_answers_as_before(served):
    found = served.server.call("/weights_checker", {"action": "checksum"})
    assert found["success"]
    assert found["ranks"]
    with pytest.raises(urllib.error.HTTPError):
        served.server.call("/weights_checker", {"action": "deltawire"})


def test_a_wrong_token_and_another_model_get_one_clear_error(served):
    import numpy as np

    side = folder_side(served.folders["old"])
    with pytest.raises(InputError, match=r"answers 401.*right token"):
        ask_engine(served.url, side, token="wrong")
    other = Side("another", digests({"encoder.weight": np.zeros((4, 4), np.uint16)}))
    ask = lambda: ask_engine(served.url, other, token="admin")  # noqa: E731
    with pytest.raises(InputError, match="different models"):
        compare_settled(served.url, ask, other)


def test_a_server_that_does_not_attest_gets_one_clear_error(served, arguments):
    side = folder_side(served.folders["old"])
    with (
        Attested(served.folders["old"], *arguments, attests="0") as server,
        pytest.raises(InputError, match=r"answers 400.*start SGLang with DELTAWIRE_ATTEST=1"),
    ):
        ask_engine(server.url, side)
