"""Dumps of log-probabilities: each mistake is rebuilt and named, honest dumps of bf16 pass.

The model is a table in NumPy: the logits after a token depend on that token and the place.
"""

import json
import tracemalloc

import numpy as np
import pytest

from deltawire.errors import InputError
from deltawire.parity import dump as judging
from deltawire.parity import dump_rows as rows_of
from deltawire.parity.dump import CAUSES, DumpModel, examine
from deltawire.parity.dump_rows import FORMATS, parse_row, read_dump

VOCABULARY = 40
NOISE = 0.02
"""The gap of one token between bf16 engines and float32, about."""


def table_model(seed=0, name="version 8"):
    table = np.random.default_rng(seed).standard_normal((VOCABULARY, VOCABULARY)) * 3

    def logits(prompt, tokens):
        before = [*prompt, *tokens][len(prompt) - 1 : -1]
        found = table[before] + np.linspace(-1, 1, VOCABULARY)
        return found.astype(np.float32)

    return DumpModel(name, logits, VOCABULARY, lambda ids: " ".join(map(str, ids)))


def scores(model, prompt, tokens, temperature=1.0):
    logits = model.logits(prompt, tokens).astype(float) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits[np.arange(len(tokens)), tokens] - np.log(np.exp(logits).sum(axis=1))


def sampled(count=12, *, temperature=1.0, model=None, recorded=None, prompt_length=6, seed=1):
    """Rows of an honest engine, with the log-probabilities at ``recorded`` if that differs."""
    model, drawn = model or table_model(), np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = drawn.integers(0, VOCABULARY, prompt_length).tolist()
        tokens: list[int] = []
        for _ in range(20 + number):
            last = model.logits(prompt, [*tokens, 0])[-1].astype(float) / temperature
            odds = np.exp(last - last.max())
            tokens.append(int(drawn.choice(VOCABULARY, p=odds / odds.sum())))
        held = scores(model, prompt, tokens, recorded or temperature)
        held = np.minimum(held + drawn.normal(0, NOISE, len(tokens)), -1e-4)
        rows.append(
            {"prompt": prompt, "tokens": tokens, "logprobs": held.tolist(),
             "mask": [1] * len(tokens), "temperature": temperature, "version": 8}
        )  # fmt: skip
    return rows


def judged(rows, others=(), model=None):
    parsed = [parse_row(json.dumps(one).encode(), n + 1, "row") for n, one in enumerate(rows)]
    return examine(parsed, model or table_model(), lambda: others)


def masked(rows):
    """The same rows with a tool's tokens in the middle, which do not count."""
    for one in rows:
        middle = slice(6, 12)
        one["mask"][middle] = [0] * 6
        one["logprobs"][middle] = [0.0] * 6
    return rows


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.2])
@pytest.mark.parametrize("rows", [sampled, lambda **kind: masked(sampled(**kind))])
def test_an_honest_dump_is_sound(rows, temperature):
    for seed in range(4):
        report = judged(rows(temperature=temperature, seed=seed))
        assert report.sound, report
        assert not report.wrong_rows
        assert 0 < report.mean_gap < 2 * NOISE


def test_memory_does_not_grow_with_the_tokens_of_sound_rows():
    model, drawn = table_model(), np.random.default_rng(1)
    prompt, tokens = (1, 2), drawn.integers(0, VOCABULARY, 400).tolist()
    row = {"prompt": prompt, "tokens": tokens, "logprobs": scores(model, prompt, tokens).tolist()}
    parsed, held = parse_row(json.dumps(row).encode(), 1, "row"), []

    def rows():
        for _ in range(20):
            held.append(tracemalloc.get_traced_memory()[0])
            yield parsed

    tracemalloc.start()
    try:
        report = examine(rows(), model)
    finally:
        tracemalloc.stop()
    assert report.sound
    assert held[-1] - held[4] < 15 * 400 * 8  # One float64 for each token.


def edited(change, rows=None):
    rows = sampled() if rows is None else rows
    for one in rows:
        change(one)
    return rows


def exchange(one):
    one["prompt"], one["tokens"] = one["tokens"], one["prompt"]


def zero(one):
    one["logprobs"][10:] = [0.0] * len(one["logprobs"][10:])


def clear(one):
    one["logprobs"] = [0.0] * len(one["tokens"])


def unscored(one):
    one["logprobs"][6:12] = [-9.0] * 6


