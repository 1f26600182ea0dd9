"""The controller's decisions follow from evaluations, and are applied within the run's limits."""

import io
import tomllib
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from deltawire.cli.main import main
from deltawire.config import ThinkingConfig, parse_config
from deltawire.dashboard.budget_view import budget_table
from deltawire.dashboard.figures import value
from deltawire.dashboard.series import notes
from deltawire.dashboard.state import RunState
from deltawire.errors import InputError
from deltawire.estimates import BudgetSetting, SettingScore
from deltawire.events import Evaluated, decode_lines, encode_lines
from deltawire.launch.budget import compare
from deltawire.rl.budget.controller import BudgetFollower
from deltawire.rl.budget.decision import BudgetHistory, replay
from deltawire.rl.budget.limits import BudgetLimits
from deltawire.rl.budget.statistics import paired, slope
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.rollout.episode_types import EpisodeLimits, with_budget, with_setting
from deltawire.rl.trainer.settings import config_of_step, moved_settings
from deltawire.store import open_bucket
from deltawire.wire import keys

PROBLEMS = 100
RAW = {
    "name": "run",
    "model": {"build": {"context": 256}},
    "rollout": {
        "group_size": 8,
        "max_tokens": 20,
        "context": 128,
        "thinking": {"start": "(", "end": ")", "budgets": [4, 8, 14], "answer_tokens": 4},
    },
    "train": {"groups_per_step": 16},
    "evaluate": {"every": 10},
    "budget": {"controller": "auto"},
}
TRAINING = {"controller": "auto", "completions": [4, 8, 16], "steps": [1, 2]}
SCAFFOLDS = {"controller": "auto", "scaffolds": ["plain", "check_and_retry"]}


def configured(budget=None, *, budgets=(4, 8, 14), **rollout):
    thinking = {**RAW["rollout"]["thinking"], "budgets": [*budgets]}
    rollout = {**RAW["rollout"], **rollout, "thinking": thinking}
    raw = {**RAW, "rollout": rollout, "budget": budget or RAW["budget"]}
    return parse_config(raw, source="s")


CONFIG = configured()


def score(thinking, accuracy, scaffold="plain", *, tokens=None, seconds=0.0):
    """Every problem below the accuracy is solved, so that gains are paired."""
    solved = round(accuracy * PROBLEMS)
    return SettingScore(
        thinking=thinking,
        scaffold=scaffold,
        correct=[1.0] * solved + [0.0] * (PROBLEMS - solved),
        tokens=thinking + 1.0 if tokens is None else tokens,
        seconds=seconds,
    )


def evaluated(version, settings, published=0.0):
    return Evaluated(
        process="evaluator", at=float(version), version=version, accuracy=0.5,
        problems=PROBLEMS, seconds=1.0, settings=settings, published=published,
    )  # fmt: skip


def thinking(version, *accuracies, budgets=(4, 8, 14), **kwargs):
    found = [score(b, a, **kwargs) for b, a in zip(budgets, accuracies, strict=True)]
    return evaluated(version, found)


LONGER_PAYS = [thinking(10 * n, 0.3, 0.5, 0.8) for n in range(5)]
STEPS_PAY = [thinking(10 * n, *[0.3 + 0.1 * n] * 3) for n in range(6)]
UNCERTAIN = [thinking(10 * n, 0.5, 0.5, 0.51) for n in range(6)]


def settings(events, config=CONFIG):
    return [one.after for one in replay(events, config)]


def budgets(events, config=CONFIG):
    return [one.thinking for one in settings(events, config)]


def test_thinking_grows_where_it_gains_more_than_steps():
    assert budgets(LONGER_PAYS) == [8, 14, 14, 14, 14]
    move = replay(LONGER_PAYS, CONFIG)[1]
    assert (move.before.thinking, move.after.thinking) == (8, 14)
    assert "longer thinking gains more than further steps would: +0.300" in move.reason
    longer = next(one for one in move.uses if one.use == "longer thinking")
    # 6 tokens more in each of 16 · 8 completions and 10 versions, sampled and trained on.
    assert longer.tokens == pytest.approx(16 * 8 * 10 * 6 * 2)
    assert longer.gain == pytest.approx(0.3)


