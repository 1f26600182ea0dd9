"""A fleet's plan: its formulas against figures worked out by hand, and every wrong input."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from planned_fleets import RATES, write_plan

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.plan.fleet.description import describe_fleet, reader_share
from deltawire.plan.fleet.planner import make_plan
from deltawire.plan.fleet.rates import (
    CoreCost,
    encode_rates,
    fit_cost,
    read_rates,
    shipped_rates,
)
from deltawire.plan.fleet.request import read_request
from deltawire.plan.fleet.staleness import engines_needed, staleness
from deltawire.plan.fleet.stores import shipped_stores
from deltawire.plan.fleet.transfer import (
    Amounts,
    Fetching,
    Readers,
    Writer,
    follow,
    overlapped,
    publish,
)
from deltawire.plan.fleet.what_if import parse_what_if

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples" / "plans").glob("*.toml"))


def planned(path, changes=None):
    request = read_request(path, changes)
    model = request.architecture(path.parent)
    return make_plan(request, model, RATES, changed=request.changed(RATES))


WRITER = Writer(
    ranks=1, cores=2, copy_bytes_s=1e9, quantise_bytes_s=0, encode=CoreCost(1e-9, 0),
    link_bytes_s=1e7, connection_bytes_s=1e9, put_s=0.1, get_s=0.1, version_s=0.0,
)  # fmt: skip
READERS = Readers(
    count=1, share=1.0, per_host=1, cores=2, serial_cores=1, decode=CoreCost(1e-9, 0),
    link_bytes_s=2e7, region_bytes_s=1e12, connection_bytes_s=1e9, get_s=0.1, poll_s=1.0,
    interval_s=10, stage_change_s=0, swap_change_s=1e-8, staged_on_cores=True, version_s=0,
)  # fmt: skip


def test_hops_of_one_reader_are_what_a_pencil_says():
    amounts = Amounts.of(1e9, "bf16", share=0.01, bits_per_change=8)
    assert (amounts.changes, amounts.delta_bytes, amounts.blobs) == (1e7, 1e7, 1)
    took = {hop.name: hop.seconds for hop in publish(amounts, WRITER).hops}
    assert took == pytest.approx(
        {"copy": 2, "quantise": 0, "encode": 0.5, "put": 1.1, "commit": 0.1}
    )
    took = {hop.name: hop.seconds for hop in follow(amounts, READERS).hops}
    # Half a pause; three round trips and half a second; a core second on two; 1e7 changes.
    assert took == pytest.approx({"poll": 0.5, "get": 0.8, "decode": 0.5, "stage": 0, "swap": 0.1})


def test_readers_of_a_host_share_its_cores_and_its_link():
    amounts = Amounts.of(1e9, "bf16", share=0.01, bits_per_change=8)
    together = replace(READERS, count=4, per_host=4, poll_s=1e-9)
    apart = replace(together, per_host=1)
    took, single = ({h.name: h for h in follow(amounts, one).hops} for one in (together, apart))
    assert took["decode"].seconds == pytest.approx(4 * single["decode"].seconds)
    assert took["get"].seconds - single["get"].seconds == pytest.approx(3 * 0.5)
    assert took["get"].bytes == single["get"].bytes == 4 * amounts.fetched_bytes


def test_hops_overlap_blob_by_blob():
    assert overlapped(4.0, 2.0, 1) == 6.0
    assert overlapped(4.0, 2.0, 4) == 4.5
    assert overlapped(2.0, 4.0, 1000) == pytest.approx(4.0, rel=1e-3)


def test_a_reader_of_a_shard_asks_every_blob_once():
    amounts = Amounts.of(1e12, "fp8", share=0.003, bits_per_change=8, ranks=256)
    assert amounts.blobs == 256
    assert Fetching.of(amounts, 1 / 16).requests == 256
    assert Fetching.of(amounts, 1.0).requests == 2 * 256  # 11.7 MB each, in ranges of 8 MiB


def test_readers_that_share_a_cache_get_each_blob_once_between_them():
    amounts = Amounts.of(1e12, "fp8", share=0.003, bits_per_change=8, ranks=256)
    alone = Fetching.of(amounts, 1 / 16)
    shared = Fetching.of(amounts, 1 / 16, together=8)
    assert shared.requests == 256 // 8 * 2  # 11.7 MB each, in ranges of 8 MiB
    assert shared.bytes == amounts.delta_bytes / 8
    assert alone.bytes == amounts.delta_bytes / 16
    whole = amounts.sending(1e12, 256)
    readers = replace(READERS, count=8, per_host=8, share=1.0)
    too_large = replace(readers, blob_cache=True, share=1 / 16)
    assert too_large.fetching(whole) == Fetching.of(whole, 1 / 16)
    cached = replace(readers, blob_cache=True)
    small = Amounts.of(1e9, "bf16", share=0.01, bits_per_change=8, ranks=8)
    took, own = ({h.name: h for h in follow(small, one).hops} for one in (cached, readers))
    assert 8 * (took["get"].bytes - 8 * small.manifest_bytes) == pytest.approx(
        own["get"].bytes - 8 * small.manifest_bytes
    )
    assert took["get"].seconds < own["get"].seconds
    assert took["decode"] == own["decode"]


def test_the_published_staleness_is_reproduced():
    """Below 1 the queue holds ρ batches, above it the formula's second term; transfers add."""
    below = staleness(
        batch=64, concurrent=128, seconds=100, tail=2, queue=1, step_s=25, transfer_s=10
    )
    assert (below.ratio, below.rollout, below.queue) == (0.5, 4.0, 0.5)
    assert below.transfer == 10 / 50  # The step takes twice as long, as rollouts bind.
    above = staleness(
        batch=64, concurrent=128, seconds=100, tail=2, queue=3, step_s=100, transfer_s=10
    )
    assert (above.ratio, above.rollout, above.queue) == (2.0, 2.0, 7 / 4)
    assert above.mean == 2.0 + 7 / 4 + 0.1


