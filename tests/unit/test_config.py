"""Every wrong key and value is refused by its name, and what is right survives a round trip."""

import json
import math
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from deltawire.config import (
    MAX_CONFIG_BYTES,
    RESUMABLE,
    LossConfig,
    RunConfig,
    StalenessConfig,
    TrainConfig,
    differences,
    flatten,
    load_config,
    parse_config,
    run_config,
)
from deltawire.config.sections import MOST_GROUPS
from deltawire.errors import InputError
from deltawire.rl.control.staleness import policy_of
from deltawire.wire.ledger import GROUP_HASH_DIGITS, CommitMetadata, PromptRecord
from deltawire.wire.manifest import MAX_METADATA_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALLEST = {"name": "run", "model": {"build": {}}}
DEFAULTS = flatten(parse_config(SMALLEST, source="s"))
NUMBERS = sorted(key for key, value in DEFAULTS.items() if type(value) in (int, float))
FLOATS = sorted(key for key, value in DEFAULTS.items() if isinstance(value, float))
WORDS = sorted(key for key, value in DEFAULTS.items() if isinstance(value, str))


def with_key(dotted, value):
    raw = json.loads(json.dumps(SMALLEST))
    *tables, key = dotted.split(".")
    at = raw
    for table in tables:
        at = at.setdefault(table, {})
    at[key] = value
    return raw


def refusal(raw):
    with pytest.raises(InputError) as caught:
        parse_config(raw, source="file.toml")
    text = str(caught.value)
    assert text.startswith("file.toml: ")
    assert len(text.splitlines()) == 1
    return text


def test_the_tables_were_found():
    # The tests below are only as good as these lists.
    neither = {key for key in DEFAULTS if key not in NUMBERS and key not in WORDS}
    assert neither == {
        "budget.completions",
        "budget.scaffolds",
        "budget.steps",
        "chat.template_kwargs",
        "evaluate.budgets",
        "evaluate.sets",
        "live.planted",
        "live.ranges",
        "live.release.gate",
        "live.release.guardrails",
        "live.release.high",
        "live.release.low",
        "live.release.measure_again",
        "live.release.restore",
        "live.release.stages",
        "live.rewards",
        "live.silent",
        "line",
        "midtrain",
        "rollout.allocation.bands",
        "rollout.thinking",
        "task.data",
        "task.messages",
        "task.mixture",
        "task.tool_servers",
        "task.tools",
        "task.options",
        "train.adapter.alpha_pattern",
        "train.adapter.modules_to_save",
        "train.adapter.packed_layers",
        "train.adapter.rank_pattern",
        "train.adapter.shared_factor",
        "train.adapter.targets",
        "train.adapter.use_rslora",
        "train.adapters",
        "train.also_publish",
        "train.dropout",
        "train.fp32_head",
        "train.compaction",
        "train.loss.clip_high",
        "train.loss.clip_low",
        "train.loss.corrections",
        "train.loss.dual_clip",
        "train.loss.lengths",
        "train.loss.mask_overlong",
        "train.optimizer.decay_all",
        "train.optimizer.groups",
        "workers.allow",
        "shape",
    }
    assert len(NUMBERS) > 30
    assert {"train.optimizer.learning_rate", "rollout.temperature"} <= set(FLOATS)
    assert {"name", "model.path", "model.build.family", "task.prompt"} <= set(WORDS)


@pytest.mark.parametrize("dotted", sorted(DEFAULTS))
def test_a_misspelt_key_is_named_with_the_nearest(dotted):
    text = refusal(with_key(f"{dotted}x", 1))
    assert f"unknown key {dotted}x" in text
    assert f"did you mean {dotted}?" in text


@pytest.mark.parametrize("table", ["model", "model.build", "task", "warm_start", "train"])
def test_a_key_like_no_other_lists_the_valid_ones(table):
    text = refusal(with_key(f"{table}.zzzzzzzz", 1))
    assert f"unknown key {table}.zzzzzzzz" in text
    assert "valid keys here: " in text
    here = {key for key in DEFAULTS if key.startswith(f"{table}.")}
    assert all(key.removeprefix(f"{table}.").split(".")[0] in text for key in here)