def test_thinking_shrinks_where_steps_gain_and_it_does_not():
    assert budgets(STEPS_PAY) == [8, 4, 4, 4, 4, 4]
    assert "shorter thinking leaves tokens to further steps" in replay(STEPS_PAY, CONFIG)[1].reason


def test_uncertain_gains_move_nothing():
    assert budgets(UNCERTAIN) == [8] * 6
    assert replay(UNCERTAIN, CONFIG)[-1].reason.startswith("no other use of tokens is better")


def test_a_move_is_followed_by_a_rest():
    events = LONGER_PAYS[:2] + [thinking(10 * n, *[0.5 + 0.12 * (n - 1)] * 3) for n in range(2, 6)]
    found = replay(events, CONFIG)
    assert [one.after.thinking for one in found][:4] == [8, 14, 14, 14]
    assert found[2].reason == found[3].reason == "it was moved a short time ago"


def test_one_place_at_a_time_and_never_beyond_the_limits():
    config = configured(budgets=(2, 4, 8, 14))
    events = [thinking(10 * n, 0.1, 0.3, 0.6, 0.9, budgets=(2, 4, 8, 14)) for n in range(9)]
    assert budgets(events, config) == [4, 8, 8, 8, 14, 14, 14, 14, 14]


def test_bytes_and_environment_seconds_are_in_the_price():
    priced = {"controller": "auto", "byte_tokens": 0.01, "second_tokens": 100.0}
    events = [
        evaluated(0, [score(b, 0.5, seconds=0.2) for b in (4, 8, 14)]),
        evaluated(10, [score(b, 0.5, seconds=0.2) for b in (4, 8, 14)], published=5e5),
    ]
    price = replay(events, configured(priced))[1].price
    assert price["sampled"] == price["trained"] == 16 * 8 * 9.0
    assert price["published"] == pytest.approx(5e5 * 0.01)
    assert price["environment"] == pytest.approx(16 * 8 * 0.2 * 100.0)


def test_dear_versions_keep_the_thinking_that_cheap_ones_would_give_up():
    events = [
        evaluated(10 * n, [score(b, 0.3 + 0.1 * n + 0.01 * (b > 4)) for b in (4, 8, 14)], 1e7)
        for n in range(4)
    ]
    cheap = configured({"controller": "auto", "byte_tokens": 0.0})
    dear = configured({"controller": "auto", "byte_tokens": 1.0})
    assert budgets(events, cheap)[1] == 4
    assert budgets(events, dear)[1] == 8


def training_run(gain_of, count=14):
    """Evaluations of a run whose gain per interval depends on the setting in force."""
    config = configured(TRAINING, budgets=(8,))
    history, accuracy, found = BudgetHistory(config), 0.1, []
    for number in range(count):
        event = evaluated(10 * number, [score(8, accuracy)])
        found.append(event)
        history.observe(event)
        accuracy = min(1.0, accuracy + gain_of(history.setting))
    return config, found


def test_completions_and_steps_are_tried_and_the_better_ones_kept():
    config, events = training_run(lambda s: 0.04 if s.steps == 2 else 0.01, count=20)
    found = settings(events, config)
    assert {one.completions for one in found} > {8}
    assert {one.steps for one in found} == {1, 2}
    assert sum(one.steps == 2 for one in found) > len(found) / 2
    reasons = [one.reason for one in replay(events, config) if one.moved]
    assert any("not tried yet" in reason for reason in reasons)
    untried = replay(events, config)[1].uses[-1]
    assert (untried.gain, untried.error) == (None, None)


def scaffolded(version, plain, retried, tokens=20.0):
    return evaluated(
        version, [score(8, plain), score(8, retried, "check_and_retry", tokens=tokens)]
    )


