"""Digests of arrays, folders, modules and adapters, and the file that states them."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from thread_ranks import on_ranks

from deltawire import attest, codec
from deltawire.attest import torch_tensors
from deltawire.attest.combining import HeldPart, combined, total_of
from deltawire.attest.statement import FILE, decode_digests
from deltawire.codec.reference import digest_bits_reference
from deltawire.errors import CorruptError, InputError, RetryError, SignatureError
from deltawire.store import open_bucket
from deltawire.wire.run import TensorSpec
from deltawire.wire.seal import seal_json
from deltawire.wire.signing import Ed25519Signer

WHERE = "here"


def arrays():
    drawn = np.random.default_rng(0)
    return {
        "b": drawn.standard_normal((5, 3)).astype(np.float32),
        "a": drawn.integers(0, 9, (2, 2, 2)),
        "scalar": np.float32([2.5]).reshape(()),
        "empty": np.zeros((0, 4), np.float16),
    }


def test_arrays_a_folder_and_torch_give_the_same_digests(tmp_path):
    held = arrays()
    found = attest.digests(held)
    save_file(held, tmp_path / "model.safetensors")
    assert attest.digests(tmp_path) == attest.digests(str(tmp_path)) == found
    assert attest.digests({name: torch.from_numpy(one) for name, one in held.items()}) == found
    assert [one.name for one in found.tensors] == sorted(held)
    for name, one in found.by_name.items():
        bits = codec.bits_of(np.ascontiguousarray(held[name]))
        assert one.digest == digest_bits_reference(name, bits).hex()
        assert one.shape == held[name].shape


def test_a_tied_tensor_is_an_alias():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    found = attest.digests(model)
    assert found.aliases == {"head.weight": "embed.weight"}
    assert [one.name for one in found.tensors] == ["embed.weight"]
    assert attest.digests(model.state_dict()) == found


def test_masters_are_rounded_and_buffers_are_not():
    model = torch.nn.BatchNorm1d(3)
    found = attest.digests(model, dtype="bfloat16").by_name
    assert found["weight"].dtype == "BF16"
    assert found["running_mean"].dtype == "F32"
    assert found["num_batches_tracked"].dtype == "I64"
    rounded = attest.digests({"weight": model.weight.detach().bfloat16()})
    assert found["weight"] == rounded.tensors[0]


def test_an_adapter_is_digested_next_to_its_base_or_merged():
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    before = attest.digests(base)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.fill_(0.5)
    found = attest.digests(model)
    names = [f"base_model.model.0.lora_{half}.weight" for half in "AB"]
    assert sorted(found.by_name) == ["0.bias", "0.weight", *names]
    assert [found.by_name[name] for name in before.by_name] == before.tensors
    merged = attest.digests(model, merged=True, dtype="float32")
    assert merged.by_name["0.weight"] != found.by_name["0.weight"]
    assert merged.by_name["0.bias"] == found.by_name["0.bias"]
    by_hand = model.merge_and_unload()
    assert merged == attest.digests(by_hand)


@pytest.mark.parametrize("place", ["folder", "file", "bucket"])
def test_the_file_is_read_back_from_where_it_was_written(tmp_path, place):
    found = attest.digests(arrays())
    where = {
        "folder": tmp_path,
        "file": tmp_path / "of-7.json",
        "bucket": open_bucket("memory://"),
    }[place]
    found.write(where)
    assert attest.read_digests(where) == found


def test_the_file_is_sent_and_read_over_http():
    held = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            allowed = self.headers["Authorization"] == "Bearer key"
            held[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(201 if allowed else 403)
            self.end_headers()

        def do_GET(self):
            self.send_response(200 if self.path in held else 404)
            self.end_headers()
            self.wfile.write(held.get(self.path, b""))

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/7/digests.json"
        found = attest.digests(arrays())
        found.write(url, token="key")
        assert attest.read_digests(url) == found
        with pytest.raises(InputError, match="403; is it the right token"):
            found.write(url)
        with pytest.raises(InputError, match="answers 404"):
            attest.read_digests(url + "x")
        held["/7/digests.json"] = held["/7/digests.json"][:-9]
        with pytest.raises(CorruptError):
            attest.read_digests(url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(RetryError, match="does not answer"):
        found.write(url)


def test_a_damaged_file_is_refused():
    data = attest.digests(arrays()).encode()
    assert decode_digests(data, where=WHERE).tensors
    for place in range(0, len(data), 7):
        broken = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(CorruptError):
            decode_digests(broken, where=WHERE)
        with pytest.raises(CorruptError):
            decode_digests(data[:place], where=WHERE)


def test_a_sealed_file_that_contradicts_itself_is_refused():
    found = attest.digests(arrays())
    row = '{"name":"%s","shape":%s,"dtype":"%s","digest":"' + "0" * 32 + '"}'
    tensor = row % ("a", [1], "F32")
    half = row % ("b", [1 << 24, 1 << 24], "F32")
    for rows, total, what, aliases in (
        ([tensor] * 2, "0" * 32, "twice", "{}"),
        ([row % ("a", [1], "F31")], "0" * 32, "dtype", "{}"),
        ([tensor], found.digest, "not the sum", "{}"),
        ([row % ("a", [-1], "F32")], "0" * 32, "shape", "{}"),
        ([row % ("a", [10**15], "F32")], "0" * 32, "shape", "{}"),
        ([tensor, half], "0" * 32, "more than 281474976710656 elements", "{}"),
        ([tensor], "0" * 32, "alias of a missing", '{"c":"d"}'),
    ):
        body = f'{{"format":1,"digest":"{total}","tensors":[{",".join(rows)}],"aliases":{aliases}}}'
        with pytest.raises(CorruptError, match=what):
            decode_digests(seal_json(body.encode(), key=FILE), where=WHERE)


def test_an_alias_of_a_tensor_that_is_not_digested_is_not_stated():
    entry = attest.digests(arrays()).tensors[0]
    found = total_of([entry], aliases={"c": "missing", "d": entry.name})
    assert found.aliases == {"d": entry.name}


def test_a_signed_file_is_checked(tmp_path):
    signer, other = Ed25519Signer.generate(), Ed25519Signer.generate()
    found = attest.digests(arrays())
    found.write(tmp_path, signer=signer)
    assert attest.read_digests(tmp_path, public_key=signer.public_key) == found
    with pytest.raises(SignatureError):
        attest.read_digests(tmp_path, public_key=other.public_key)
    found.write(tmp_path)
    with pytest.raises(SignatureError, match="not signed"):
        attest.read_digests(tmp_path, public_key=signer.public_key)


def test_a_missing_file_and_odd_models_get_one_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*digests\.json"):
        attest.read_digests(tmp_path)
    with pytest.raises(InputError, match="no safetensors files"):
        attest.digests(tmp_path)
    with pytest.raises(InputError, match="mapping of names"):
        attest.digests([1, 2])
    with pytest.raises(InputError, match="no tensor"):
        attest.digests({"a": torch.zeros(1), "b": 3})
    with pytest.raises(InputError, match="no dtype"):
        attest.digests({"a": torch.zeros(1)}, dtype="bf17")
    with pytest.raises(InputError, match="meta device"):
        attest.digests({"a": torch.zeros(1, device="meta")})


SPEC = TensorSpec("w", (4,), "U16")
BITS = np.arange(4, dtype=np.uint16)


def part(first, last, *, counts, spec=SPEC, flip=0):
    bits = BITS[first:last] ^ np.uint16(flip)
    return HeldPart(spec, codec.digest_bits(spec.name, bits, first), last - first, counts)


def test_ranks_add_up_what_they_hold_and_compare_copies():
    whole = codec.digest_bits("w", BITS).hex()
    halves = [[part(0, 2, counts=True)], [part(2, 4, counts=True)]]
    for found in on_ranks(lambda ranks: combined(halves[ranks.number], ranks), 2):
        assert found.by_name["w"].digest == whole == found.digest
        assert not found.copies_disagree
    copies = [[part(0, 4, counts=None)], [part(0, 4, counts=None)]]
    for found in on_ranks(lambda ranks: combined(copies[ranks.number], ranks), 2):
        assert (found.digest, found.copies_disagree) == (whole, [])
    copies[1] = [part(0, 4, counts=None, flip=8)]
    for found in on_ranks(lambda ranks: combined(copies[ranks.number], ranks), 2):
        assert (found.digest, found.copies_disagree) == (whole, ["w"])


def test_ranks_may_hold_different_tensors():
    """As pipeline stages do; a tensor of two stages counts on the first of them."""
    second = TensorSpec("v", (4,), "U16")
    held = [
        [part(0, 4, counts=None)],
        [part(0, 4, counts=None), part(0, 4, counts=None, spec=second)],
    ]
    both = codec.digest_bits("w", BITS) + codec.digest_bits("v", BITS)
    for found in on_ranks(lambda ranks: combined(held[ranks.number], ranks), 2):
        assert found.digest == both.hex()
        assert list(found.by_name) == ["v", "w"]


def test_a_missing_part_and_a_part_that_counts_twice_are_refused():
    for parts in ([(0, 2), (3, 4)], [(0, 3), (2, 4)]):
        held = [[part(*one, counts=True)] for one in parts]
        with pytest.raises(InputError, match="of the 4 elements"):
            on_ranks(lambda ranks, held=held: combined(held[ranks.number], ranks), 2)
    held = [[part(0, 4, counts=None)], [part(0, 4, counts=None, spec=TensorSpec("w", (4,), "I16"))]]
    with pytest.raises(InputError, match="different shapes or dtypes of w"):
        on_ranks(lambda ranks: combined(held[ranks.number], ranks), 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_digested_in_parts_by_several_threads(monkeypatch, threads):
    """Equal to the digest of the whole tensor, rounded by torch in one piece."""
    monkeypatch.setattr(torch_tensors, "ROUNDED_ELEMENTS", 1000)
    monkeypatch.setattr(torch_tensors, "TASK_ELEMENTS", 4096)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    held = {"large": torch.randn(101, 97), "small": torch.randn(3), "none": torch.zeros(0, 4)}
    held |= {"turned": torch.randn(97, 101).T, "whole": torch.randn(30, 400).bfloat16()}
    found = attest.digests(held, dtype="bfloat16")
    assert attest.digests_of_stream(held.items(), dtype="bfloat16") == found
    for name, one in held.items():
        bits = codec.bits_of(one.bfloat16().contiguous(), "BF16")
        assert found.by_name[name].digest == digest_bits_reference(name, bits).hex()


def test_masters_that_are_no_numbers_are_digested_as_torch_rounds_them(monkeypatch):
    monkeypatch.setattr(torch_tensors, "ROUNDED_ELEMENTS", 64)
    held = torch.randn(200)
    held[[3, 70, 199]] = float("nan")
    bits = codec.bits_of(held.bfloat16(), "BF16")
    found = attest.digests({"w": held}, dtype="bfloat16")
    assert found.by_name["w"].digest == digest_bits_reference("w", bits).hex()


def test_an_error_of_one_rank_ends_all_of_them():
    """The others would wait for its digests."""

    def work(ranks):
        held = [part(0, 4, counts=None)] if ranks.number != 1 else OSError("no memory")
        try:
            return combined(held, ranks)
        except (InputError, OSError) as error:
            return error

    found = on_ranks(work, 3)
    assert [type(one) for one in found] == [InputError, OSError, InputError]
    assert {str(one) for one in found[::2]} == {
        "another rank cannot digest what it holds; rank 1: OSError: no memory"
    }


class Bridge:
    """Megatron Bridge 0.3.1, by the interface of ``AutoBridge``: all ranks export together, and
    each gets whole tensors."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, []

    def export_hf_weights(self, model, cpu=False, show_progress=True):
        assert model == ["stage"]
        assert not show_progress
        for name, tensor in self.tensors.items():
            self.read.append(name)
            yield name, tensor