@pytest.mark.parametrize("dotted", ["train.optimizer.beta1", "train.optimizer.beta2"])
def test_an_average_that_never_moves_is_refused(dotted):
    """The optimizer would refuse it, hours later and in other words."""
    assert f"`{dotted}`" in refusal(with_key(dotted, 1.0))


@pytest.mark.parametrize("dotted", NUMBERS)
def test_a_wrong_number_is_named(dotted):
    for value in ("1", True, [1], {"x": 1}, None, -1, 10**18, math.nan, math.inf, -math.inf):
        assert f"`{dotted}`" in refusal(with_key(dotted, value)), value


@pytest.mark.parametrize("dotted", sorted(set(NUMBERS) - set(FLOATS)))
def test_half_a_count_is_refused(dotted):
    assert f"`{dotted}`" in refusal(with_key(dotted, 2.5))


@pytest.mark.parametrize("dotted", WORDS)
def test_a_wrong_word_is_named(dotted):
    for value in (1, True, ["a"], {"x": 1}, None):
        assert f"`{dotted}`" in refusal(with_key(dotted, value)), value


@pytest.mark.parametrize("table", ["model", "task", "warm_start", "rollout", "train", "evaluate"])
@pytest.mark.parametrize("value", [1, "x", [], None])
def test_a_table_must_be_a_table(table, value):
    assert f"`{table}`" in refusal({"name": "run", table: value})


@pytest.mark.parametrize(
    "name", ["", "-a", ".", "..", "a/b", "a b", "a\n", "a\0", "ü", "a" * 65, "../a"]
)
def test_hostile_names(name):
    assert "`name`" in refusal({**SMALLEST, "name": name})


@pytest.mark.parametrize("name", ["a", "0", "a.b-c_d", "a" * 64])
def test_good_names(name):
    assert parse_config({**SMALLEST, "name": name}, source="s").name == name


def test_a_name_is_required():
    assert "`name`" in refusal({"model": {"build": {}}})


def test_the_prompt_must_hold_the_question():
    text = refusal(with_key("task.prompt", "{query}"))
    assert "task.prompt must contain {question}" in text


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        ({"packed": "int4-g32"}, "does not serve packed weights"),
        ({"modules_to_save": ["lm_head"]}, "does not serve modules trained whole"),
        ({"targets": ["q_proj", "experts"]}, "does not serve an adapter of 'experts'"),
        ({"targets": ["kv_b_proj"]}, "does not serve an adapter of 'kv_b_proj'"),
        ({"targets": ["mlp.gate_up_proj"]}, "does not serve an adapter of 'mlp.gate_up_proj'"),
        ({"rank": 513}, "rank 513 is above rollout.engine vllm's largest, 512"),
        ({"rank_pattern": {"q_proj": 600}}, "rank 600 is above"),
    ],
)
def test_adapters_that_vllm_does_not_serve_are_refused(adapter, named):
    raw = with_key("rollout.engine", "vllm")
    for targets in (["all-linear"], ["embed_tokens", "lm_head"]):
        served = {**raw, "train": {"adapter": {"kind": "lora", "targets": targets}}}
        assert parse_config(served, source="s").rollout.engine == "vllm"
    served["train"] = {"adapter": {"kind": "lora", **adapter}}
    assert named in refusal(served)
    if "packed" not in adapter:  # Readers of merged weights see no adapter.
        parse_config({**served, "train": {**served["train"], "exporter": "merged"}}, source="s")


def test_what_sglang_does_not_serve_is_refused():
    raw = with_key("rollout.engine", "sglang")
    assert parse_config(raw, source="s").rollout.engine == "sglang"
    adapter = {"adapter": {"kind": "lora"}}
    assert "does not serve adapters" in refusal({**raw, "train": adapter})
    parse_config({**raw, "train": {**adapter, "exporter": "merged"}}, source="s")