MISTAKES = {
    "zero-filled": lambda: edited(zero),
    "zero-filled everywhere": lambda: edited(clear),
    "missing": lambda: edited(lambda one: one["logprobs"].__setitem__(3, None)),
    "lengths": lambda: edited(lambda one: one["logprobs"].pop()),
    "shifted": lambda: edited(lambda one: one.update(logprobs=[*one["logprobs"][1:], -0.5])),
    "shifted back": lambda: edited(lambda one: one.update(logprobs=[-0.5, *one["logprobs"][:-1]])),
    "temperature forgotten": lambda: sampled(temperature=0.6, recorded=1.0),
    "temperature not stated": lambda: edited(lambda one: one.pop("temperature"),
                                             sampled(temperature=0.6)),
    "temperature of 0.9": lambda: sampled(40, temperature=0.9, recorded=1.0),
    "mask inverted": lambda: edited(lambda one: one.update(mask=[1 - bit for bit in one["mask"]]),
                                    masked(sampled())),
    "mask without gaps": lambda: edited(unscored),
    "exchanged": lambda: edited(exchange),
    "exchanged of one length": lambda: edited(exchange, [
        {**one, "tokens": one["tokens"][:20], "logprobs": one["logprobs"][:20], "mask": [1] * 20}
        for one in sampled(prompt_length=20)]),
    "version": lambda: sampled(model=table_model(5)),
    "tokenizer": lambda: edited(lambda one: one["tokens"].__setitem__(2, VOCABULARY + 7)),
    "tokenizer by text": lambda: edited(lambda one: one.update(text="1 2 3 another one")),
    "unknown": lambda: sampled(model=table_model(6)),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(case):
    report = judged(MISTAKES[case](), [table_model(5, "version 7")])
    cause = case.split(" ")[0]
    if case == "mask without gaps":
        cause = "unknown"  # The tokens of a tool count, and have values that no model gave.
    assert not report.sound
    assert set(report.wrong_rows) == {cause}
    assert report.wrong_rows[cause] == report.rows
    assert report.first_rows[cause] == 1
    assert report.texts[cause]
    assert cause in CAUSES
    if case == "version":
        assert report.texts[cause] == "version 7 fits"
    if case == "temperature not stated":
        assert "0.6" in report.texts[cause]


def as_format(row, name):
    members = FORMATS[name]
    if not members.prompt:  # One list of all tokens.
        before = len(row["prompt"])
        return {
            "token_ids": row["prompt"] + row["tokens"],
            "logprobs": [0.0] * before + row["logprobs"],
            "mask": [False] * before + [bit > 0 for bit in row["mask"]],
            "temperatures": [row["temperature"]] * (before + len(row["tokens"])),
        }
    found = {
        members.prompt[0]: row["prompt"], members.tokens[0]: row["tokens"],
        members.logprobs[0]: row["logprobs"], members.mask[0]: row["mask"],
        "temperature": row["temperature"],
    }  # fmt: skip
    if name == "verl":  # Padded on both sides.
        found["prompts"] = [0] * 3 + row["prompt"]
        found["responses"] = row["tokens"] + [0] * 4
        found["rollout_log_probs"] = row["logprobs"] + [0.0] * 4
        found["response_mask"] = row["mask"] + [0] * 4
        real = len(row["prompt"]) + len(row["tokens"])
        found["attention_mask"] = [0] * 3 + [1] * real + [0] * 4
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name):
    rows = sampled(4, temperature=0.8)
    report = judged([as_format(one, name) for one in rows])
    assert report.sound
    assert report.formats == [name]
    assert report.tokens == sum(len(one["tokens"]) for one in rows)
    parsed = parse_row(json.dumps(as_format(rows[0], name)).encode(), 1, "row")
    assert (list(parsed.prompt), list(parsed.tokens)) == (rows[0]["prompt"], rows[0]["tokens"])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": [1], "tokens"', "cut off"),
        ('{"a": 1}', "known format"),
        ('{"tokens": [1.5], "logprobs": [0]}', "token ids"),
        ('{"tokens": [-1], "logprobs": [0]}', "token ids"),
        ('{"tokens": [true], "logprobs": [0]}', "token ids"),
        ('{"tokens": [1], "logprobs": ["0"]}', "no list of at most 1048576 numbers"),
        ('{"tokens": [1], "logprobs": [' + "9" * 400 + "]}", "too large"),
        ('{"prompt": [1], "tokens": [1], "logprobs": [0], "temperature": 0}', "temperature"),
        ('{"prompt": [1], "tokens": [1], "logprobs": [0], "temperature": NaN}', "temperature"),
        ('{"prompt": [1], "tokens": [1], "logprobs": [0], "temperature": "1"}', "no number"),
        ('{"prompt": [1], "tokens": [1], "logprobs": [0], "temperature": true}', "no number"),
        ('{"tokens": [1], "logprobs": [0]}', "has no prompt"),
        ('{"prompt": "a", "tokens": [1], "logprobs": [0]}', "token ids as prompt"),
        ('{"tokens": [1], "logprobs": [[0, -1]]}', "numbers as logprobs"),
        ('{"tokens": [1], "logprobs": [[0], 0]}', "no list of at most 1048576 numbers"),
        ('{"tokens": [1], "logprobs": [NaN', "cut off"),
        ('[NaN]', "no JSON object"),
        ('{"tokens": [1], "logprobs": [0], "prompt": [1], "temperature": [1, 2]}', "several"),
        ('{"prompt_ids": [1], "completion_ids": [1], "logprobs": [0], "prompt_mask": []}',
         "prompt_mask of another length"),
        ('{"token_ids": [1, 2], "logprobs": [0, 0], "mask": [0, 1], "temperatures": [1, 2]}',
         "several temperatures"),
        (f'{{"prompt": [1], "tokens": [1], "logprobs": [0], "temperature": 1{"0" * 400}}}',
         f"temperature 1{'0' * 31}; "),
        ("[" * 100_000, "cut off"),
        ("\ufeff{}", "in UTF-8, not compressed"),
    ],
)  # fmt: skip
def test_a_damaged_row_is_refused_by_its_line(tmp_path, line, text):
    path = tmp_path / "dump.jsonl"
    good = json.dumps(sampled(1)[0])
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(InputError, match=text) as caught:
        list(read_dump(path))
    assert "line 3" in str(caught.value), "as an editor counts lines"


