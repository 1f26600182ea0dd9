"""Two engines compared: agreement, the layer of a planted error, and errors of wrong words."""

import copy
import json
import sys
import types

import families
import numpy as np
import pytest
import torch

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.export.models import save_model
from deltawire.parity import scorers
from deltawire.parity.comparison import compare
from deltawire.parity.scorers import open_scorer, parse_spec
from deltawire.parity.transformers_scorer import TransformersScorer
from deltawire.rl.evaluate.parity_sources import open_source, random_prompts


def scorer(model, spec="transformers"):
    return TransformersScorer(parse_spec(spec), model)


@pytest.fixture(scope="module")
def experts():
    return families.build("qwen3_moe", num_hidden_layers=4, num_experts=16)


@pytest.fixture(scope="module")
def drawn(experts):
    prompts = random_prompts(60, count=3, length=6, seed=0)
    return scorer(experts).draw(prompts, count=12, seed=1)


def test_an_engine_agrees_with_itself(experts, drawn):
    found = compare(scorer(experts), scorer(experts), drawn, layers=True, replay=True)
    assert (found.divergence.k3, found.divergence.largest_gap) == (0, 0)
    assert found.divergence.tokens == 3 * 12
    assert found.replayed == found.divergence
    assert [layer.number for layer in found.layers] == [0, 1, 2, 3]
    assert all(layer.drift == layer.worst == layer.own == 0 for layer in found.layers)
    assert found.flipped_M == (0, 0, 0, 0)
    assert found.first_drift is found.first_own is None


@pytest.mark.parametrize("spec", ["transformers:eager", "transformers:decode"])
def test_other_arithmetic_in_float32_is_rounding(experts, drawn, spec):
    found = compare(scorer(experts), scorer(experts, spec), drawn, layers=True)
    assert 0 < found.divergence.largest_gap < 1e-3
    assert found.first_drift is None
    assert not any(found.flipped_M)


def test_the_layer_with_a_planted_error_is_named(experts, drawn):
    """Later layers drift as well, but are not the cause."""
    wrong = copy.deepcopy(experts)
    with torch.no_grad():
        wrong.model.layers[2].self_attn.o_proj.weight.mul_(1.5)
    found = compare(scorer(experts), scorer(wrong), drawn, layers=True)
    assert found.first_drift is not None
    assert found.first_own is not None
    assert found.first_drift.number == found.first_own.number == 2
    assert found.layers[3].drift > found.tolerance > found.layers[3].own
    assert found.divergence.k3 > 1e-4


def test_bf16_drifts_flips_experts_and_agrees_better_with_them_replayed(experts, drawn):
    sampler = scorer(experts, "transformers:bf16")
    found = compare(sampler, scorer(experts), drawn, layers=True, replay=True)
    assert found.tolerance == 3e-2
    drifts = [layer.drift for layer in found.layers]
    assert all(drift > 1e-4 for drift in drifts)
    assert max(drifts) > 2 * drifts[0]
    assert any(found.flipped_M)
    assert found.replayed is not None
    assert found.replayed.k3 < found.divergence.k3


def test_scores_equal_an_uncached_forward(experts, drawn):
    (first, *_) = drawn
    ids = torch.tensor([[*first.prompt, *first.tokens]])
    with torch.no_grad():
        logits = experts(input_ids=ids, use_cache=False).logits[0].double()
    places = torch.arange(len(first.prompt) - 1, ids.shape[1] - 1)
    expected = logits.log_softmax(1)[places, ids[0, len(first.prompt) :]]
    found = scorer(experts).score(drawn, layers=True)[0]
    np.testing.assert_allclose(found.logprobs_T, expected.numpy(), atol=1e-5)
    assert found.hidden_LSH is not None
    assert found.hidden_LSH.shape == (5, ids.shape[1] - 1, 32)
    assert found.routes_SMK is not None
    assert found.routes_SMK.shape == (ids.shape[1] - 1, 4, 2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "there is no engine ''"),
        ("llama.cpp", "there is no engine 'llama.cpp'"),
        ("transformers:fp8", "'fp8' is not known here"),
        ("transformers:eager:sdpa", "'sdpa' occurs twice"),
        ("vllm:decode", "'decode' is not known here"),
        ("transformers:", "'' is not known here"),
    ],
)
def test_a_wrong_engine_is_named(spec, says):
    with pytest.raises(InputError, match=says):
        parse_spec(spec)