def test_vllm_cannot_truncate_at_another_temperature():
    rollout = {"engine": "vllm", "top_p": 0.9, "temperature": 0.7}
    assert "at temperature 0.7" in refusal({**SMALLEST, "rollout": rollout})
    for changes in ({"temperature": 1.0}, {"engine": "transformers"}, {"top_p": 1.0}):
        parse_config({**SMALLEST, "rollout": rollout | changes}, source="s")


def test_the_smallest_run_has_a_default_for_everything():
    config = parse_config({"name": "run"}, source="s")
    assert config == RunConfig(name="run")
    assert config.model.build is None
    assert (config.train.max_staleness, config.rollout.group_size) == (2, 8)


def test_options_are_the_datasets_own():
    options = {"min_len": 3, "deep": {"list": [1, 2.5, "x", True]}}
    assert parse_config(with_key("task.options", options), source="s").task.options == options


OTHER = {
    "retain.lineage_days": 8.0,  # At least `live.max_age_s`.
    "rollout.scaffold": "check_and_retry",
    "budget.completions": [4, 8],
    "budget.measure": "reward",
    "budget.scaffolds": ["plain", "check_and_retry"],
    "budget.steps": [1, 2],
    "live.baseline": "learned",
    "live.reward_function": "my.rewards:live",
    "live.release.gate": {"hard": 0.1},
    "live.release.guardrails": {"long": 0.1},
    "live.release.high": 2.0,
    "live.release.low": -1.0,
    "live.release.restore": False,
    "live.release.stages": [0.1, 0.9],
    "live.release.unit": "answer",
    "live.ranges": {"score": [1.0, 10.0]},
    "live.rewards": {"score": 0.5},
    "live.silent": 0.0,
    "train.masters": "published",
    "train.final_checkpoint": "always",
    "train.packing": "off",
    "train.activation_checkpointing": "full",
    "train.also_publish": ["fp8-block"],
    "device": "cpu",
    "train.compute": "bfloat16",
    "train.device": "cuda",
    "rollout.device": "cuda:3",
    "evaluate.device": "mps",
    "probes.action": "stop",
    "rollout.on_full": "drop",
    "rollout.on_failure": "stop",
    "train.loss.advantage": "leave_one_out",
    "train.loss.aggregation": "dr_grpo",
    "train.loss.corrections": [
        {"level": "geometric", "action": "mask", "low": 0.9, "high": 1.1, "weigh": False}
    ],
    "train.loss.clip_high": 0.3,
    "train.loss.clip_low": 0.1,
    "train.loss.dual_clip": 3.0,
    "train.loss.kl": "k3",
    "train.loss.lengths": [
        {"kind": "overlong", "limit": 9, "cushion": 3, "alpha": 0.5, "delta": 0.25}
    ],
    "train.loss.surrogate": "cispo",
    "train.staleness.policy": "windowed_fifo",
    "train.offload": "optimizer",
    "train.publisher_offload": "disk",
    "train.adapter.kind": "lora",
    "train.adapter.targets": ["q_proj"],
    "train.optimizer.kind": "muon",
    "train.optimizer.muon_scale": "original",
    "train.optimizer.groups": [
        {"names": "router", "kind": None, "learning_rate": 0.5, "weight_decay": 0.0}
    ],
    "rollout.allocation.policy": "refill",
    "train.loss.preference.kind": "dpo",
    "rollout.engine": "vllm",
    "rollout.reuse.train": "every",
    "rollout.precision": "bfloat16",
    "task.messages": [{"role": "user", "content": "{question}"}],
    "task.reward": "my.rewards:reward",
    "parity.routes": "record",
    "workers.allow": ["w*", "lab-7"],
}
"""The value that a key is changed to if its default says too little."""