def test_a_better_scaffold_is_used():
    config = configured(SCAFFOLDS, budgets=(8,))
    events = [scaffolded(10 * n, 0.3, 0.6) for n in range(3)]
    assert [one.scaffold for one in settings(events, config)] == ["plain"] + ["check_and_retry"] * 2


def test_a_scaffold_comes_first_only_below_the_threshold():
    """Both are better; the scaffold by less."""

    def event(version):
        both = [score(b, a) for b, a in ((8, 0.4), (14, 0.7))]
        retried = [score(b, a + 0.15, "check_and_retry") for b, a in ((8, 0.4), (14, 0.7))]
        return evaluated(version, both + retried)

    events = [event(0), event(10)]
    low = configured({**SCAFFOLDS, "threshold": 0.5}, budgets=(8, 14))
    high = configured({**SCAFFOLDS, "threshold": 0.3}, budgets=(8, 14))
    assert settings(events, low)[1].scaffold == "check_and_retry"
    assert settings(events, high)[1] == BudgetSetting(
        thinking=14, completions=8, steps=1, scaffold="plain"
    )


def test_gains_are_paired_by_problem():
    low, high = score(8, 0.5), score(14, 0.6)
    assert paired([low], [high])[0] == pytest.approx(0.1)
    assert paired([low], [high])[1] == pytest.approx(0.03015, abs=1e-4)
    # A gain that is the same on all problems is known no better than one problem more or less.
    assert paired([low], [low]) == (0.0, 0.01)
    failed = msgspec.structs.replace(high, correct=[-1.0] * 50 + high.correct[50:])
    assert paired([low], [failed])[0] == pytest.approx(0.2)


def test_a_slope_needs_two_versions_and_tokens_between_them():
    scores = [score(8, 0.5), score(8, 0.6), score(8, 0.7)]
    assert slope(scores, [0.0, 1000.0, 2000.0])[0] == pytest.approx(1e-4)
    assert slope(scores[:1], [0.0]) is None
    assert slope(scores[:2], [5.0, 5.0]) is None


def test_evaluations_that_say_nothing_new_are_passed_over():
    history = BudgetHistory(CONFIG)
    assert history.observe(LONGER_PAYS[1]) is not None
    assert history.observe(LONGER_PAYS[1]) is None
    assert history.observe(LONGER_PAYS[0]) is None
    lacking = msgspec.structs.replace(LONGER_PAYS[2], settings=LONGER_PAYS[2].settings[:2])
    assert history.observe(lacking) is None
    other = score(4, 0.3)
    odd = [msgspec.structs.replace(other, correct=other.correct[:9]), *LONGER_PAYS[2].settings[1:]]
    assert history.observe(msgspec.structs.replace(LONGER_PAYS[2], settings=odd)) is None


def test_decisions_survive_their_encoding_and_can_be_replayed():
    config, events = training_run(lambda s: 0.02)
    recorded = replay(events, config)
    stored = decode_lines(encode_lines([*events, *recorded]))
    assert compare(stored[: len(events)], stored[len(events) :], config).equal
    forged = msgspec.structs.replace(
        recorded[3], after=msgspec.structs.replace(recorded[3].after, completions=16, steps=2)
    )
    found = compare(events, [*recorded[:3], forged, *recorded[4:]], config)
    assert found.differ == [forged.version]
    assert compare(events, recorded[:-1], config).differ == [recorded[-1].version]
    assert compare(events[:-1], recorded, config).extra == [recorded[-1].version]


def stored(tmp_path, *segments):
    bucket = open_bucket(f"{tmp_path}/bucket", create=True)
    for number, events in enumerate(segments):
        bucket.put(keys.events("evaluator-1", number), encode_lines(events))
    return bucket


def test_a_trainer_that_starts_again_reaches_the_same_setting(tmp_path):
    decisions, clock = replay(LONGER_PAYS, CONFIG), [0.0]
    bucket = stored(tmp_path, decisions[:1])
    first = BudgetFollower(bucket, CONFIG, clock=lambda: clock[0])
    assert first.poll().thinking == 8
    bucket.put(keys.events("evaluator-1", 1), encode_lines(decisions[1:]))
    assert first.poll().thinking == 8  # Within a second it does not ask again.
    clock[0] += 1.0
    assert first.poll() == decisions[-1].after
    assert BudgetFollower(bucket, CONFIG).poll() == decisions[-1].after