def test_a_megatron_model_is_digested_under_the_names_of_its_bridge(monkeypatch):
    torch.manual_seed(0)
    weights = {"model.embed": torch.randn(6, 4), "model.norm": torch.ones(4)}
    weights["lm_head"] = weights["model.embed"]
    found = attest.digests("stage", bridge=Bridge(weights), dtype="bfloat16")
    assert found == attest.digests(weights, dtype="bfloat16")
    assert found.aliases == {"lm_head": "model.embed"}

    def work(ranks):
        monkeypatch.setattr(torch_tensors, "torch_ranks", lambda _: ranks_of.found)
        ranks_of.found = ranks
        own = dict(weights)
        if ranks.number:
            own["model.norm"] = own["model.norm"] * 2
        return attest.digests(["stage"], bridge=Bridge(own), dtype="bfloat16")

    ranks_of = threading.local()
    for one in on_ranks(work, 2):
        assert one.digest == found.digest
        assert one.copies_disagree == ["model.norm"]


def with_ranks(monkeypatch, call, count=2):
    """Returns what ``call(number)`` returned or raised on each rank."""
    ranks_of = threading.local()
    monkeypatch.setattr(torch_tensors, "torch_ranks", lambda _: getattr(ranks_of, "found", None))

    def work(ranks):
        ranks_of.found = ranks
        try:
            return call(ranks.number)
        except InputError as error:
            return error

    return on_ranks(work, count)


