"""Steps on documents: their stream by position, and no attention across documents."""

import json

import msgspec
import numpy as np
import pytest
import torch

from deltawire.chat.text import Text
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import InputError
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.train.midtrain import DocumentStream, HeldoutDocuments, midtrain_step

SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=64)


@pytest.fixture
def folder(tmp_path):
    for name, column, count in (("a", "text", 9), ("b", "body", 5)):
        rows = [{column: name * (3 + 7 * number)} for number in range(count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return tmp_path


def config_of(folder, **changes):
    streams = [
        {"path": str(folder / "a.jsonl"), "weight": 3},
        {"path": str(folder / "b.jsonl"), "column": "body"},
    ]
    settings = {"streams": streams, "tokens_per_step": 80, "sequence_length": 24, **changes}
    return parse_config({"name": "mid", "midtrain": settings}, source="c")


def stream_of(folder, **changes):
    config = config_of(folder, **changes)
    return DocumentStream(config.midtrain, Text(byte_tokenizer()), seed=config.seed)


def test_a_position_resumes_the_stream_exactly(folder):
    stream, position, starts, whole = stream_of(folder), 0, [], []
    for _ in range(12):
        starts.append(position)
        batch = stream.batch(position)
        assert batch.tokens <= 80 + 24 * 4 or len(batch.documents) == 1
        assert all(2 <= len(document) <= 24 for document in batch.documents)
        whole.append([document.tolist() for document in batch.documents])
        position = batch.position
    assert starts == sorted(set(starts))
    resumed = stream_of(folder)
    for start, documents in reversed(list(zip(starts, whole, strict=True))):
        found = [document.tolist() for document in resumed.batch(start).documents]
        assert found == documents


def test_an_epoch_of_a_stream_has_every_document_once(folder):
    stream = stream_of(folder, sequence_length=1000)
    drawn = [bytes(t for t in stream.pieces(p)[0] if t < 256).decode() for p in range(1000)]
    first = [text for text in drawn if text[0] == "a"]
    assert sorted(map(len, first[:9])) == [3 + 7 * n for n in range(9)]
    assert (len(first), len(drawn) - len(first)) == (750, 250)
    assert stream.pieces(0)[0][-1] == 256, "a document ends with the end token"


def test_long_documents_are_cut_and_nothing_is_lost(folder):
    stream = stream_of(folder, sequence_length=10)
    whole = stream_of(folder, sequence_length=1000)
    for position in range(20):
        pieces = np.concatenate(stream.pieces(position))
        (document,) = whole.pieces(position)
        lost = len(document) - len(pieces)
        assert lost == (len(document) % 10 == 1)
        assert pieces.tolist() == document[: len(pieces)].tolist()


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_the_loss_is_that_of_each_document_alone(folder, packing):
    raw = {"packing": packing, "max_tokens_per_batch": 64, "optimizer": {"learning_rate": 1e-3}}
    config = parse_config({"name": "mid", "train": raw}, source="c")
    model = build_model(SIZES, seed=3)
    masters = MasterWeights(model, config.train)
    documents = stream_of(folder).batch(0).documents
    assert len(documents) > 3
    total = 0.0
    for document in documents:
        ids = torch.tensor(document, dtype=torch.long)[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits.float()
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()) * (
            len(document) - 1
        )
    tokens = sum(len(document) - 1 for document in documents)
    found = midtrain_step(masters, documents, config)
    assert found.tokens == tokens
    assert found.loss == pytest.approx(total / tokens, rel=1e-5)
    assert found.grad_norm > 0
    losses = [midtrain_step(masters, documents, config).loss for _ in range(30)]
    assert losses[-1] < found.loss - 0.05


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"text": 3}, {}, "has no text in column 'text'"),
        ({"other": "x"}, {}, "has no column 'text'"),
        ({"text": "a"}, {"streams": []}, "length >= 1"),
    ],
)
def test_wrong_streams_are_named(tmp_path, row, changes, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "b"}) + "\n")
    with pytest.raises(InputError, match=message):
        stream_of(tmp_path, **changes).batch(0)


def heldout_config(folder, *, share=0.25, tokens=10_000, **raw):
    midtrain = {
        "streams": [{"path": str(folder / "a.jsonl"), "heldout_share": share}],
        "tokens_per_step": 80,
        "sequence_length": 24,
        "heldout": {
            "every": 3,
            "tokens": tokens,
            "streams": [{"name": "other", "path": str(folder / "b.jsonl"), "column": "body"}],
        },
    }
    return parse_config({"name": "mid", "midtrain": midtrain, **raw}, source="c")