def test_a_setting_outside_the_limits_is_not_followed(tmp_path):
    odd = msgspec.structs.replace(
        replay(LONGER_PAYS, CONFIG)[-1], after=BudgetSetting(thinking=9, completions=8, steps=1)
    )
    assert BudgetFollower(stored(tmp_path, [odd]), CONFIG).poll().thinking == 8


def test_without_a_controller_nothing_is_moved(tmp_path):
    fixed = configured({"controller": "fixed"})
    bucket = stored(tmp_path, replay(LONGER_PAYS, CONFIG))
    assert BudgetFollower(bucket, fixed).poll() is None
    assert moved_settings(None, fixed) == {}


def test_groups_are_made_with_the_setting():
    setting = BudgetSetting(thinking=14, completions=4, steps=2, scaffold="check_and_retry")
    rollout = with_setting(CONFIG.rollout, setting)
    limits = EpisodeLimits.of(rollout)
    assert (rollout.group_size, limits.scaffold, limits.max_turns) == (4, "check_and_retry", 2)
    assert isinstance(limits.thinking, ThinkingConfig)
    told = [with_budget(limits, version=0, group=f"{n}", episode=n, told=14) for n in range(8)]
    assert {one.budget for one in told} == {14}
    odd = with_budget(limits, version=0, group="n", episode=0, told=9)
    assert odd.budget in {4, 8, 14}


def test_draws_carry_the_completions_that_the_controller_set():
    book = DrawBook()
    book.cover("w0", lease=0, count=1)
    assert book.listed()["w0"][0].sizes == []
    book.completions = 16
    book.cover("w0", lease=0, count=3)
    assert book.listed()["w0"][0].sizes == [0, 16, 16]
    again = DrawBook(next_position=book.next_position, draws=book.listed())
    assert again.listed() == book.listed()


def test_a_step_records_the_optimizer_steps_that_it_was_made_with():
    config = configured(TRAINING)
    recorded = moved_settings(BudgetSetting(steps=2), config)
    assert recorded == {"train.minibatches": 2}
    assert config_of_step(config, recorded).train.minibatches == 2
    assert config_of_step(config, {}).train.minibatches == 1
    assert moved_settings(BudgetSetting(steps=1), config) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate": {"every": 0}}, "needs a held-out set"),
        ({"task": {"heldout": 1}}, "needs a held-out set"),
        ({"rollout": {}}, "has nothing to move between"),
        ({"midtrain": {"streams": [{"path": "x"}]}}, "midtrain"),
        ({"budget": {"controller": "auto", "completions": [16, 8]}}, "completions do not rise"),
        ({"budget": {"controller": "auto", "completions": [4, 16]}}, "lacks rollout.group_size"),
        ({"budget": {"controller": "auto", "steps": [2, 4]}}, "lacks train.minibatches = 1"),
        ({"budget": {"controller": "auto", "steps": [1, 32]}}, "cannot fill 32 optimizer steps"),
        ({"budget": {"controller": "auto", "scaffolds": ["check"]}}, "budget.scaffolds"),
        ({"budget": {"controller": "auto", "scaffolds": ["plain"] * 2}}, "names one twice"),
        ({"budget": {"controller": "always"}}, "budget.controller"),
    ],
)
def test_a_controller_that_cannot_work_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        parse_config({**RAW, **changes}, source="s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgets": [14, 8, 4]}, "do not rise"),
        ({"weights": [1.0, 1.0, 1.0]}, "draws no budgets"),
        ({"per": "episode"}, "draws no budgets"),
    ],
)
def test_budgets_that_cannot_be_moved_between_are_refused(changes, words):
    rollout = {**RAW["rollout"], "thinking": {**RAW["rollout"]["thinking"], **changes}}
    with pytest.raises(InputError, match=words):
        parse_config({**RAW, "rollout": rollout}, source="s")


