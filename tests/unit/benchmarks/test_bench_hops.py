"""The rates of ``deltawire bench hops``, and the small fleets that plans are checked with."""

import numpy as np
import pytest

from benchmarks.hops import rates as hops
from benchmarks.scale import plan_runs
from deltawire.cli.main import main
from deltawire.plan.fleet.rates import encode_rates, read_rates
from deltawire.plan.fleet.transfer import follow, publish
from deltawire.store import open_bucket
from deltawire.testing.proxy import FaultyProxy


@pytest.fixture
def small(monkeypatch):
    """Tiles of a million values, in chunks of a quarter."""
    pytest.importorskip("torch")
    monkeypatch.setattr(hops, "TILE", 1 << 20)
    monkeypatch.setattr(hops, "CHUNK_ELEMENTS", 1 << 18)
    monkeypatch.setattr(hops, "REPEATS", 1)
    monkeypatch.setattr(hops, "LARGE", 1 << 16)
    for table in ("SHARES", "TIMED"):
        monkeypatch.setattr(hops, table, dict.fromkeys(("bf16", "fp8"), (0.001, 0.01)))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_tiles_change_about_as_asked(small, precision):
    make = hops.bf16_tile if precision == "bf16" else hops.fp8_tile
    before, after = make(0.01, seed=3)
    assert before.dtype == (np.uint16 if precision == "bf16" else np.uint8)
    assert 0.006 < np.mean(before != after) < 0.015


def test_measured_rates_are_a_file_that_plans_read(small, tmp_path):
    rates = hops.RateMeter(("bf16", "fp8")).measure(1, engine=False)
    assert rates.codecs["bf16"].encode.seconds(1e6, 1e4) > 0
    for codec in rates.codecs.values():
        sizes = [one.bits_per_change for one in codec.sizes]
        assert sizes == sorted(sizes, reverse=True)  # Rare changes cost more bits each.
        assert 3 < sizes[-1] < sizes[0] < 20
    assert [one.threads for one in rates.speeds] == sorted(one.threads for one in rates.speeds)
    store = hops.store_rates(open_bucket("memory://"), rounds=1)
    assert store.get_bytes_s > 0
    path = tmp_path / "rates.json"
    path.write_bytes(encode_rates(rates))
    assert read_rates(path) == rates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precisions", "int3"], "known: bf16, fp8"),
        (["--out", "none/rates.json"], "its folder does not exist"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options, message, capsys):
    assert main(["bench", "hops", *options]) == 2
    assert message in capsys.readouterr().err


def test_configurations_cover_what_the_check_promises():
    cases = [(group, case) for group in plan_runs.GROUPS for case in group.cases]
    assert len(cases) >= 20
    sizes = {group.tensors * hops.TILE * 2 for group, _ in cases}
    assert min(sizes) < 0.11e9
    assert max(sizes) > 2e9
    assert {group.readers for group, _ in cases} == {1, 2, 4, 8}
    assert {group.network for group, _ in cases} == {True, False}
    assert all(case.down_bytes_s for group, case in cases if group.network)


def test_a_proxy_listens_where_it_is_told():
    with FaultyProxy("http://127.0.0.1:9", host="127.0.0.2") as proxy:
        assert proxy.endpoint.startswith("http://127.0.0.2:")


@pytest.mark.drills
def test_a_real_run_moves_the_bytes_that_were_planned():
    """A trainer and two readers as processes; times are not compared, since machines are busy."""
    group = plan_runs.Group(
        tensors=1, readers=2, network=False, cases=(plan_runs.Case(share=0.01),)
    )
    (made,) = plan_runs.make_runs(
        [group],
        steps=2,
        rounds=1,
        report=lambda _: None,
        simulate=lambda amounts, writer, readers: (
            publish(amounts, writer).seconds + follow(amounts, readers).seconds
        ),
    )
    assert made.bytes_error < 0.02
    assert 0.008 < made.changed < 0.012
    assert made.simulated_s == pytest.approx(made.planned_s)
    assert made.seconds > made.publish_s > 0