def test_long_lines_and_many_rows_are_refused(tmp_path, monkeypatch):
    path, line = tmp_path / "dump.jsonl", json.dumps(sampled(1)[0])
    monkeypatch.setattr(rows_of, "MAX_LINE_BYTES", len(line) + 1)
    monkeypatch.setattr(rows_of, "MAX_ROWS", 2)
    path.write_text(f"{line}\n{line}\n")
    assert len(list(read_dump(path))) == 2
    path.write_text(f"{line}\n{line}  \n")
    with pytest.raises(InputError, match=rf"line 2 has more than {len(line) + 1} bytes"):
        list(read_dump(path))
    path.write_text(f"{line}\n" * 3)
    with pytest.raises(InputError, match="has more than 2 rows"):
        list(read_dump(path))
    monkeypatch.setattr(rows_of, "MAX_TOKENS", 10)
    with pytest.raises(InputError, match="no list of at most 10 token ids as tokens"):
        list(read_dump(path))


def test_an_empty_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        list(read_dump(tmp_path / "empty"))
    with pytest.raises(InputError, match="cannot read"):
        list(read_dump(tmp_path / "nowhere"))


def test_a_batch_of_trl_is_read_as_its_trainer_reads_it():
    """TRL 1.16 pads prompts on the left and answers on the right, and a tool's tokens have 0."""
    rows = [
        {
            "prompt_ids": [0, 0, *one["prompt"]],
            "prompt_mask": [0, 0] + [1] * len(one["prompt"]),
            "completion_ids": one["tokens"] + [0] * 3,
            "completion_mask": [1] * len(one["tokens"]) + [0] * 3,
            "tool_mask": one["mask"] + [1] * 3,
            "sampling_per_token_logps": one["logprobs"] + [float("nan")] * 3,
        }
        for one in masked(sampled(4))
    ]
    assert "NaN" in json.dumps(rows)
    report = judged(rows)
    assert report.sound, report
    assert report.tokens == sum(sum(one["mask"]) for one in masked(sampled(4)))


def test_masks_of_different_lengths_are_refused():
    row = as_format(sampled(1)[0], "trl") | {"tool_mask": [1]}
    with pytest.raises(InputError, match="different lengths: completion_mask, tool_mask"):
        judged([row])