@pytest.mark.parametrize(
    ("tokens", "published"), [(1e160, 0.0), (10.0, 1e308), (-5.0, 0.0), (10.0, -1e20)]
)
def test_an_event_with_impossible_figures_is_not_read(tokens, published):
    honest = evaluated(0, [score(4, 0.5)])
    event = evaluated(10, [score(4, 0.5, tokens=tokens)], published)
    assert decode_lines(encode_lines([honest, event])) == [honest]


def test_an_interval_that_cost_nothing_says_nothing():
    history = BudgetHistory(configured(TRAINING))
    for version in range(0, 60, 10):
        found = history.observe(thinking(version, 0.2, 0.3, 0.4, tokens=1e-320))
        assert found.before == found.after
    assert not history._pulls


def test_results_that_one_event_cannot_hold_are_refused():
    budgets, scaffolds = [*range(1, 15)], ["plain", "check_and_retry"]
    most = {"controller": "auto", "scaffolds": scaffolds, "problems": 219}
    task = {"heldout": 1000}
    raw = {**RAW, "rollout": {**RAW["rollout"], "max_tokens": 20}, "task": task}
    raw["rollout"]["thinking"] = {**RAW["rollout"]["thinking"], "budgets": budgets}
    config = parse_config({**raw, "budget": most}, source="s")
    scores = [
        SettingScore(thinking=budget, scaffold=one, correct=[0.3333] * 219, tokens=12.345678)
        for budget in budgets
        for one in scaffolds
    ]
    event = evaluated(10, scores)
    assert decode_lines(encode_lines([event])) == [event]
    assert BudgetHistory(config).observe(event) is not None
    with pytest.raises(InputError, match="6160 results") as refused:
        parse_config({**raw, "budget": {**most, "problems": 220}}, source="s")
    assert "219 or fewer" in refused.value.hint


def test_allocated_completions_are_not_moved():
    allocation = {"policy": "pilot", "pilot": 4, "largest": 8}
    with pytest.raises(InputError, match="decides them"):
        configured({"controller": "auto", "completions": [4, 8]}, allocation=allocation)


def test_views_explain_the_newest_decision_and_list_moves():
    state = RunState()
    state.add(replay(LONGER_PAYS, CONFIG))
    assert state.newest_decision.version == 40
    texts = [one.text for one in notes(state)]
    assert len(texts) == 1
    assert "thinking 8 -> 14: longer thinking gains more" in texts[0]
    assert (value("budget_thinking", state), value("budget_moves", state)) == (14, 1)
    assert value("budget_completions", RunState()) is None


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        ([], "all 5 decisions follow from"),
        ([20], "not what the evaluations give: the decisions of 20"),
    ],
)
def test_the_table_of_decisions_says_if_they_follow_from_the_events(differ, words):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(budget_table(replay(LONGER_PAYS, CONFIG), differ=differ))
    shown = console.export_text()
    assert words in shown
    assert "now: thinking 14, 8 completions, 1 optimizer step, scaffold plain" in shown


def test_a_dry_run_says_between_what_the_controller_moves(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        """name = "run"
[model.build]
context = 128
[task]
environment = "serial_steps"
dataset = "parity"
[rollout]
max_tokens = 20
context = 64
thinking = { start = "(", end = ")", budgets = [4, 8, 14], answer_tokens = 4 }
[evaluate]
every = 5
[budget]
controller = "auto"
completions = [8, 16]
"""
    )
    assert main(["run", str(path), "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "may move thinking (4, 8, 14; first 8), completions (8, 16; first 8)" in shown


def test_the_option_of_the_example_is_a_controller():
    text = (Path(__file__).parents[4] / "examples/thinking.toml").read_text()
    option = text[text.index("# [budget]") :].split("#\n")[0].replace("# ", "")
    raw = tomllib.loads(text + option)
    config = parse_config(raw, source="example")
    limits = BudgetLimits.of(config)
    assert limits.line == "thinking (4, 8, 14; first 8), completions (4, 8, 16; first 8)"