TOGETHER = {
    "budget.controller",
    "model.build.family",
    "reference.mode",
    "reference.model",
    "train.adapter.dropout",
    *("train.adapter.packed", "train.adapter.packed_layers", "train.adapter.init"),
    *("train.adapter.alpha_pattern", "train.adapter.rank_pattern"),
    *("train.adapter.modules_to_save", "train.adapter.use_rslora", "train.adapters"),
    *(f"train.{key}" for key in ("replicate", "tensor_parallel", "expert_parallel")),
    "train.loss.ratio_base",
    *(f"train.loss.kto.{key}" for key in ("beta", "desirable_weight", "undesirable_weight")),
    *(f"train.loss.preference.{key}" for key in ("beta", "coefficient", "margin")),
    *(f"train.schedule.{key}" for key in ("kind", "steps", "decay_steps", "floor")),
    *(
        "evaluate.budgets",
        "evaluate.sets",
        "live.planted",
        "live.rewards",
        "live.silent",
        "task.data",
        "task.mixture",
        "task.tool_servers",
        "task.tools",
        "midtrain",
        "line",
        "rollout.allocation.bands",
        "rollout.reuse.episodes",
        "rollout.thinking",
        "rollout.weights",
    ),
}
"""Keys of which one alone is refused; other tests have them."""


@pytest.mark.parametrize("dotted", sorted(DEFAULTS.keys() - TOGETHER))
def test_round_trip_with_every_key_changed(dotted):
    default = DEFAULTS[dotted]
    if dotted in OTHER:
        value = OTHER[dotted]
    elif isinstance(default, dict):
        value = {"size": 3}
    elif isinstance(default, str):
        value = f"{default}1"
    elif isinstance(default, bool):
        value = not default
    else:
        value = default / 2 or 0.5 if isinstance(default, float) else default + 1
    config = parse_config(with_key(dotted, value), source="s")
    assert flatten(config) == {**DEFAULTS, dotted: value}
    plain = msgspec.to_builtins(config)
    assert parse_config(plain, source="s") == config
    assert parse_config(json.loads(msgspec.json.encode(plain)), source="s") == config
    smallest = parse_config(SMALLEST, source="s")
    wanted = [] if dotted in RESUMABLE else [dotted]
    assert differences(config, smallest) == differences(smallest, config) == wanted


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "linear", "steps": 100},
        {"kind": "cosine", "steps": 100, "floor": 0.1},
        {"kind": "wsd", "steps": 100, "decay_steps": 80},
    ],
)
def test_schedules(schedule):
    config = parse_config(with_key("train.schedule", schedule), source="s")
    assert msgspec.to_builtins(config.train.schedule) | schedule == msgspec.to_builtins(
        config.train.schedule
    )


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        ({"steps": 10}, "takes no steps"),
        ({"floor": 0.5}, "takes no steps"),
        ({"kind": "cosine"}, "steps above warmup_steps"),
        ({"kind": "linear", "steps": 20}, "steps above warmup_steps"),
        ({"kind": "linear", "steps": 200, "decay_steps": 3}, "belongs to wsd"),
        ({"kind": "wsd", "steps": 200}, "belongs to wsd"),
        ({"kind": "wsd", "steps": 200, "decay_steps": 181}, "overlap"),
    ],
)
def test_a_schedule_that_contradicts_itself(schedule, named):
    assert named in refusal(with_key("train.schedule", schedule))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"reference.mode": "process"}, "no effect without a penalty"),
        ({"reference.model": "teacher"}, "no effect without a penalty"),
        ({"train.loss.policy_coefficient": 0.0}, "nothing to train on"),
        ({"train.loss.kl": "k2", "reference.mode": "adapter_off"}, "needs an adapter"),
        (
            {
                "train.loss.kl": "k2",
                "train.adapter.kind": "lora",
                "reference.mode": "adapter_off",
                "reference.model": "teacher",
            },
            "not reference.model",
        ),
    ],
)
def test_a_reference_that_contradicts_the_loss(keys, named):
    raw = json.loads(json.dumps(SMALLEST))
    for dotted, value in keys.items():
        *tables, key = dotted.split(".")
        at = raw
        for table in tables:
            at = at.setdefault(table, {})
        at[key] = value
    assert named in refusal(raw)


