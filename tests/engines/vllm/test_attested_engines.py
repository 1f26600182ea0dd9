"""Engines that others feed, read rank by rank: each planted fault is named, honest ones are equal.

The engines are modules with fused, sliced and stacked weights; `on_vllm/test_attest_only.py` asks
vLLM itself.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from loaders import Sharded, live_of
from safetensors.numpy import save_file
from versions import checkpoint, first_version, next_version

from deltawire import codec
from deltawire.attest import digests, engine
from deltawire.attest.combining import described, total_of
from deltawire.attest.engine import ask_engine, compare_engine
from deltawire.attest.sides import Side
from deltawire.cli import attest
from deltawire.cli.main import main
from deltawire.engines.following import parameter_sums as sums
from deltawire.engines.following.parameter_sums import parameter_sums, record_changes
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import METHOD, AttestRequest, EngineParts
from deltawire.engines.vllm.attesting import AttestWorker, OnInstances
from deltawire.errors import CorruptError, InputError, RetryError

KINDS = {"dense": {}, "untied": {"tied": False}, "experts": {"experts": True},
         "expert parallel": {"experts": True, "ep": True}}  # fmt: skip


class Fleet:
    """The ranks of an engine that loaded version 1 of random weights by its own loader."""

    def __init__(self, kind, ranks, dtype=torch.bfloat16):
        options = KINDS[kind]
        self.specs = Sharded.table(**{k: v for k, v in options.items() if k != "ep"})
        self.old = first_version(self.specs, np.random.default_rng(3))
        self.new, _ = next_version(self.old, self.specs, np.random.default_rng(4), density=0.5)
        torch.manual_seed(7)
        self.modules = [Sharded(rank, ranks, dtype=dtype, **options) for rank in range(ranks)]
        for module in self.modules:
            module.__dict__["_deltawire_changes"] = {}  # The hook in vLLM records it.
        self.load(self.new)

    def load(self, version, names=None):
        for module in self.modules:
            module.load_weights(
                (n, t) for n, t in checkpoint(version, self.specs) if names is None or n in names
            )

    def side(self, version=None, name="the trainer", elements=True):
        held = (self.new if version is None else version).tensors
        found = total_of(described(s, codec.digest_bits(s.name, held[s.name])) for s in self.specs)
        return Side(name, found, held.__getitem__ if elements else None)

    def answers(self, reference):
        request = engine.request_of(reference)
        return [answer_of(one, request, rank) for rank, one in enumerate(self.modules)]

    def report(self, reference=None, others=()):
        reference = reference or self.side()
        found = self.answers(reference)
        assert not [one.failure for one in found if one.failure]
        report = compare_engine("the engine", found, reference, lambda: others)
        return report, {one.name: one for one in report.tensors if one.verdict != "equal"}


@pytest.mark.parametrize(
    ("kind", "ranks", "elements"),
    [
        ("dense", 1, True),
        ("dense", 2, False),
        ("dense", 4, True),
        ("untied", 2, True),
        ("experts", 2, True),
        ("experts", 2, False),
        ("expert parallel", 4, False),
    ],
)
def test_an_honest_engine_is_equal_and_another_version_is_not(kind, ranks, elements):
    fleet = Fleet(kind, ranks)
    before = [live.clone() for one in fleet.modules for live in live_of(one).values()]
    report, odd = fleet.report(fleet.side(elements=elements))
    assert report.equal, odd
    after = [live for one in fleet.modules for live in live_of(one).values()]
    assert all(map(torch.equal, [b.view(torch.uint8) for b in before],
                   [a.view(torch.uint8) for a in after]))  # fmt: skip
    report, odd = fleet.report(fleet.side(fleet.old, elements=elements))
    assert report.differs
    assert len(odd) == len(fleet.specs)
    report, odd = fleet.report(
        fleet.side(fleet.old, elements=elements), [fleet.side(name="version 1")]
    )
    assert {one.cause for one in odd.values()} == {"version"}


def test_bf16_that_is_served_as_float32_is_read_back():
    fleet = Fleet("dense", 2, torch.float32)
    assert fleet.report()[0].equal
    fleet.modules[1].norm.data.view(torch.int32)[0] ^= 1  # No bf16 value gives these bits.
    _, odd = fleet.report()
    assert (odd["norm"].verdict, odd["norm"].ranks) == ("copies disagree", [1])


def test_one_element_of_a_copy_is_found_on_its_rank():
    """A sum that counts each element once misses it."""
    for elements in (True, False):
        fleet = Fleet("dense", 2)
        fleet.modules[1].norm.data.view(torch.int16)[3] ^= 1
        report, odd = fleet.report(fleet.side(elements=elements))
        assert odd.keys() == {"norm"}
        assert (odd["norm"].verdict, odd["norm"].ranks) == ("copies disagree", [1])
        assert report.differs


def test_a_dropped_tensor_is_of_the_version_before():
    fleet = Fleet("dense", 2)
    fleet.load(fleet.old, {"down"})
    _, odd = fleet.report(others=[fleet.side(fleet.old, "version 0")])
    assert odd.keys() == {"down"}
    assert (odd["down"].cause, odd["down"].text) == (
        "version", "these are the weights of version 0",
    )  # fmt: skip


def test_zeros_and_the_last_version_on_one_rank_are_named_with_the_rank():
    fleet = Fleet("dense", 2)
    fleet.modules[1].down.data.zero_()
    _, odd = fleet.report()
    assert (odd["down"].cause, odd["down"].ranks) == ("zeros", [1])
    fleet = Fleet("dense", 2)
    fleet.modules[0].load_weights(
        (n, t) for n, t in checkpoint(fleet.old, fleet.specs) if n == "gate"
    )
    _, odd = fleet.report(others=[fleet.side(fleet.old, "version 0")])
    assert odd.keys() == {"gate"}
    assert (odd["gate"].cause, odd["gate"].ranks) == ("version", [0])


def test_another_ranks_shard_is_named():
    fleet = Fleet("dense", 2)
    fleet.modules[1].out.data.copy_(fleet.modules[0].out.data)
    _, odd = fleet.report()
    assert (odd["out"].cause, odd["out"].ranks) == ("rank", [1])


def test_exchanged_tensors_and_a_transposed_expert_are_named():
    fleet = Fleet("experts", 1)
    (module,) = fleet.modules
    inter = module.INTER
    first = module.w13.data[0].clone()
    module.w13.data[0, :inter], module.w13.data[0, inter:] = first[inter:], first[:inter]
    turned = module.w2.data[2].t().contiguous().reshape(module.w2.data[2].shape)
    module.w2.data[2].copy_(turned)
    _, odd = fleet.report()
    assert {name: one.cause for name, one in odd.items()} == {
        "experts.0.gate": "exchanged", "experts.0.up": "exchanged",
        "experts.2.down": "transposed",
    }  # fmt: skip


def test_what_cannot_be_read_is_never_equal():
    fleet = Fleet("dense", 1)
    changes = fleet.modules[0].__dict__["_deltawire_changes"]
    changes["out"] = "holds different bits, or in a different order"
    report, odd = fleet.report()
    assert odd.keys() == {"out"}
    assert odd["out"].verdict == "not readable"
    assert "different order" in odd["out"].text
    assert not report.equal
    assert not report.differs
    del fleet.modules[0].__dict__["_deltawire_changes"]
    report, odd = fleet.report()
    assert len(odd) == len(fleet.specs)
    assert "not observed" in odd["out"].text


def test_a_tensor_that_no_rank_holds_and_a_parameter_that_no_digest_reads():
    fleet = Fleet("dense", 2)
    reference = fleet.side()
    report = compare_engine("the engine", fleet.answers(reference)[:1], reference)
    odd = {one.name: one for one in report.tensors if one.verdict != "equal"}
    assert odd["gate"].verdict == "not readable"
    assert "only a part" in odd["gate"].text
    for module in fleet.modules:
        module.head_of_draft = torch.nn.Parameter(torch.zeros(3))
    report, odd = fleet.report()
    assert not odd
    assert report.uncovered == ["head_of_draft"]


@pytest.mark.parametrize(
    ("error", "verdicts"), [(ValueError("computed"), ["not readable"]), (KeyError("gate"), [])]
)
def test_the_copy_of_a_draft_does_not_stand_for_that_of_the_model(error, verdicts):
    model, draft = (Fleet("dense", 1) for _ in range(2))
    reference, loader = model.side(), model.modules[0].load_weights

    def stop_at_gate(weights):
        for name, tensor in weights:
            if name == "gate":
                raise error
            yield name, tensor

    model.modules[0].__dict__["load_weights"] = lambda weights: loader(stop_at_gate(weights))
    request = msgspec.json.encode(AttestRequest([s.spec for s in reference.digests.tensors]))
    answer = answer_of(
        model.modules[0], request.decode(), 0, draft=draft.modules[0], one_checkpoint=True
    )
    report = compare_engine("the engine", [answer], reference)
    assert [t.verdict for t in report.tensors if t.name == "gate" and t.verdict != "equal"] == (
        verdicts
    )


@pytest.fixture
def server(request):
    """A server that answers as vLLM's does; what it answers is set on it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, data = self.server.respond(body, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_over_http(server, tmp_path, capsys, monkeypatch):
    fleet = Fleet("dense", 2)
    reference = fleet.side()
    reference.digests.write(tmp_path)
    told = []

    def respond(body, token):
        told.append((body["method"], token))
        answers = [answer_of(one, body["args"][0], rank) for rank, one in enumerate(fleet.modules)]
        return 200, msgspec.json.encode(EngineParts(answers))

    server.respond = respond
    monkeypatch.setenv("DELTAWIRE_TOKEN", "secret")
    command = ["attest", server.url, "--against", str(tmp_path)]
    assert main(command) == 0
    assert told == [(METHOD, "Bearer secret")]
    assert f"{len(fleet.specs)} equal" in capsys.readouterr().out
    fleet.modules[1].norm.data.view(torch.int16)[0] ^= 1
    assert main([*command, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["counts"]["copies disagree"] == 1


@pytest.mark.parametrize(
    ("status", "data", "kind", "text"),
    [
        (404, b"", InputError, "answers 404.*DELTAWIRE_ATTEST=1"),
        (500, b"", InputError, "answers 500.*DELTAWIRE_ATTEST=1"),  # No such method of the workers.
        (200, b"not json", CorruptError, "cannot be read"),
        (200, b'{"results":[]}', CorruptError, "cannot be read"),
        (200, b'{"results":[{"failure":"no loader","rank":1}]}', InputError, "rank 1 .* no loader"),
    ],
)
def test_a_server_that_does_not_attest_gets_one_clear_error(server, status, data, kind, text):
    server.respond = lambda *_: (status, data)
    with pytest.raises(kind, match=text):
        ask_engine(server.url, Fleet("dense", 1).side())


def test_a_reference_of_another_model_is_one_clear_error():
    fleet = Fleet("dense", 2)
    other = {"encoder.weight": np.zeros((4, 4), np.uint16)}
    with pytest.raises(InputError, match=r"different models: .* no tensor named 'encoder\.weight'"):
        fleet.report(Side("another", digests(other)))


def test_a_truncated_file_of_weights_is_one_clear_error(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones((8, 8), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["attest", str(tmp_path), "--against", str(tmp_path)]) in (2, 3)
    assert str(path) in capsys.readouterr().err


def test_a_watch_goes_on_after_a_temporary_refusal(server, tmp_path, capsys, monkeypatch):
    fleet = Fleet("dense", 1)
    fleet.side().digests.write(tmp_path)
    statuses = iter((200, 503, 200))

    def respond(body, _):
        answer = answer_of(fleet.modules[0], body["args"][0], 0)
        return next(statuses, 200), msgspec.json.encode(EngineParts([answer]))

    def sleep(_):
        nonlocal looks
        looks -= 1
        if looks == 1:  # The engine refused once; it holds other bits from now on.
            fleet.modules[0].norm.data.view(torch.int16)[0] ^= 1
        if not looks:
            raise KeyboardInterrupt

    looks, server.respond = 3, respond
    monkeypatch.setattr(attest, "time", SimpleNamespace(sleep=sleep))
    assert main(["attest", server.url, "--against", str(tmp_path), "--watch", "9"]) == 5
    shown = capsys.readouterr()
    assert "refuses for the moment: it answers 503" in shown.err
    assert "1 differs" in shown.out


def test_an_answer_about_elements_outside_of_a_tensor_is_refused():
    fleet = Fleet("dense", 1)
    reference = fleet.side()
    (answer,) = fleet.answers(reference)
    for change in (
        {"start": 10_000},
        {"tensor": 99},
        {"strides": (1, 1, 1)},
        {"shape": (9999,) * 2},
    ):
        part = msgspec.structs.replace(answer.parts[0], **change)
        odd = msgspec.structs.replace(answer, parts=[part])
        with pytest.raises(CorruptError):
            compare_engine("the engine", [odd], reference)


def test_what_no_update_has_changed_since_loading_is_listed():
    fleet = Fleet("dense", 2)
    for module in fleet.modules:
        record_changes(module, parameter_sums(module))  # The hook in vLLM does, at the start.
    reference = fleet.side()
    assert fleet.report(reference)[0].untouched == []
    names = [spec.name for spec in fleet.specs]
    fleet.load(fleet.old, [name for name in names if name != "norm"])
    for module in fleet.modules:
        record_changes(module, parameter_sums(module))  # And at each reload.
    report, odd = fleet.report(fleet.side(fleet.old), [reference])
    assert odd.keys() == {"norm"}
    assert report.untouched == ["norm"]
    fleet.load(fleet.old, ["norm"])
    assert fleet.report(fleet.side(fleet.old))[0].untouched == []


def test_what_changed_since_loading_takes_no_second_pass(monkeypatch):
    """Only the first look at weights that are as loaded sums them once more. The embedding of the
    last rank has rows of padding, which no digest covers, so it is summed while it is as loaded."""
    fleet = Fleet("experts", 2)
    for module in fleet.modules:
        record_changes(module, parameter_sums(module))
    summed = []
    original = sums._sum_of
    monkeypatch.setattr(sums, "_sum_of", lambda held: summed.append(held) or original(held))
    fleet.report()
    every = [h for m in fleet.modules for _, h in m.named_parameters(remove_duplicate=False)]
    assert len(summed) == len(every)
    summed.clear()
    assert not any(one.updated for one in fleet.answers(fleet.side()))
    padded = fleet.modules[1].embed
    assert {one.data_ptr() for one in summed} == {padded.data_ptr()}
    summed.clear()
    names = [spec.name for spec in fleet.specs]
    fleet.load(fleet.old, [name for name in names if name != "norm"])
    assert fleet.report(fleet.side(fleet.old))[0].untouched == ["norm"]
    assert not summed
    fleet.load(fleet.old, ["norm"])
    assert fleet.report(fleet.side(fleet.old))[0].untouched == []
    fleet.load(fleet.new)
    answers = fleet.answers(fleet.side())
    assert not any(one.updated for one in answers)
    assert {one.data_ptr() for one in summed} == {padded.data_ptr()}


def test_an_engine_in_the_middle_of_an_update_is_asked_again(monkeypatch):
    """Layer by layer, vLLM takes the memory of parameters away and gives it back."""
    monkeypatch.setattr(engine, "PAUSE_S", 0.0)
    fleet = Fleet("dense", 1)
    reference = fleet.side()
    kept = fleet.modules[0].norm
    fleet.modules[0].norm = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
    looks = []

    def ask(after):
        looks.append(after)
        if len(looks) == after:
            fleet.modules[0].norm = kept
        return engine.ranks_of(msgspec.to_builtins(fleet.answers(reference)), "the engine")

    assert engine.compare_settled("the engine", lambda: ask(3), reference).equal
    assert len(looks) == 3
    fleet.modules[0].norm = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
    with pytest.raises(RetryError, match="in the middle of an update"):
        engine.compare_settled("the engine", lambda: ask(99), reference)
    assert len(looks) == 3 + engine.LOOKS


def test_a_verdict_stands_if_its_cause_cannot_be_looked_for():
    """Such as when the files of the reference were replaced meanwhile."""

    def gone(_):
        raise OSError("the file was replaced")

    fleet = Fleet("dense", 2)
    honest = Side("the trainer", fleet.side().digests, gone)
    assert fleet.report(honest)[0].equal
    other = Side("the trainer", fleet.side(fleet.old).digests, gone)
    report, odd = fleet.report(other)
    assert report.differs
    assert {one.verdict for one in odd.values()} == {"differs"}
    assert any("no cause was looked for: OSError" in note for note in report.notes)
    report = compare_engine("e", fleet.answers(other), fleet.side(fleet.old), lambda: gone(0))
    assert report.differs


def test_bits_that_no_published_value_gives_are_said_to_be_such():
    fleet = Fleet("dense", 1, torch.float32)
    fleet.modules[0].norm.data.view(torch.int32)[0] ^= 1
    _, odd = fleet.report(fleet.side(elements=False))
    assert "none that a published value gives" in odd["norm"].text


def test_vllm_takes_the_extension_where_the_plugin_attests_already():
    """vLLM's rule (`WorkerWrapperBase.init_worker`): the worker class may not have an attribute
    of the extension class yet."""

    class Base:
        deltawire_live_digests = OnInstances(lambda self, request: (self, request))

    class Worker(Base):
        pass

    shown = [name for name in dir(AttestWorker) if not name.startswith("__")]
    assert shown == [METHOD]
    assert not hasattr(Worker, METHOD)
    worker = Worker()
    assert worker.deltawire_live_digests("asked") == (worker, "asked")