def test_lists_of_the_sampled_token_s_log_probability_are_read():
    """As vLLM returns them."""
    rows = sampled(3)
    for one in rows:
        one["logprobs"] = [[value] for value in one["logprobs"]]
    assert judged(rows).sound


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_missing(value):
    report = judged(edited(lambda one: one["logprobs"].__setitem__(3, value)))
    assert report.wrong_rows == {"missing": report.rows}


def test_samples_of_prime_rl_are_divided_before_the_first_sampled_token():
    rows = [as_format(one, "prime-rl samples") for one in masked(sampled(3))]
    assert judged(rows).sound
    for one in rows:
        one["mask"] = [not bit for bit in one["mask"]]
    assert judged(rows).wrong_rows == {"mask": 3}
    for one in rows:
        one["logprobs"].pop()
    assert judged(rows).wrong_rows == {"lengths": 3}


def test_the_first_token_of_nothing_is_what_the_others_follow():
    rows = sampled(3)
    for one in rows:
        one["tokens"] = one["prompt"] + one["tokens"]
        one["logprobs"] = scores(table_model(), one["tokens"][:1], one["tokens"][1:]).tolist()
        one["logprobs"].insert(0, -3.0)  # Of a distribution that no prompt gives.
        one.update(prompt=[], mask=[1] * len(one["tokens"]))
    assert judged(rows).sound
    empty = {"prompt": [], "tokens": [1, 2], "logprobs": [], "mask": []}
    assert judged([empty]).wrong_rows == {"lengths": 1}


def test_rows_in_which_nothing_counts_are_not_judged(capsys):
    from rich.console import Console

    from deltawire.launch.dump import print_dump

    rows = edited(lambda one: one.update(mask=[0] * len(one["mask"])), sampled(2))
    report = judged([*rows, *sampled(1)])
    assert (report.sound, report.unjudged) == (True, 2)
    report = judged(rows)
    assert (report.sound, report.unjudged, report.wrong_rows) == (False, 2, {})
    print_dump(report, Console())
    assert "2 of 2 rows have no token that counts" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["7 8  9", "7 <9> 8 9", "7 8", " 9\n"])
def test_texts_may_leave_special_tokens_and_white_space_out(text):
    special = frozenset([5])
    model = table_model()
    spell = lambda ids: " ".join("<9>" if one == 5 else str(one) for one in ids)  # noqa: E731
    model = DumpModel("m", model.logits, VOCABULARY, spell, special)
    tokens = [7, 5, 8, 9]
    held = scores(model, [1], tokens).tolist()
    row = {"prompt": [1], "tokens": tokens, "logprobs": held, "text": text}
    assert judged([row], model=model).sound
    row["text"] = "7 9 8"
    assert judged([row], model=model).wrong_rows == {"tokenizer": 1}


def test_rows_of_more_tokens_than_the_model_takes_are_refused():
    model = table_model()
    small = DumpModel("m", model.logits, VOCABULARY, context=27)
    assert judged(sampled(2), model=small).sound
    with pytest.raises(InputError, match="row 3 has 28 tokens; the model takes 27"):
        judged(sampled(3), model=small)
    other = DumpModel("another", table_model(5).logits, VOCABULARY, context=27)
    found = judged(sampled(3, model=table_model(5)), [other])
    assert found.wrong_rows == {"version": 2, "unknown": 1}


def short(count, noise, *, far=0, off=0.0, seed=3, length=1):
    """Answers of few tokens of an engine with this noise; ``far`` are off by 0.8 nats more."""
    model, drawn = table_model(), np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = drawn.integers(0, VOCABULARY, 4).tolist()
        tokens = drawn.integers(0, VOCABULARY, length).tolist()
        held = scores(model, prompt, tokens) + drawn.laplace(0, noise, length)
        held -= off + 0.8 * (number < far)
        rows.append({"prompt": prompt, "tokens": tokens, "logprobs": held.tolist()})
    return rows


