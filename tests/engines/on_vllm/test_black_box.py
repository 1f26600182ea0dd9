"""``deltawire attest --black-box`` on ``vllm serve`` with a pretrained model."""

import json
import shutil
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from served import Server

from benchmarks.attest.scores import MODEL, version
from deltawire.cli.main import main
from deltawire.launch.black_box.endpoint import HttpEndpoint

pytestmark = pytest.mark.filterwarnings("default")

RATES = {"small": 1e-5, "large": 1e-4}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server on the model as it is, and two versions after steps of different sizes."""
    if not (MODEL / "model.safetensors").is_file():
        pytest.skip("make real-model downloads the model")
    folder = tmp_path_factory.mktemp("models")
    folders = {"old": MODEL}
    for name, rate in RATES.items():
        folders[name] = folder / name
        shutil.copytree(MODEL, folders[name])
        version(rate)[0].bfloat16().save_pretrained(folders[name])
    patch = pytest.MonkeyPatch()
    patch.setenv("DELTAWIRE_ATTEST", "1")  # Or weights cannot be reloaded on a CPU.
    memory = str(512 << 20)  # For all prompts of a look, which come again in the next one.
    arguments = ["--kv-cache-memory-bytes", memory]
    with Server(MODEL, folder / "log", *arguments, tokenizer=True) as server:
        url = f"http://127.0.0.1:{server.port}"
        yield SimpleNamespace(server=server, url=url, folders=folders)
    patch.undo()


@pytest.fixture
def look(served, monkeypatch, capsys):
    """Looks as the command does; prints what it took."""
    requests = Counter()
    ask = HttpEndpoint._ask

    def counted(self, path, body, kind):
        requests[path] += 1
        return ask(self, path, body, kind)

    monkeypatch.setattr(HttpEndpoint, "_ask", counted)

    def run(against, *also, code):
        requests.clear()
        began = time.monotonic()
        more = [word for one in also for word in ("--also", str(served.folders[one]))]
        command = ["attest", served.url, "--against", str(served.folders[against]), *more]
        assert main([*command, "--black-box", "--json"]) == code
        report = json.loads(capsys.readouterr().out)
        # Tokens are drawn after a sequence again while the cache is undecided.
        assert 2 * report["sequences"] <= requests["/v1/completions"] <= report["sequences"] + 96
        took = {"requests": sum(requests.values()), "seconds": round(time.monotonic() - began)}
        with capsys.disabled():
            sys.stdout.write(
                json.dumps({"against": against, "also": also, **took, **report}) + "\n"
            )
        return report

    return run


def test_an_honest_endpoint_is_the_same(look, served):
    report = look("old", code=0)
    assert report["verdict"] == "same"
    assert look("old", "small", code=0)["fits"] == str(served.folders["old"])


def test_another_version_is_different(look, served):
    assert look("large", code=5)["verdict"] == "different"
    report = look("small", "old", code=5)
    assert (report["cause"], report["fits"]) == ("version", str(served.folders["old"]))


def test_a_prefix_cache_of_old_weights_is_seen(look, served):
    """Earlier looks left the prompts in the cache, and a reload does not empty it."""
    body = {"weights_path": str(served.folders["large"]), "is_checkpoint_format": True}
    served.server.call("/collective_rpc", {"method": "reload_weights", "kwargs": body})
    report = look("large", code=5)
    assert (report["verdict"], report["cause"]) == ("different", "prefix cache")
    served.server.call("/reset_prefix_cache", {})
    report = look("large", code=0)
    assert report["verdict"] == "same"