def test_a_parameter_group_that_is_no_pattern():
    assert "not a regular expression" in refusal(
        with_key("train.optimizer.groups", [{"names": "("}])
    )


def test_tables_within_tables_survive_a_round_trip():
    task = {"environment": "dataset", "data": {"path": "x", "answer": "a"}}
    entry = {"name": "one", "weight": 2.0, "task": task}
    raw = {**SMALLEST, "task": {"mixture": [entry]}, "evaluate": {"sets": [entry | {}]}}
    del raw["evaluate"]["sets"][0]["weight"]
    config = parse_config(raw, source="s")
    assert config.task.mixture[0].task.data.path == "x"
    assert parse_config(json.loads(msgspec.json.encode(config)), source="s") == config
    smallest = parse_config(SMALLEST, source="s")
    assert differences(config, smallest) == ["evaluate.sets", "task.mixture"]
    entry["task"]["data"]["pth"] = "y"
    assert "unknown key task.mixture.task.data.pth; did you mean" in refusal(raw)


def test_the_documentation_names_the_keys_that_may_change():
    text = (Path(__file__).parents[2] / "docs" / "TRAINING.md").read_text()
    section = text[text.index("## Settings that may change") :]
    sections = {key for key in RESUMABLE if f"[{key.rpartition('.')[0]}]" in section}
    for key in RESUMABLE.keys() - sections:
        assert re.search(rf"[`.]{key.split('.')[-1]}`", section), key
    tables = set(re.findall(r"`\[([a-z_.]+)\]`", section))
    for key in DEFAULTS:
        assert key in RESUMABLE or key.rpartition(".")[0] not in tables, key