def test_engines_that_keep_the_trainer_busy():
    assert engines_needed(batch=100, seconds=50, per_engine=10, step_s=10, pause_s=0) == 50
    assert engines_needed(batch=100, seconds=50, per_engine=10, step_s=10, pause_s=5) == 100


def test_a_plan_adds_up(tmp_path):
    plan = planned(write_plan(tmp_path))
    assert plan.delta_bytes == pytest.approx(plan.parameters * 0.003 * plan.bits_per_change / 8)
    home, far = plan.regions
    assert {hop.hop for hop in far.hops} - {hop.hop for hop in home.hops} == {
        f"relay {name}" for name in ("poll", "copy", "get", "put", "commit")
    }
    assert plan.seconds == max(home.seconds, far.seconds)
    for region in plan.regions:
        assert 0 < region.seconds <= sum(hop.seconds for hop in region.hops)
        assert 0 < region.dollars_a_day < region.whole_dollars_a_day
        assert region.reader_bytes < region.host_bytes_per_rank
    assert home.crossing_bytes_a_day == 0
    # One copy of each version crosses, of a manifest, its table and the delta.
    assert far.crossing_bytes_a_day / plan.versions_a_day == pytest.approx(
        plan.delta_bytes, rel=0.01
    )


def test_experts_are_divided_by_their_own_parallelism(tmp_path):
    request = read_request(write_plan(tmp_path), {"regions.*.expert_parallel": "16"})
    model = request.architecture()
    home = request.regions[0]
    share = reader_share(model, home)
    rest = model.parameters - model.expert_parameters
    assert share == (rest / 4 + model.expert_parameters / 16) / model.parameters
    assert 1 / 16 < share < 1 / 4


