"""``diff --answers``: the same prompts and seeds at two versions, KL by token, and a page."""

import json
import re

import pytest
import torch

from benchmarks.branches.planted_groups import PROMPT
from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.launch.branches.answer_differences import (
    AnswerPair,
    AnswerSettings,
    AnswerTokens,
    compare_answers,
    divergence,
    prompt_ends,
    summed,
)
from deltawire.launch.branches.difference_page import write_page
from deltawire.launch.branches.differences import compare_bits
from deltawire.launch.branches.versioned_model import VersionedModel, open_model_of
from deltawire.sync import read_run


def sides(planted, old, new):
    run = read_run(planted.bucket)
    return (planted.bucket, run, old), (planted.bucket, run, new)


def test_text_json_and_page(planted, tmp_path, capsys):
    old, new = (f"{planted.bucket.url}@{version}" for version in (0, 4))
    page = tmp_path / "diff.html"
    words = ["diff", old, new, "--answers", "--prompts", "2", "--max-tokens", "5"]
    assert main([*words, "--page", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    answers = found["answers"]
    assert found["changed"] > 0
    assert (answers["prompts"], answers["answers"]) == (2, 2)
    assert answers["kl_per_token"] > 0
    assert len({pair["seed"] for pair in answers["pairs"]}) == 2
    assert [pair["kl"] for pair in answers["pairs"]] == sorted(
        (pair["kl"] for pair in answers["pairs"]), reverse=True
    )
    html = page.read_text()
    assert html.count("<svg") >= 4
    assert not re.search(r"<script|<link|https?://", html)
    assert main([*words, "--on", str(rows(tmp_path, PROMPT, "a", "b"))]) == 0
    shown = capsys.readouterr().out
    assert "KL by token" in shown
    assert "2 prompts of 3 rows" in shown


def rows(tmp_path, *prompts):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return file


def test_a_version_does_not_differ_from_itself(planted, tmp_path):
    file = str(rows(tmp_path, "abc", "defgh"))
    found = compare_answers(*sides(planted, 4, 4), AnswerSettings(file=file, seeds=2, max_tokens=6))
    assert (found.answers, found.same, found.kl_per_token) == (4, 4, 0)


def test_divergence_is_that_of_the_distributions(planted):
    with open_model_of(planted.bucket) as old, open_model_of(planted.bucket) as new:
        old.move_to(0)
        new.move_to(4)
        prompt, answer = [65, 66, 67], [70, 71]
        found = divergence(old.module, new.module, prompt, answer, 0.5)
        with torch.no_grad():
            p, q = (
                (one.module(input_ids=torch.tensor([[*prompt, 70]])).logits[0, 2:] / 0.5)
                .double()
                .softmax(-1)
                for one in (old, new)
            )
    assert found == pytest.approx((p * (p / q).log()).sum(-1).tolist(), abs=1e-9)
    assert min(found) > 0


def test_models_of_other_widths_are_not_compared(planted, tmp_path, monkeypatch):
    honest = VersionedModel.move_to

    def narrower(model, version):
        honest(model, version)
        if version == 0:
            model.module.lm_head = torch.nn.Linear(model.module.config.hidden_size, 7)

    monkeypatch.setattr(VersionedModel, "move_to", narrower)
    with pytest.raises(InputError, match="the two models have 7 and"):
        compare_answers(*sides(planted, 0, 4), AnswerSettings(file=str(rows(tmp_path, "a"))))


def test_what_answers_say_enters_the_page_as_text(planted, tmp_path):
    hostile = "<script>alert(1)</script>\x1b"
    tokens = AnswerTokens(texts=[hostile], kl=[2.0])
    pair = AnswerPair(prompt=hostile, seed=0, same=False, kl=2.0, old=tokens, new=tokens)
    page = tmp_path / "page.html"
    bits = compare_bits(*sides(planted, 0, 1))
    write_page(page, hostile, "b", bits, summed([pair], prompts=1, temperature=1.0))
    html = page.read_text()
    assert "<script" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;" in html
    with pytest.raises(InputError, match="cannot write"):
        write_page(tmp_path / "none" / "page.html", "a", "b", bits, None)


def test_prompts_are_told_apart_by_what_comes_before_the_end_that_all_share():
    none = AnswerTokens(texts=[], kl=[])
    pairs = [
        AnswerPair(prompt=f"<s>{asked}\n<end>\n", seed=0, same=True, kl=0.0, old=none, new=none)
        for asked in ("What is 2 + 3?", "What is 4 + 5?")
    ]
    assert prompt_ends(pairs, 6) == ["2 + 3", "4 + 5"]
    assert prompt_ends(pairs[:1], 5) == ["<end>"]
    assert prompt_ends([pairs[0], pairs[0]], 5) == ["<end>"] * 2


def test_prompts_of_users_are_not_shown(planted, monkeypatch):
    monkeypatch.setattr("deltawire.launch.branches.answer_differences.LIVE_TASK", "")
    with pytest.raises(InputError, match="no stored prompts of tasks"):
        compare_answers(*sides(planted, 0, 4), AnswerSettings(max_tokens=2))