def test_a_rank_that_holds_nothing_takes_part(monkeypatch):
    weights = {"model.norm": torch.ones(4)}
    found = with_ranks(monkeypatch, lambda rank: attest.digests({} if rank else weights))
    assert [one.digest for one in found] == [attest.digests(weights).digest] * 2


def test_a_rank_that_gives_no_mapping_ends_all(monkeypatch):
    weights = {"model.norm": torch.ones(4)}
    found = with_ranks(monkeypatch, lambda rank: attest.digests([1] if rank else weights))
    assert "rank 1: InputError: tensors is a list" in str(found[0])
    assert "tensors is a list" in str(found[1])


def test_a_test_of_ranks_fails_at_once_if_one_ends_while_others_wait():
    def work(ranks):
        if not ranks.number:
            ranks.gather(b"")
        return ranks.number

    began = time.monotonic()
    with pytest.raises(AssertionError, match="has ended"):
        on_ranks(work, 2)
    assert time.monotonic() - began < 30


def test_an_export_that_does_not_begin_on_one_rank_ends_all(monkeypatch):
    class Broken:
        def export_hf_weights(self, model, show_progress=True):
            raise InputError("no export")

    bridges = [Bridge({"model.norm": torch.ones(4)}), Broken()]
    found = with_ranks(monkeypatch, lambda rank: attest.digests(["stage"], bridge=bridges[rank]))
    assert all(isinstance(one, InputError) for one in found)
    assert "no export" in str(found[0])