def test_slower_links_and_more_changes_never_help(tmp_path):
    path = write_plan(tmp_path)
    first = planned(path)
    for changes in (
        {"regions.*.link_gb_s": "0.05"},
        {"regions.far.cross_gb_s": "0.05"},
        {"model.changed": "0.03"},
        {"trainer.link_gb_s": "0.01"},
        {"regions.*.poll_s": "8"},
    ):
        other = planned(path, changes)
        assert other.seconds > first.seconds, changes
    assert planned(path, {"model.changed": "0.03"}).dollars_a_day > first.dollars_a_day


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_planned_with_the_shipped_rates(path):
    request = read_request(path)
    rates = shipped_rates()
    plan = make_plan(request, request.architecture(path.parent), rates, changed=0.0027)
    assert plan.goal_s == request.goal_s
    assert all(math.isfinite(region.seconds) for region in plan.regions)
    assert 0.002 < plan.delta_share < 0.004


def test_costs_are_fitted_exactly_to_what_is_linear():
    cost = CoreCost(3e-9, 2e-8)
    rows = [(n, c, cost.seconds(n, c)) for n, c in ((1e8, 1e5), (1e8, 3e6), (2e8, 1e6))]
    found = fit_cost(rows)
    assert (found.per_value_s, found.per_change_s) == pytest.approx((3e-9, 2e-8))
    falling = fit_cost([(1e8, 1e5, 0.3), (1e8, 3e6, 0.2)])
    assert falling.per_change_s == 0
    assert falling.per_value_s > 0


def test_rates_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rates.json"
    path.write_bytes(encode_rates(RATES))
    assert read_rates(path) == RATES
    assert [RATES.speedup(n) for n in (1, 2, 5, 8, 99)] == pytest.approx([1, 1.8, 1.85, 1.9, 1.9])
    sizes = RATES.codec("fp8")
    assert sizes.bits_per_change(0.01) == pytest.approx(7.0)
    assert sizes.bits_per_change(10**-2.5) == pytest.approx(8.0)
    assert (sizes.bits_per_change(1e-9), sizes.bits_per_change(0.9)) == (9.0, 5.0)


WRONG = {
    "accelerator": ('"h200"', '"h900"', "no accelerator is called 'h900'; known: a100"),
    "bandwidth": ("step_s = 60", "step_s = 60\nlink_gb_s = 0", "trainer: link_gb_s is 0"),
    "crossing": ("away = true", "away = true\ncross_gb_s = 0.0", "far: cross_gb_s is 0"),
    "experts": ('"qwen3-30b-a3b"', '"qwen3-8b"', "qwen3-8b has no experts"),
    "store": ("away = true", 'away = true\nstore = "tape"', "no store is called 'tape'"),
    "engine": ("accelerators = 32", "accelerators = 30", "not divisible into engines of 4"),
    "changed": ("changed = 0.003", "", "neither changed nor learn_from"),
    "seconds": ("step_s = 60", "step_s = 1e-300", "is not a plan: .*step_s"),
    "depth": ("step_s = 60", f"step_s = {'[' * 5000}", "is not TOML"),
    "key": ("tail = 2.0", "tails = 2.0", "is not a plan: .*tails"),
    "twice": ('name = "far"', 'name = "home"', "two regions have the same name"),
    "model": ('"qwen3-30b-a3b"', '"qwen9"', "neither a model of the catalogue nor a file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_plans_are_one_clear_error(case, tmp_path):
    old, new, message = WRONG[case]
    path = write_plan(tmp_path, old=old, new=new)
    changes = {"regions.*.expert_parallel": "8"} if case == "experts" else {}
    with pytest.raises(InputError, match=message):
        planned(path, changes)


def test_a_missing_price_is_named_and_can_be_given(tmp_path):
    path = write_plan(tmp_path, old="step_s = 60", new='step_s = 60\nstore = "gcs"')
    with pytest.raises(InputError, match=r"gcs has no price for other_region_gb .*\[prices.gcs\]"):
        planned(path)
    path.write_text(path.read_text() + "\n[prices.gcs]\nother_region_gb = 0.02\n")
    assert planned(path).dollars_a_day > 0
    path.write_text(path.read_text() + "per_moon = 3\n")
    with pytest.raises(InputError, match=r"\[prices.gcs\].*per_moon"):
        planned(path)


def test_every_store_states_its_source_and_date():
    for store in shipped_stores().values():
        assert store.as_of >= "2026"
        assert len(store.source) > 40


@pytest.mark.parametrize(
    ("text", "message"),
    [("x", "is not a key"), ("a=", "is not a key"), ("a=" + "1," * 300, "at most 256")],
)
def test_variants_that_cannot_be_read(text, message):
    with pytest.raises(InputError, match=message):
        parse_what_if([text])


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"format": 2}', encode_rates(RATES).replace(b"4000000000", b"-1")]
)
def test_files_that_hold_no_rates(content, tmp_path):
    path = tmp_path / "rates.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not a file of rates.*deltawire bench hops"):
        read_rates(path)
    with pytest.raises(InputError, match="cannot read"):
        read_rates(tmp_path / "none.json")