@pytest.mark.parametrize("length", [1, 5])
def test_short_answers_are_judged_together(length):
    """Of single tokens of an honest engine in bf16, 7.8 % were off by more than 0.1 nats."""
    rows = short(100, 0.04, length=length)
    alone = [judged([one]).sound for one in rows[:20]]
    report = judged(rows)
    assert report.sound, report
    assert report.tokens == 100 * length
    assert report.mean_gap == pytest.approx(0.04, rel=0.3)
    assert all(alone)
    wrong = judged(short(60, 0.02, far=6, length=length))
    assert sum(wrong.wrong_rows.values()) >= 6, "more than 2 % are far off"
    assert judged(short(100, 0.02, far=2, length=length)).sound
    assert not judged(short(30, 0.2, length=length)).sound, "few are far off, all are noisy"
    assert not judged(short(60, 0.0, off=0.25, length=length)).sound, "none is far off, all are off"
    zeros = edited(clear, short(5, 0.04, length=length))
    assert judged(zeros).wrong_rows == {"zero-filled": 5}


def cut(row, length):
    return row | {key: row[key][:length] for key in ("tokens", "logprobs", "mask")}


def test_accepted_short_answers_hide_no_mistake_of_all_rows():
    """A temperature of 0.9 leaves most rows within the tolerance: it is found in all together."""
    rows = sampled(30, temperature=0.9, recorded=1.0)
    honest = [cut(one, 1) for one in sampled(2, temperature=0.9, seed=4)]
    honest[0]["logprobs"][0] -= 0.12
    for added in ([], honest):
        report = judged([*rows, *added])
        assert report.wrong_rows == {"temperature": 30 + len(added)}, report


@pytest.mark.parametrize("seed", range(4))
def test_a_mistake_of_all_short_answers_is_named(seed):
    rows = sampled(20, temperature=0.9, recorded=1.0, seed=seed)
    report = judged([cut(one, 12) for one in rows])
    assert report.wrong_rows == {"temperature": 20}, report


def test_few_tokens_are_no_evidence_of_another_temperature():
    model, drawn = table_model(), np.random.default_rng(3)
    for _ in range(30):
        prompt, token = drawn.integers(0, VOCABULARY, 4).tolist(), int(drawn.integers(VOCABULARY))
        held = scores(model, prompt, [token], 0.9)
        row = {"prompt": prompt, "tokens": [token], "logprobs": held.tolist()}
        assert (
            not judged([row]).wrong_rows.get("temperature")
            or abs(held[0] - scores(model, prompt, [token])[0]) > 0.5
        )


def test_long_answers_are_scored_in_parts(monkeypatch):
    monkeypatch.setattr(judging, "TOGETHER", 7)
    assert judged(sampled(4)).sound
    assert judged(sampled(temperature=0.6, recorded=1.0)).wrong_rows == {"temperature": 12}


def test_a_damaged_file_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    from deltawire.launch import dump as command

    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(sampled(1)[0]) + "\n{")
    monkeypatch.setattr(command, "open_source", lambda *_, **__: 1 / 0)
    options = {"version": None, "also": (), "device": "cpu", "trust": None}
    with pytest.raises(InputError, match="line 2"):
        command.examine_dump("model", str(path), **options)


@pytest.mark.drills
def test_the_command_passes_what_a_bf16_engine_recorded(tmp_path, capsys):
    from tiny_config import MODEL

    from deltawire.cli.main import main
    from deltawire.parity.scorers import open_scorer, parse_spec
    from deltawire.rl.evaluate.parity_sources import open_source

    config, dump = tmp_path / "tiny.toml", tmp_path / "dump.jsonl"
    config.write_text(f'name = "tiny"\n{MODEL}')
    source = open_source(str(config))
    engine = open_scorer(parse_spec("transformers:bf16:decode"), source.model, None, device=None)
    drawn = engine.draw([(5, 6, 7), (8, 9)], count=24, seed=0)
    rows = [
        {"prompt_ids": one.prompt, "completion_ids": one.tokens,
         "completion_logprobs": held.logprobs_T.tolist()}
        for one, held in zip(drawn, engine.score(drawn), strict=True)
    ]  # fmt: skip
    dump.write_text("\n".join(map(json.dumps, rows)))
    assert main(["parity", str(config), "--dump", str(dump), "--device", "cpu"]) == 0
    assert "sound, mean gap 0.00" in capsys.readouterr().out
    for one in rows:
        one["completion_logprobs"] = [0.0] * 24
    dump.write_text("\n".join(map(json.dumps, rows)))
    command = ["parity", str(config), "--dump", str(dump), "--device", "cpu", "--json"]
    assert main(command) == 5
    assert json.loads(capsys.readouterr().out)["wrong_rows"] == {"zero-filled": 2}