def test_an_engine_is_one_module_and_one_line(monkeypatch):
    """A scorer of another module is parsed and opened by its own words."""
    module = types.SimpleNamespace(
        WORDS={"speed": ("slow", "fast")},
        READS_FOLDER=False,
        open_scorer=lambda spec, model, folder, device: (spec.options, model, folder),
    )
    monkeypatch.setitem(sys.modules, "tests_own_scorer", module)
    monkeypatch.setitem(scorers.SCORERS, "own", "tests_own_scorer")
    spec = parse_spec("own:fast")
    assert (spec.precision, spec.reads_folder) == ("float32", False)
    assert open_scorer(spec, "model", None) == ({"speed": "fast"}, "model", None)
    with pytest.raises(InputError, match="'bf16' is not known here") as caught:
        parse_spec("own:bf16")
    assert caught.value.hint == "after own, use any of: slow or fast"


def test_an_engine_that_is_not_installed_is_named(experts, tmp_path):
    vllm = pytest.MonkeyPatch()
    vllm.setitem(__import__("sys").modules, "vllm", None)
    try:
        with pytest.raises(InputError, match="vLLM is not installed"):
            open_scorer(parse_spec("vllm"), experts, tmp_path)
    finally:
        vllm.undo()
    with pytest.raises(InputError, match="has no sdpa attention"):
        scorer(families.build("gpt_oss"), "transformers:sdpa")


SMALL = ["--count", "2", "--length", "5", "--tokens", "6"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, _qwen3, byte_tokenizer):
    folder = tmp_path_factory.mktemp("model")
    save_model(_qwen3, byte_tokenizer, folder)
    return folder


def test_the_command_on_a_directory(directory, tmp_path, capsys):
    picture = tmp_path / "layers.svg"
    assert main(["parity", str(directory), *SMALL, "--json", "--plot", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["divergence"]["tokens"] == 12
    assert 0 < report["divergence"]["k3"] < 0.1
    assert len(report["layers"]) == 2
    assert report["left"] == "transformers:bf16:decode"
    assert picture.read_text().startswith("<?xml")
    assert main(["parity", str(directory), *SMALL, "--layers", "--limit", "1e-12"]) == 3
    printed = capsys.readouterr().out
    assert "k3, left to right" in printed
    assert "layer" in printed


def test_prompts_from_a_file(directory, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("once upon a time\n[1, 2, 3]\n\n")
    arguments = ["parity", str(directory), "--prompts", str(path), "--tokens", "4", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["divergence"]["tokens"] == 8
    path.write_text("fine\n[99999]\n")
    assert main(arguments) == 2
    assert "line 2: a token id is not one of the model's 264" in capsys.readouterr().err


def test_a_version_of_a_run(tmp_path, capsys):
    """The weights are those of the version that was asked for."""
    from deltawire.config import BuildConfig, RunConfig
    from deltawire.rl.trainer.bootstrap import start_run
    from deltawire.store import open_bucket
    from deltawire.sync import Publisher, load_mirror
    from deltawire.train.build import build_model, byte_tokenizer

    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=24, context=64)
    model = build_model(sizes, seed=0)
    save_model(model, byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    run = start_run(bucket, RunConfig(name="x"), tmp_path / "model")
    head = load_mirror(bucket, run)
    publisher = Publisher(bucket, run, head, epoch=1, anchor_every=50)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    publisher.publish({name: p.to(torch.bfloat16) for name, p in model.named_parameters()})
    publisher.close()
    for version, scale in ((0, 1), (1, 3)):
        source = open_source(bucket.url, version=version)
        weight = source.model.model.layers[0].mlp.up_proj.weight
        base = open_source(bucket.url, version=0).model.model.layers[0].mlp.up_proj.weight
        torch.testing.assert_close(weight, base * scale, rtol=1e-2, atol=0)
    assert main(["parity", bucket.url, "--version", "1", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"].endswith("version 1")
    assert main(["parity", bucket.url, "--version", "7", *SMALL]) != 0
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--left", "nobody"], "there is no engine 'nobody'"),
        (["--count", "0"], "--count must be"),
        (["--tokens", "0"], "--tokens must be"),
        (["--plot", "picture.gif"], "--plot picture.gif"),
        (["--version", "1"], "is not a run"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt"),
        (["--length", "2000"], "the context has 128"),
        (["--replay"], "no expert choices"),
    ],
)
def test_wrong_input_is_one_error(directory, arguments, says, capsys):
    assert main(["parity", str(directory), *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_place_that_is_nothing_is_named(tmp_path, capsys):
    assert main(["parity", str(tmp_path)]) == 2
    assert "neither a model directory, nor a run" in capsys.readouterr().err