def test_the_command_prints_tables_json_variants_and_pictures(tmp_path, capsys):
    path = write_plan(tmp_path)
    rates = tmp_path / "rates.json"
    rates.write_bytes(encode_rates(RATES))
    ask = ["plan", str(path), "--rates", str(rates)]
    assert main(ask) == 0
    printed = capsys.readouterr().out
    assert "hops to home" in printed
    assert "relay copy" in printed
    assert main([*ask, "--json", "--plot", str(tmp_path / "plan.svg")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["regions"][1]["name"] == "far"
    assert b"far" in (tmp_path / "plan.svg").read_bytes()
    variants = ["--what-if", "trainer.step_s=60,600", "--what-if", "regions.far.cross_gb_s=0.1,1"]
    assert main([*ask, *variants, "--json", "--plot", str(tmp_path / "variants.png")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["keys"]["trainer.step_s"] for row in rows] == ["60", "60", "600", "600"]
    assert rows[0]["seconds"] > rows[1]["seconds"]
    assert (tmp_path / "variants.png").stat().st_size > 1000
    assert main([*ask, *variants]) == 0
    assert "engines" in capsys.readouterr().out
    assert main([*ask, "--plot", str(tmp_path / "plan.gif")]) == 2
    assert "must end in .svg" in capsys.readouterr().err
    assert main([*ask, "--what-if", "regions.moon.poll_s=1"]) == 2
    assert "there is no region 'moon'" in capsys.readouterr().err
    assert main([*ask, *variants, "--simulate", "3"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_what_is_learned_of_a_run_gives_its_deltas(tmp_path):
    """A plan for the run's own size predicts the deltas that it was learned from."""
    import numpy as np

    from deltawire.plan.fleet.learning import learn_share
    from deltawire.store import open_bucket
    from deltawire.sync import open_publisher, read_manifest
    from deltawire.wire.run import TensorSpec

    bucket = open_bucket("memory://")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 1 << 16, np.uint16)
    publisher = open_publisher(
        bucket, {"w": bits}, specs=[TensorSpec("w", bits.shape, "BF16")], compaction_strides=()
    )
    with pytest.raises(InputError, match="no deltas to learn"):
        learn_share(bucket, RATES.codec("bf16"))
    bits[rng.integers(0, bits.size, 700)] ^= np.uint16(1)
    publisher.publish({"w": bits})
    publisher.close()
    share = learn_share(bucket, RATES.codec("bf16"))
    manifest = read_manifest(bucket, publisher.run, 1)
    coded = RATES.codec("bf16").bits_per_change(share)
    assert bits.size * share * coded / 8 == pytest.approx(manifest.delta.bytes, rel=1e-6)


def test_described_fleets_are_plain_figures(tmp_path):
    request = read_request(write_plan(tmp_path))
    described = describe_fleet(request, request.architecture(), RATES, changed=0.003)
    assert described.relays.keys() == {"far"}
    assert described.readers["home"].count == 32
    assert described.relays["far"].source.share == 1.0
    assert msgspec.to_builtins(request)["regions"][0]["name"] == "home"