def test_merged_has_no_meaning_with_a_bridge():
    with pytest.raises(InputError, match="merged"):
        attest.digests(["stage"], bridge=Bridge({}), merged=True)


def test_an_error_in_the_export_of_a_bridge_is_read_past_and_raised():
    bad = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64), "c": torch.ones(2)}
    bridge = Bridge(bad)
    with pytest.raises(InputError, match="b has the dtype"):
        attest.digests(["stage"], bridge=bridge)
    assert bridge.read == ["a", "b", "c"]
    with pytest.raises(InputError, match="object has no export_hf_weights"):
        attest.digests(["stage"], bridge=object())


def test_a_stream_names_what_it_cannot_digest():
    with pytest.raises(InputError, match="meta device"):
        attest.digests_of_stream([("w", torch.zeros(3, device="meta"))])


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    device = property(lambda _: torch.device("cuda"))

    def to(self, *arguments):
        return self.as_subclass(torch.Tensor).to(*arguments)


def test_what_lies_on_a_gpu_is_read_by_the_calling_thread(monkeypatch):
    """Another thread has another current stream: it may read before the weights are written."""
    read = []
    original = torch_tensors.digest_tensor

    def digest_tensor(*arguments):
        read.append(threading.current_thread())
        return original(*arguments)

    monkeypatch.setattr(torch_tensors, "digest_tensor", digest_tensor)
    held = {"a": torch.arange(6.0).as_subclass(Elsewhere)}
    assert torch_tensors.stream_digests(held.items(), None)[0]
    assert torch_tensors.held_parts(held, dtype=None, merged=False)[0]
    assert read == [threading.current_thread()] * 2


@pytest.mark.parametrize("gathered", [False, True])
def test_an_export_that_gives_a_tied_tensor_twice_is_one_with_an_alias(gathered):
    """Sharded trainers gather it again for each of its names."""
    tied, other = torch.randn(6, 4), torch.randn(6, 4)
    again = tied.clone() if gathered else tied
    almost = tied.clone()
    almost[0, 0] += 1  # Outside of the sample.
    bias, empty = torch.ones(4), torch.zeros(6, 4)
    stream = {"embed": tied, "other": other, "almost": almost, "head": again, "bias": bias,
              "more": bias, "a": empty, "b": empty}  # fmt: skip
    found = attest.digests_of_stream(stream.items(), dtype="bfloat16")
    assert found.aliases == {"head": "embed"}
    assert found.by_name.keys() == stream.keys() - {"head"}
