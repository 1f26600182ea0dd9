"""SGLang's ``/weights_checker`` with deltawire's action, without SGLang, and asked over HTTP."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import torch

from benchmarks.attest import engines
from deltawire.attest.engine import ask_engine, compare_settled, request_of
from deltawire.engines.following.parameter_sums import record_changes
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import METHOD, EngineParts
from deltawire.engines.sglang import FOLLOW, attesting, hooks, plugin
from deltawire.engines.vllm.refusals import ABSORBED as VLLM_DERIVES
from deltawire.errors import CorruptError, InputError, RetryError


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """The one type of SGLang's that an answer needs."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    structs = ModuleType("sglang.srt.managers.io_struct")
    structs.CheckWeightsReqOutput = SimpleNamespace
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    monkeypatch.setattr("deltawire.attest.engine.PAUSE_S", 0.0)


class Alone:
    """The process group of one rank."""

    rank = staticmethod(lambda: 0)
    size = staticmethod(lambda: 1)


def updater_of(model, **changed):
    """SGLang's ``SchedulerWeightUpdaterManager`` on one rank."""
    config = SimpleNamespace(model_path="a model")
    runner = SimpleNamespace(model=model, model_config=config)
    members = {"tp_cpu_group": Alone, "tp_worker": SimpleNamespace(model_runner=runner),
               "draft_worker": None, "offload_tags": set(), "_session": None}  # fmt: skip
    return SimpleNamespace(**(members | changed))


def asked(updater, action):
    request = SimpleNamespace(action=action)
    return attesting.around_check(lambda *_: "SGLang's own answer", updater, request)


@pytest.fixture
def weights():
    return engines.drawn(1)