RUNS = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name != "plans")
"""Configurations of runs; plans of fleets have tests of their own."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_examples_are_valid(path):
    assert load_config(path).name


def test_resumable_keys_exist():
    assert not RESUMABLE.keys() - DEFAULTS.keys()


def test_a_model_from_elsewhere_is_a_difference():
    built = parse_config(SMALLEST, source="s")
    path = parse_config({"name": "run", "model": {"path": "x"}}, source="s")
    found = differences(built, path)
    assert "model.path" in found
    assert "model.build.hidden_size" in found
    assert differences(built, built) == []


def test_load_toml_and_json(tmp_path):
    toml, other = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('name = "run"\n[model.build]\nlayers = 2\n[train]\nversions = 7\n')
    config = load_config(toml)
    assert (config.name, config.model.build.layers, config.train.versions) == ("run", 2, 7)
    other.write_bytes(msgspec.json.encode(config))
    assert load_config(other) == config


BROKEN = {
    "no TOML": b"name = ",
    "bytes that are no text": b'name = "\xff"',
    "deep nesting": b"x = " + b"[" * 20_000 + b"]" * 20_000,
    "a huge integer": b"seed = " + b"1" * 5000,
    "a key twice": b'name = "a"\nname = "b"',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path, name):
    path = tmp_path / "broken.toml"
    path.write_bytes(BROKEN[name])
    with pytest.raises(InputError, match=r"broken\.toml is not TOML") as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match="cannot read the configuration"):
            load_config(path)


def test_a_file_beyond_the_limit(tmp_path):
    path = tmp_path / "big.toml"
    start = b'name = "run"\n[model.build]\n#'
    path.write_bytes(start + b" " * (MAX_CONFIG_BYTES - len(start)))
    assert load_config(path).name == "run"
    path.write_bytes(start + b" " * (MAX_CONFIG_BYTES - len(start) + 1))
    with pytest.raises(InputError, match="limit of a configuration"):
        load_config(path)


def test_a_file_without_a_model(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('name = "run"')
    with pytest.raises(InputError, match="does not name a model"):
        load_config(path)


KTO = {"surrogate": "kto", "advantage": "given", "aggregation": "seq_mean_token_mean"}
CONTRADICTIONS = {
    "twice": ({"corrections": [{}]}, 2, "again"),
    "twice, bounded": ({"surrogate": "cispo", "corrections": [{"action": "mask"}]}, 0, "again"),
    "two weights": ({"ratio_base": "old", "corrections": [{}, {"level": "sequence"}]}, 2, "twice"),
    "deep": ({"ratio_base": "old"}, 2, "2 versions old"),
    "deep without a ratio": ({"surrogate": "reinforce"}, 5, "5 versions old"),
    "bounds": ({"ratio_base": "old", "corrections": [{"low": 3.0}]}, 2, "low is not below high"),
    "nothing": ({"ratio_base": "old", "corrections": [{"weigh": False}]}, 2, "nothing to truncate"),
    "no bound": (
        {"ratio_base": "old", "corrections": [{"low": 0.5}]},
        2,
        "truncate has no lower bound",
    ),
    "dual": ({"surrogate": "gspo", "dual_clip": 3.0}, 2, "dual_clip"),
    "dual below 1": ({"dual_clip": 0.5}, 2, "dual_clip"),
    "negative ratio": ({"clip_low": 1.5}, 2, "below 0"),
    "bounds of none": ({"surrogate": "reinforce", "clip_high": 0.2}, 0, "has no bounds"),
    "unknown": ({"surrogate": "gpso"}, 0, "there is no surrogate 'gpso'"),
    "KTO of advantages": ({**KTO, "advantage": "group_std"}, 0, "good answers from bad ones"),
    "KTO by length": ({**KTO, "aggregation": "token_mean"}, 0, "a loss of whole answers"),
    "KTO, weighted": ({**KTO, "corrections": [{}]}, 0, "takes answers of any policy"),
    "KTO, bounded": ({**KTO, "clip_low": 0.1}, 0, "has no bounds"),
    "KTO of nothing": (
        {**KTO, "kto": {"desirable_weight": 0.0, "undesirable_weight": 0.0}},
        0,
        "nothing is trained on",
    ),
    "settings of KTO": ({"kto": {"beta": 0.5}}, 0, "has no effect on ppo"),
    "settings of pairs": ({"preference": {"beta": 0.5}}, 0, "no effect without its kind"),
    "a margin of DPO": (
        {"preference": {"kind": "dpo", "margin": 1.0}},
        0,
        "margin has no effect on dpo",
    ),
    "old answers next to pairs": (
        {"ratio_base": "old", "preference": {"kind": "dpo"}},
        2,
        "2 versions old",
    ),
}
SENSIBLE = {
    "TIS": ({"ratio_base": "old", "corrections": [{}]}, 8),
    "PPO": ({}, 8),
    "rejection with the anchor": (
        {"corrections": [{"level": "geometric", "action": "mask", "low": 0.9, "weigh": False}]},
        8,
    ),
    "rejection with a weight": (
        {"ratio_base": "old", "corrections": [{}, {"action": "mask", "weigh": False}]},
        8,
    ),
    "one step old": ({"ratio_base": "old"}, 1),
    "truncated REINFORCE": ({"surrogate": "reinforce", "corrections": [{"high": 1.02}]}, 8),
    "CISPO, free below": ({"surrogate": "cispo", "clip_low": 2.0}, 4),
    "KTO of old answers": ({**KTO, "kto": {"beta": 0.5, "undesirable_weight": 2.0}}, 100),
    "pairs of old answers": (
        {"ratio_base": "old", "policy_coefficient": 0.0, "preference": {"kind": "simpo"}},
        100,
    ),
    "a margin": ({"preference": {"kind": "simpo", "beta": 2.0, "margin": 1.0}}, 0),
    "KTO, rejecting": ({**KTO, "corrections": [{"action": "mask", "weigh": False}]}, 100),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_losses_that_make_no_sense_are_refused_with_the_reason(name):
    loss, staleness, reason = CONTRADICTIONS[name]
    raw = {**SMALLEST, "train": {"max_staleness": staleness, "loss": loss}}
    with pytest.raises(InputError, match=reason) as caught:
        parse_config(raw, source="here")
    assert "here: train: " in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", SENSIBLE)
def test_losses_that_make_sense_are_taken(name):
    loss, staleness = SENSIBLE[name]
    parse_config({**SMALLEST, "train": {"max_staleness": staleness, "loss": loss}}, source="here")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"live": {"baseline": "sign"}}, "live.baseline sign leaves ppo without a baseline"),
        (
            {"train": {"loss": KTO}, "rollout": {"max_turns": 2, "reuse": {"episodes": 2}}},
            "takes whole answers, and some share tokens",
        ),
        ({"train": {"loss": KTO}, "retain": {"versions": 9}}, "would delete version 0"),
        ({"train": {"loss": KTO}, "reference": {"mode": "adapter_off"}}, "needs an adapter"),
        ({"train": {"loss": {**KTO, "policy_coefficient": 0.0}}}, "nothing to train on"),
    ],
)
def test_kto_needs_good_and_bad_answers_whole_and_a_reference(sections, reason):
    with pytest.raises(InputError, match=reason) as caught:
        parse_config({**SMALLEST, **sections}, source="here")
    assert caught.value.hint


def test_kto_has_a_reference_without_a_penalty():
    raw = {**SMALLEST, "train": {"loss": KTO}, "live": {"baseline": "sign"}}
    assert parse_config(raw, source="here").reference_mode == "sleeping"
    raw["train"] |= {"adapter": {"kind": "lora"}}
    assert parse_config(raw, source="here").reference_mode == "adapter_off"
    raw["reference"] = {"mode": "process"}
    assert parse_config(raw, source="here").reference_mode == "process"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("dpo", "sleeping"), ("dpo_norm", "sleeping"), ("ipo", "sleeping"), ("simpo", "none"),
     ("supervised", "none"), ("none", "none")],
)  # fmt: skip
def test_losses_of_pairs_have_the_reference_that_they_need(kind, mode):
    raw = {**SMALLEST, "train": {"loss": {"preference": {"kind": kind}}}}
    assert parse_config(raw, source="here").reference_mode == mode
    raw["train"]["loss"] |= {"policy_coefficient": 0.0}
    if kind == "none":
        with pytest.raises(InputError, match="nothing to train on"):
            parse_config(raw, source="here")
    else:
        assert parse_config(raw, source="here").train.loss.only_pairs


@pytest.mark.parametrize(
    ("surrogate", "bounds"),
    [("ppo", (0.2, 0.28)), ("cispo", (1.0, 4.0)), ("gspo", (3e-4, 4e-4)), ("dppo", (0.2, 0.28))],
)
def test_bounds_default_to_those_of_the_surrogate(surrogate, bounds):
    """GSPO with PPO's bounds never clips, and CISPO with them clips nearly everything."""
    loss = LossConfig(surrogate=surrogate)
    assert loss.clip_bounds == bounds
    assert LossConfig(surrogate=surrogate, clip_low=0.5).clip_bounds == (0.5, bounds[1])


