"""The codec's benchmark: what it measures is there, and what is wrong is told."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measure, runner
from benchmarks.limits import timed
from benchmarks.measure import Measured
from benchmarks.memory import measure_peak
from benchmarks.pairs import Pair, PairTensor, load_pair, save_pair
from benchmarks.peers import PEERS, missing
from benchmarks.peers.container import size_of
from benchmarks.peers.raw import Raw
from benchmarks.runner import Job, choose_peers, jobs_for, run_job
from benchmarks.synthetic import synthetic_pair
from benchmarks.table import label, tables
from deltawire.cli.main import main
from deltawire.errors import InputError


@pytest.fixture
def pair_file(tmp_path):
    pair = synthetic_pair(40_000, 0.02)
    tensor = pair.tensors["weight"]
    path = tmp_path / "small.npz"
    save_pair(path, {"weight": tensor.old}, {"weight": tensor.new})
    return path


@pytest.mark.parametrize("name", ["deltawire", "anchor", "digest", "sparse-int32", "raw"])
def test_every_figure_of_a_row_is_measured(name):
    pair = synthetic_pair(200_000, 0.02)
    row = measure.measure(name, pair, threads=1, repeats=2, seconds=1.0)
    assert row.error == ""
    assert (row.elements, row.changed) == (pair.elements, pair.changed)
    assert row.model_bytes == pair.bytes
    assert row.encode_s > 0
    assert row.encode_extra_bytes >= 0
    assert row.memory_method in ("resident", "traced")
    assert row.read_both_s > 0
    assert row.copy_one_s > 0
    if name == "digest":
        assert row.decode_s is row.payload_bytes is row.lossless is None
    else:
        assert row.lossless is True
        assert row.decode_s > 0
        assert (row.encodes, row.decodes) == (2, 2)
        assert row.bits_per_change == pytest.approx(8 * row.payload_bytes / pair.changed)


def test_a_coding_that_loses_a_bit_is_an_error(monkeypatch):
    class Lossy(Raw):
        def decode(self, payload, weights):
            super().decode(payload, weights)
            weights["weight"][-1, -1] ^= 1

    monkeypatch.setattr(measure, "open_coding", lambda name, threads: Lossy())
    row = measure.measure("raw", synthetic_pair(9000, 0.02), threads=1, repeats=1, seconds=1.0)
    assert row.lossless is False
    assert "other bits" in row.error


def test_a_coding_that_is_right_only_at_first_is_an_error(monkeypatch):
    class Tiring(Raw):
        calls = 0

        def decode(self, payload, weights):
            self.calls += 1
            if self.calls < 3:
                super().decode(payload, weights)

    monkeypatch.setattr(measure, "open_coding", lambda name, threads: Tiring())
    row = measure.measure("raw", synthetic_pair(9000, 0.02), threads=1, repeats=5, seconds=9.0)
    assert row.lossless is False


def test_the_peak_of_memory_is_seen_and_the_result_counts():
    size = 64 << 20

    def work():
        scratch = np.ones(size, np.uint8)
        return scratch[: size // 4].copy()

    _, peak = measure_peak(work)
    assert 1.2 * size < peak.extra_bytes < 1.5 * size
    _, nothing = measure_peak(lambda: None)
    assert nothing.extra_bytes < size // 16


def test_without_resident_peaks_allocations_are_traced(monkeypatch):
    monkeypatch.setattr("benchmarks.memory._reset_resident_peak", lambda: False)
    _, peak = measure_peak(lambda: np.ones(8 << 20, np.uint8))
    assert peak.method == "traced"
    assert (8 << 20) <= peak.extra_bytes < (9 << 20)


def test_repeats_stop_when_the_time_is_spent_but_not_before_one():
    prepared = []
    assert len(timed(lambda: None, repeats=4, seconds=60, prepare=lambda: prepared.append(1))) == 4
    assert len(prepared) == 4
    assert len(timed(lambda: None, repeats=4, seconds=0)) == 1


def test_a_job_is_a_process_with_its_own_vector_path(pair_file):
    told = []
    (row,) = run_job(
        Job("deltawire", "portable", 1), [pair_file], repeats=1, seconds=1.0, tell=told.append
    )
    assert told == [row]
    assert row.error == ""
    assert (row.codec, row.simd, row.threads, row.pair) == ("deltawire", "portable", 1, "small")


def test_a_vector_path_that_is_not_taken_is_an_error(pair_file):
    """Else a table would show one path's figures under another's name."""
    (row,) = run_job(
        Job("deltawire", "abacus", 1), [pair_file], repeats=1, seconds=1.0, tell=lambda row: None
    )
    assert "abacus" in row.error
    assert row.payload_bytes is None


def test_a_process_that_dies_leaves_an_error_for_each_pair(pair_file, monkeypatch):
    monkeypatch.setattr(runner.sys, "executable", shutil.which("false"))
    rows = run_job(
        Job("deltawire", "", 1), [pair_file] * 2, repeats=1, seconds=1.0, tell=lambda row: None
    )
    assert [row.error for row in rows] == ["its process ended with 1"] * 2


def test_a_missing_peer_is_said_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(runner, "missing", lambda name: ["zstandard"] if "zstd" in name else [])
    jobs, skipped = jobs_for(["xor-zstd1", "raw"], [1, 2])
    assert [job.codec for job in jobs if job.codec not in ("deltawire", "anchor", "digest")] == [
        "raw"
    ]
    assert skipped == ["xor-zstd1 is left out: it needs zstandard; pip install 'deltawire[bench]'"]
    assert {job.threads for job in jobs if job.codec == "deltawire"} == {1, 2}


def test_the_command_says_how_to_install_a_missing_peer(monkeypatch, capsys):
    monkeypatch.setattr(runner, "missing", lambda name: ["zstandard"])
    assert main(["bench", "codec", "--peers", "xor-zstd1", "--corpus", "nowhere"]) == 2
    assert "pip install 'deltawire[bench]'" in capsys.readouterr().err


def test_unknown_peers_are_refused():
    assert choose_peers("none") == []
    assert choose_peers("raw,xor-zstd1") == ["raw", "xor-zstd1"]
    with pytest.raises(InputError, match="rawr"):
        choose_peers("rawr")


def row_of(codec, **figures):
    given = {"pair": "p", "elements": 1000, "changed": 10, "model_bytes": 2000, **figures}
    return Measured(codec=codec, **given)


def test_speeds_and_ratios_are_of_model_bytes():
    row = row_of("x", payload_bytes=100, encode_s=1e-6, decode_s=2e-6, read_both_s=5e-7)
    assert row.ratio == 20
    assert row.bits_per_change == 80
    assert row.encode_gbs == pytest.approx(2.0)
    assert row.decode_gbs == pytest.approx(1.0)
    assert row.read_gbs == pytest.approx(4.0)


def test_the_table_keeps_the_rows_that_failed():
    (table,) = tables([row_of("good", payload_bytes=100), row_of("bad", error="lost a bit")])
    assert table.row_count == 2
    assert "error: lost a bit" in list(table.columns[2].cells)
    assert label(row_of("deltawire", simd="avx2", threads=2)) == "deltawire avx2, 2 threads"


def test_the_command_prints_json_and_draws(pair_file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(runner, "vector_paths", lambda: ["portable"])
    plot = tmp_path / "plot.svg"
    arguments = ["bench", "codec", "--corpus", str(pair_file), "--peers", "raw", "--threads", "1"]
    assert main([*arguments, "--repeats", "1", "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in report["rows"]] == ["deltawire", "anchor", "digest", "raw"]
    assert report["machine"]["processors"] >= 1
    raw = report["rows"][-1]
    assert raw["share"] == pytest.approx(1, rel=1e-2)
    assert raw["ratio"] == pytest.approx(1 / raw["share"])
    assert raw["encode_gbs"] > 0
    assert raw["read_gbs"] > 0
    svg = plot.read_text()
    assert svg.startswith("<?xml")
    assert "Decode and apply" in svg or "path" in svg


def test_the_command_fails_when_a_row_does(pair_file, monkeypatch, capsys):
    bad = row_of("raw", error="lost a bit")
    monkeypatch.setattr("benchmarks.reports.codec.run_job", lambda *a, **k: [bad])
    assert main(["bench", "codec", "--corpus", str(pair_file), "--peers", "raw"]) == 1
    assert "lost a bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--threads", "1,x"], "--threads"),
        (["--density", "0"], "above 0"),
        (["--repeats", "0"], "--repeats"),
        (["--plot", "x.jpg"], "x.jpg"),
        (["--plot", "nowhere/x.svg"], "nowhere"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--synthetic", "-1"], "--synthetic"),
    ],
)
def test_wrong_flags_are_named(flags, says, capsys):
    assert main(["bench", "codec", "--peers", "none", *flags]) == 2
    assert says in capsys.readouterr().err


def test_two_tensors_of_a_pair_are_one_file():
    bits = np.arange(64, dtype=np.uint16)
    pair = Pair("two", {"a": PairTensor(bits, bits ^ 1), "b": PairTensor(bits[:5], bits[:5])})
    assert (pair.elements, pair.changed) == (69, 64)
    assert size_of(Raw().encode({}, {"a": bits, "b": bits[:5]})) > 2 * 69


def test_real_steps_are_coded_smaller_than_by_any_peer():
    """Rows of a 29M-parameter model before and after one policy-gradient step at 3e-6."""
    pair = load_pair(Path(__file__).parents[2] / "data" / "dense-rl-lr3e-6-k1-rows.npz")
    old = {name: tensor.old for name, tensor in pair.tensors.items()}
    new = {name: tensor.new for name, tensor in pair.tensors.items()}
    sizes = {
        name: size_of(measure.open_coding(name, 1).encode(old, new))
        for name in ("deltawire", *PEERS)
        if name == "deltawire" or not missing(name)
    }
    ours = sizes.pop("deltawire")
    assert len(sizes) >= 2
    assert ours < 0.8 * min(sizes.values()), sizes