@pytest.fixture
def serve():
    """Serves ``/weights_checker`` of replicas as SGLang does: their messages are joined."""
    servers = []

    def start(*updaters, status=200, change=lambda text: text, keys=()):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = self.path == "/weights_checker" and status == 200
                given = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if keys:  # SGLang takes the admin key for its checker only, the other elsewhere.
                    wanted = keys[1] if self.path == "/weights_checker" else keys[0]
                    if given != wanted:
                        self.send_response(401)
                        self.end_headers()
                        return
                self.send_response(200 if known else 404 if "rpc" in self.path else status)
                self.end_headers()
                if known:
                    texts = [asked(one, body["action"]).message for one in updaters]
                    self.wfile.write(json.dumps({"message": change(" | ".join(texts))}).encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def test_other_actions_are_sglang_s():
    assert asked(updater_of(None), "checksum") == "SGLang's own answer"
    assert asked(updater_of(None), METHOD + "s") == "SGLang's own answer"


def test_a_server_is_equal_to_its_weights_and_differs_by_name(weights, serve):
    (model,) = engines.fleet(1, weights)
    side = engines.side(weights, "the trainer")
    url = serve(updater_of(model))
    assert compare_settled(url, lambda: ask_engine(url, side), side).equal
    engines.load(model, engines.stepped({"norm": weights["norm"]}, 2))
    report = compare_settled(url, lambda: ask_engine(url, side), side)
    assert [one.name for one in report.tensors if one.verdict != "equal"] == ["norm"]


def test_every_replica_counts_as_a_rank(weights, serve):
    """A reason may hold the text that lies between answers."""
    models = [engines.fleet(1, weights)[0] for _ in range(2)]
    models[1].__dict__["_deltawire_changes"] = {"out": "was split | moved"}
    side = engines.side(weights, "the trainer")
    url = serve(*map(updater_of, models))
    report = compare_settled(url, lambda: ask_engine(url, side), side)
    (odd,) = [one for one in report.tensors if one.verdict != "equal"]
    assert (odd.name, odd.verdict) == ("out", "not readable")
    assert "split | moved" in odd.text
    assert [one.rank for one in ask_engine(url, side)] == [0, 1]


@pytest.mark.parametrize("changed", [{"_session": object()}, {"offload_tags": {"weights"}}])
def test_weights_that_are_updated_or_released_are_not_read(weights, serve, changed):
    url = serve(updater_of(engines.fleet(1, weights)[0], **changed))
    with pytest.raises(RetryError, match="middle of an update"):
        ask_engine(url, engines.side(weights, "the trainer"))


def test_a_server_without_the_plugin_gets_one_clear_error(weights, serve):
    side = engines.side(weights, "the trainer")
    with pytest.raises(InputError, match=r"weights_checker answers 400.*start SGLang with"):
        ask_engine(serve(status=400), side)
    with pytest.raises(InputError, match=r"weights_checker answers 401.*token"):
        ask_engine(serve(status=401), side)
    with pytest.raises(InputError, match=r"collective_rpc answers 404.*start vLLM with"):
        ask_engine(serve(status=404), side)
    for damage in (lambda _: "none", lambda text: text[:-2], lambda text: text + " | "):
        url = serve(updater_of(engines.fleet(1, weights)[0]), change=damage)
        with pytest.raises(CorruptError, match="cannot be read"):
            ask_engine(url, side)


def test_a_server_with_two_keys_is_asked_by_its_admin_key(weights, serve):
    side = engines.side(weights, "the trainer")
    url = serve(updater_of(engines.fleet(1, weights)[0]), keys=("all", "admin"))
    assert ask_engine(url, side, token="admin")[0].parts
    for token in ("all", "none"):
        with pytest.raises(InputError, match=r"401.*token"):
            ask_engine(url, side, token=token)


def test_several_drafts_are_not_taken_for_read(weights):
    model = engines.fleet(1, weights)[0]
    config = SimpleNamespace(model_path="a model")
    runners = [(n, SimpleNamespace(model=model, model_config=config)) for n in "ab"]
    worker = SimpleNamespace(weight_update_runners=lambda: runners)
    updater = updater_of(model, draft_worker=worker)
    action = f"{METHOD} {request_of(engines.side(weights, 'the trainer'))}"
    (rank,) = msgspec.json.decode(asked(updater, action).message, type=EngineParts).results
    assert rank.failure.startswith("2 drafts")
    assert not rank.parts


def test_an_error_on_one_rank_leaves_no_other_waiting(weights):
    model = engines.fleet(1, weights)[0]
    updater = updater_of(model, tp_worker=None)
    action = f"{METHOD} {request_of(engines.side(weights, 'the trainer'))}"
    (rank,) = msgspec.json.decode(asked(updater, action).message, type=EngineParts).results
    assert rank.failure.startswith("AttributeError")


@pytest.mark.parametrize("one_checkpoint", [True, False])
def test_a_draft_is_read_if_it_has_the_model_s_checkpoint(weights, one_checkpoint):
    model, draft = (engines.fleet(1, weights)[0] for _ in range(2))
    config = SimpleNamespace(model_path="a model" if one_checkpoint else "another")
    runners = [("draft", SimpleNamespace(model=draft, model_config=config))]
    worker = SimpleNamespace(weight_update_runners=lambda: runners)
    side = engines.side(weights, "the trainer")
    updater = updater_of(model, draft_worker=worker)
    answer = asked(updater, f"{METHOD} {request_of(side)}").message
    (rank,) = msgspec.json.decode(answer, type=EngineParts).results
    assert ("draft: norm" in rank.uncovered) != one_checkpoint
    updater.draft_worker = SimpleNamespace(weight_update_runners=list)
    answer = asked(updater, f"{METHOD} {request_of(side)}").message
    assert not msgspec.json.decode(answer, type=EngineParts).results[0].uncovered


class Latent(torch.nn.Module):
    """Latent attention with what engines derive from ``kv_b_proj``, as views or as copies."""

    def __init__(self, *, copied, registered):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 6, bias=False).bfloat16()
        view = self.kv_b_proj.weight.detach().T
        made = view.clone() if copied else view
        if registered:
            self.register_buffer("W_UV", made)
        else:
            self.w_kc = made

    def load_weights(self, weights):
        for name, given in weights:
            self.get_parameter(name).data.copy_(given)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_copies_that_latent_attention_computes_with_are_never_equal(copied, registered):
    """An update that does not reach the copy would be equal by its digests."""
    model = Latent(copied=copied, registered=registered)
    record_changes(model, {})
    side = engines.side({"kv_b_proj.weight": model.kv_b_proj.weight.detach()}, "the trainer")
    ranks = [answer_of(model, request_of(side), 0)]
    report = compare_settled("e", lambda: ranks, side)
    assert report.equal == (not copied)
    if copied:
        assert "a copy derived from it" in report.tensors[0].text


def test_the_names_of_derived_matrices_are_those_that_followers_refuse():
    from deltawire.engines.live_digests import DERIVED
    from deltawire.engines.sglang.refusals import ABSORBED

    assert VLLM_DERIVES | set(ABSORBED) == DERIVED


def test_the_plugin_attests_if_no_run_is_named(monkeypatch):
    called = []
    monkeypatch.setattr(attesting, "install", lambda: called.append("attest"))
    monkeypatch.setattr(hooks, "install", lambda: called.append("follow"))
    monkeypatch.delenv(FOLLOW, raising=False)
    for value in ("", "0", "1"):
        monkeypatch.setenv("DELTAWIRE_ATTEST", value)
        plugin.register()
    assert called == ["attest"]
    monkeypatch.setenv(FOLLOW, "memory:///")
    plugin.register()
    assert called == ["attest", "follow"]
    monkeypatch.delenv(FOLLOW)
    monkeypatch.setattr(attesting, "install", lambda: 1 / 0)
    with pytest.raises(SystemExit, match="cannot attest: division"):
        plugin.register()