def texts_of(documents):
    return {bytes(token for token in one if token < 256).decode() for one in documents}


def test_held_out_rows_are_never_trained_on_and_no_seed_changes_them(folder):
    config = heldout_config(folder)
    text = Text(byte_tokenizer())
    # The rows' lengths differ, so a document names its row by its length.
    lines = (folder / "a.jsonl").read_text().splitlines()
    whole = {json.loads(line)["text"] for line in lines}
    longer = msgspec.structs.replace(config.midtrain, sequence_length=1000)
    config = msgspec.structs.replace(config, midtrain=longer)
    heldout = HeldoutDocuments(config, text)
    held = texts_of(heldout._sample(heldout._sources[0])[1])
    assert len(held) == 2, "a quarter of nine rows"
    for seed in (0, 1):
        stream = DocumentStream(longer, text, seed=seed)
        drawn = texts_of(piece for place in range(70) for piece in stream.pieces(place))
        assert drawn == whole - held


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_the_held_out_loss_is_the_cross_entropy_of_each_document(folder, packing):
    raw = {"packing": packing, "max_tokens_per_batch": 64, "dropout": True}
    config = heldout_config(folder, train=raw)
    model = build_model(SIZES, seed=3)
    model.config.attention_dropout = 0.5
    masters = MasterWeights(model.train(), config.train)
    heldout = HeldoutDocuments(config, Text(byte_tokenizer()))
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    before = masters.digest()
    total, sources = heldout.losses(masters)
    assert torch.equal(torch.get_rng_state(), drawn), "no random number was drawn"
    assert masters.digest() == before
    assert model.training
    assert sorted(sources) == ["a", "other"]
    model.eval()
    both = 0.0
    for name, documents in heldout._documents.items():
        summed = 0.0
        for document in documents:
            ids = torch.tensor(document, dtype=torch.long)[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits.double()
            losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
            summed += float(losses)
        tokens = sum(len(document) - 1 for document in documents)
        assert (sources[name].tokens, sources[name].documents) == (tokens, len(documents))
        assert sources[name].loss == pytest.approx(summed / tokens, rel=1e-6)
        assert sources[name].perplexity == pytest.approx(np.exp(summed / tokens), rel=1e-5)
        both += summed
    assert total.loss == pytest.approx(both / total.tokens, rel=1e-6)
    assert total.tokens == sum(one.tokens for one in sources.values())


def test_a_large_source_is_measured_on_a_fixed_sample(folder):
    heldout = HeldoutDocuments(heldout_config(folder, tokens=30), Text(byte_tokenizer()))
    _, few = heldout._sample(heldout._sources[1])
    assert 0 < sum(map(len, few)) <= 30
    again = HeldoutDocuments(heldout_config(folder, tokens=30), Text(byte_tokenizer()))
    assert texts_of(again._sample(again._sources[1])[1]) == texts_of(few)


def test_versions_that_are_due(folder):
    heldout = HeldoutDocuments(
        heldout_config(folder, train={"versions": 10}), Text(byte_tokenizer())
    )
    assert [version for version in range(11) if heldout.due(version)] == [0, 3, 6, 9, 10]
    nothing = config_of(folder, heldout={"every": 3})
    assert not HeldoutDocuments(nothing, Text(byte_tokenizer())).due(3), "nothing is held out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a"}, "two held-out sources of midtrain have the name a"),
        ({"column": "absent"}, "b.jsonl has no column 'absent'"),
        ({"path": "/nowhere/b.jsonl"}, "/nowhere/b.jsonl, which this machine does not give"),
    ],
)
def test_wrong_held_out_streams_are_named(folder, changes, message):
    other = {"name": "other", "path": str(folder / "b.jsonl"), "column": "body", **changes}
    midtrain = {
        "streams": [{"path": str(folder / "a.jsonl"), "heldout_share": 0.1}],
        "heldout": {"streams": [other]},
    }
    with pytest.raises(InputError, match=message):
        open_heldout(midtrain)


def open_heldout(midtrain):
    config = parse_config({"name": "mid", "midtrain": midtrain}, source="c")
    return HeldoutDocuments(config, Text(byte_tokenizer()))


def test_one_row_cannot_be_divided(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "only"}) + "\n")
    midtrain = {"streams": [{"path": str(tmp_path / "a.jsonl"), "heldout_share": 0.5}]}
    config = parse_config({"name": "mid", "midtrain": midtrain}, source="c")
    with pytest.raises(InputError, match="1 row cannot be divided"):
        DocumentStream(config.midtrain, Text(byte_tokenizer()), seed=0)