TIS = {"ratio_base": "old", "corrections": [{}]}
IMPOSSIBLE = {
    "a window at 0": ({"staleness": {"policy": "windowed_fifo"}, "max_staleness": 0}, "= 0"),
    "requeue at 0": (
        {"staleness": {"policy": "requeue"}, "max_staleness": 0, "loss": TIS},
        "max_staleness = 0",
    ),
    "requeue anchored on the sampler": ({"staleness": {"policy": "requeue"}}, "too old"),
    "requeue without a correction": (
        {"staleness": {"policy": "requeue"}, "loss": {"ratio_base": "old"}},
        "too old",
    ),
    "requeue younger than fresh": (
        {"staleness": {"policy": "requeue", "requeue_age": 2}, "loss": TIS},
        "requeue_age",
    ),
    "a window makes it deep": (
        {
            "staleness": {"policy": "windowed_fifo"},
            "max_staleness": 1,
            "loss": {"ratio_base": "old"},
        },
        "2 versions old",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_staleness_is_refused_with_the_reason(name):
    train, reason = IMPOSSIBLE[name]
    with pytest.raises(InputError, match=reason) as caught:
        parse_config({**SMALLEST, "train": train}, source="here")
    assert caught.value.hint


def test_more_groups_than_a_manifest_can_name_are_refused_before_the_run():
    """The first commit refused them, after a step was made."""
    assert parse_config({**SMALLEST, "train": {"groups_per_step": MOST_GROUPS}}, source="here")
    with pytest.raises(InputError, match="has room for 8,192 groups: groups_per_step is 8,193"):
        parse_config({**SMALLEST, "train": {"groups_per_step": MOST_GROUPS + 1}}, source="here")


@pytest.mark.parametrize(
    ("groups", "extra"),
    [
        (MOST_GROUPS, {}),
        (
            MOST_GROUPS // 4,
            {
                "parts": [1] * (MOST_GROUPS // 4),
                "prompts": [
                    PromptRecord(
                        position=(1 << 62) - 1, task="f" * 16, verdict="partial", pilot=4096,
                        completions=4096, finished=4096, successes=4096, defers=1000,
                    )
                ]
                * (MOST_GROUPS // 4),
            },
        ),
    ],
)  # fmt: skip
def test_as_many_groups_as_are_allowed_fit_with_the_longest_names(groups, extra):
    metadata = CommitMetadata(
        step=10**10 - 1,
        consumed=[("w" * 63, 10**10 - 1)] * groups,
        hashes=["f" * GROUP_HASH_DIGITS] * groups,
        **extra,
    )
    size = len(msgspec.json.encode(metadata.to_dict()))
    assert size < 0.9 * MAX_METADATA_BYTES  # The rest is for groups that were dropped.


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("groups", [1, 7, 16])
@pytest.mark.parametrize("policy", ["strict", "windowed_fifo", "requeue"])
def test_the_configuration_states_the_policys_own_bound(policy, groups, bound):
    train = TrainConfig(
        max_staleness=bound, groups_per_step=groups, staleness=StalenessConfig(policy=policy)
    )
    assert policy_of(train).largest_age == train.largest_age


def test_an_unknown_key_of_a_correction_is_named():
    raw = {**SMALLEST, "train": {"loss": {"corrections": [{"hihg": 2.0}]}}}
    with pytest.raises(InputError, match=r"corrections\.hihg") as caught:
        parse_config(raw, source="here")
    assert "high" in caught.value.hint


def test_what_the_document_shows_is_taken():
    """The correction's example in docs/TRAINING.md is a configuration."""
    text = (Path(__file__).parents[2] / "docs" / "TRAINING.md").read_text()
    raw = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    config = parse_config({**SMALLEST, **raw}, source="docs")
    assert [c.level for c in config.train.loss.corrections] == ["token", "geometric"]


def test_a_run_of_before_dithering_goes_on_as_it_began():
    stored = msgspec.to_builtins(RunConfig(name="old"))
    assert run_config(stored, url="mem").train.masters == "dithered"
    del stored["train"]["masters"]
    assert run_config(stored, url="mem").train.masters == "published"
    assert "masters" not in stored["train"]


def test_a_run_with_a_fused_product_is_read_without_it():
    stored = msgspec.to_builtins(RunConfig(name="old"))
    stored["train"]["adapter"]["packed_matmul"] = "fused"
    assert run_config(stored, url="mem") == RunConfig(name="old")
    assert stored["train"]["adapter"]["packed_matmul"] == "fused"
    with pytest.raises(InputError, match=r"unknown key train\.adapter\.packed_matmul"):
        parse_config(stored, source="new.toml")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"train": {"ranks": 2}}, "steps of 2 ranks cannot be verified"),
        ({"midtrain": {"streams": [{"path": "x.jsonl"}]}}, "mid-training has none"),
    ],
)
def test_no_interval_is_kept_that_cannot_be_verified(values, says):
    parse_config({"name": "r", "retain": {"proofs": 0}, **values}, source="test")
    with pytest.raises(InputError, match=says):
        parse_config({"name": "r", "retain": {"proofs": 2}, **values}, source="test")
