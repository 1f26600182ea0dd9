"""Bisection: which version is asked next, what counts as an answer, and how it continues."""

import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.branches.noisy_bisection import fixed_repetitions, search, with_culprit
from deltawire.cli.main import main
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches import bisect
from deltawire.launch.branches.bisect import ExactSearch, NoisySearch, bisect_run
from deltawire.launch.branches.journal import BisectAnswer, BisectSettings, Journal
from deltawire.launch.branches.posterior import CHANGES, ChangingRates, CulpritPosterior
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys

VERSIONS = 9


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    bucket = open_bucket(str(tmp_path_factory.mktemp("run")), create=True)
    with start_publisher(bucket) as publisher:
        for version in range(VERSIONS):
            publisher.publish(weights(version))
            publisher.flush()
    return bucket


def exact(versions, culprit, skipped=()):
    search = ExactSearch(versions)
    while (version := search.next()) is not None:
        search.add(BisectAnswer(version, 125 if version in skipped else int(version >= culprit)))
    return search.result()


def test_each_culprit_is_found_in_seven_questions():
    for culprit in range(41, 121):
        found = exact(list(range(40, 121)), culprit)
        assert (found.culprit, found.reason) == (culprit, "found")
        assert found.questions <= 7


def test_versions_next_to_skipped_ones_are_asked_and_what_is_left_is_named():
    found = exact(list(range(20)), 10, skipped=(9, 10, 11))
    assert found.culprit is None
    assert list(found.candidates) == [9, 10, 11, 12]
    assert exact(list(range(20)), 13, skipped=(9, 10)).culprit == 13


def test_numbers_that_the_run_skipped_are_not_asked():
    assert exact([3, 5, 9, 30], 9).culprit == 9


def noisy(rates, seed, **options):
    rng = np.random.default_rng(seed)
    searching = NoisySearch(list(range(len(rates))), **{"error": 0.05, "most": 3000, **options})
    while (version := searching.next()) is not None:
        searching.add(BisectAnswer(version, int(rng.random() >= rates[version])))
    return searching.result()


def test_a_noisy_culprit_is_found_and_seldom_another():
    """400 culprits are `bench branches`; these five take a second."""
    rng = np.random.default_rng(3)
    wrong = 0
    for culprit in range(8, 81, 16):
        found = search(with_culprit(culprit), rng)
        wrong += found.culprit != culprit
        assert found.questions < 1000
    assert wrong <= 1


def test_a_clear_break_needs_few_questions_and_its_rates_are_learned():
    found = noisy([0.99] * 30 + [0.02] * 51, 1)
    assert found.culprit == 30
    assert found.questions < 40
    assert found.rates[0] > 0.7
    assert found.rates[1] < 0.3


@pytest.mark.parametrize(
    "rates",
    [
        [0.7] * 81,
        list(np.linspace(0.95, 0.05, 81)),
        ([0.95] * 9 + [0.05] * 9) * 4 + [0.05] * 9,
        ([0.8] * 9 + [0.5] * 9) * 4 + [0.5] * 9,
    ],
    ids=["one-rate", "falls-evenly", "comes-and-goes", "comes-and-goes-softly"],
)
def test_no_single_culprit_is_said(rates):
    found = noisy(rates, 0)
    assert (found.culprit, found.reason) == (None, "there is no single culprit")
    assert found.no_single >= 0.95


def test_an_undecided_search_says_so():
    found = noisy([0.8] * 40 + [0.5] * 41, 0, most=20)
    assert (found.culprit, found.questions) == (None, 20)
    assert found.reason == "undecided after 20 questions"


def test_a_version_that_cannot_be_tested_is_not_asked_again():
    search = NoisySearch([0, 1, 2], error=0.05, most=100)
    first = search.next()
    search.add(BisectAnswer(first, 125))
    assert search.next() not in (None, first)
    for version in {0, 1, 2} - {first}:
        search.add(BisectAnswer(version, 125))
    assert search.next() is None
    assert search.result().reason == "no version can be tested"


def test_the_posterior_is_one_and_leans_to_where_answers_change():
    posterior = CulpritPosterior(5)
    for _ in range(10):
        posterior.add(1, passed=True)
        posterior.add(2, passed=False)
    weight_N, no_single = posterior.weights()
    assert weight_N.sum() + no_single == pytest.approx(1)
    assert weight_N.argmax() == 2
    assert weight_N[0] == 0


def test_rates_that_come_and_go_are_the_sum_over_all_their_paths():
    count, pairs = 6, [(0.8, 0.5), (0.9, 0.3)]
    passed_N, failed_N = np.array([3, 0, 1, 2, 0, 1.0]), np.array([0, 2, 1, 0, 3, 2.0])
    changing = ChangingRates(count, *np.array(pairs).T)
    log, rate_N = changing.evidence(passed_N, failed_N)
    change = min(0.5, CHANGES / count)
    total, prior, mean_N = 0.0, 0.0, np.zeros(count)
    for pair, between in itertools.product(pairs, itertools.product((0, 1), repeat=count - 2)):
        path = (0, *between, 1)
        changes = sum(a != b for a, b in itertools.pairwise(path))
        if changes >= 3:
            weight = change**changes * (1 - change) ** (count - 1 - changes)
            rates_N = np.array([pair[state] for state in path])
            seen = weight * np.prod(rates_N**passed_N * (1 - rates_N) ** failed_N)
            total, prior, mean_N = total + seen, prior + weight, mean_N + seen * rates_N
    assert log == pytest.approx(math.log(total / prior))
    assert rate_N == pytest.approx(mean_N / total)


def test_long_runs_and_short_ones_have_finite_evidence():
    """1,000 versions with hundreds of answers each, and three versions, which cannot come and go
    three times."""
    rates_P = np.array([0.9])
    log, rate_N = ChangingRates(1000, rates_P, rates_P / 2).evidence(
        np.full(1000, 300.0), np.full(1000, 300.0)
    )
    assert np.isfinite(log)
    assert np.all((rate_N > 0) & (rate_N < 1))
    passed_N = np.repeat([0.0, 300.0], 100)  # As unlikely at both ends as can be.
    log, rate_N = ChangingRates(200, rates_P, rates_P / 9).evidence(passed_N, passed_N[::-1])
    assert np.isfinite(log)
    assert np.all((rate_N > 0) & (rate_N < 1))
    assert ChangingRates(3, rates_P, rates_P / 2).evidence(np.ones(3), np.ones(3))[0] == -math.inf


def test_fixed_repetitions_are_what_they_are_compared_with():
    rng = np.random.default_rng(0)
    right = [fixed_repetitions(30, 100, rng, known=True)[0] for _ in range(200)]
    assert np.mean(right) > 0.9
    right = [fixed_repetitions(30, 5, rng, known=False)[0] for _ in range(200)]
    assert np.mean(right) < 0.7


COMMAND = """
import os, pathlib, sys
folder, version = pathlib.Path(sys.argv[1]), int(os.environ["DELTAWIRE_VERSION"])
assert any(folder.glob("*.safetensors")), list(folder.iterdir())
with open(sys.argv[2], "a") as asked:
    print(version, folder.resolve().name, file=asked)
sys.exit({})
"""


@pytest.fixture
def asked(tmp_path):
    """The versions that a command was run on, in order, each on a directory of that version."""

    def read():
        lines = (tmp_path / "asked").read_text().split("\n")[:-1]
        pairs = [tuple(map(int, line.split())) for line in lines]
        assert all(version == folder for version, folder in pairs)
        return [version for version, _ in pairs]

    return read


def words(tmp_path, status):
    code = tmp_path / "check.py"
    code.write_text(COMMAND.format(status))
    return [sys.executable, str(code), "{}", str(tmp_path / "asked")]


def run_bisect(bucket, tmp_path, status, *options, good=1, bad=8):
    arguments = ["bisect", bucket.url, "--good", str(good), "--bad", str(bad), *options]
    arguments += ["--state", str(tmp_path / "state"), "--", *words(tmp_path, status)]
    return main(arguments)


def test_the_command_gets_a_directory_of_each_version(bucket, tmp_path, asked, capfd):
    assert run_bisect(bucket, tmp_path, "version >= 6", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["culprit"], found["questions"]) == (6, 3)
    assert sorted(asked()) == [4, 5, 6] or asked() == [4, 6, 5]
    assert run_bisect(bucket, tmp_path, "version >= 6") == 0  # Nothing is asked again.
    assert "version 6 is the first bad one" in capfd.readouterr().out
    assert len(asked()) == 3


def test_an_interrupted_search_continues(bucket, tmp_path, asked, capfd):
    assert run_bisect(bucket, tmp_path, "130 if version == 6 else version >= 6") == 2
    assert "ended with 130" in capfd.readouterr().err
    before = asked()
    journal = tmp_path / "state" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"version":5,"sta')  # The machine stopped here.
    assert run_bisect(bucket, tmp_path, "version >= 6") == 0
    assert "version 6" in capfd.readouterr().out
    assert asked().count(before[0]) == 1
    assert journal.read_bytes().endswith(b"}\n")
    assert run_bisect(bucket, tmp_path, "version >= 6") == 0  # The journal is whole again.


def test_a_noisy_search_uses_the_command(bucket, tmp_path, capfd):
    options = ("--noisy", "--error", "0.2", "--json")
    assert run_bisect(bucket, tmp_path, "version >= 3", *options) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["culprit"] == 3
    assert found["no_single"] < 0.2
    assert sum(found["asked"].values()) == found["questions"]


def test_nothing_certain_has_its_own_exit_code(bucket, tmp_path, capfd):
    assert run_bisect(bucket, tmp_path, "125", "--json") == 11
    assert json.loads(capfd.readouterr().out)["skipped"] == [2, 3, 4, 5, 6, 7]


def test_a_shell_that_does_not_find_a_program_is_no_answer(bucket, tmp_path, asked, capfd):
    assert run_bisect(bucket, tmp_path, "127") == 2
    assert "ends with 127 also on version 1" in capfd.readouterr().err
    assert asked()[-1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--good", "5", "--bad", "5"), "--good 5 is not below --bad 5"),
        (("--good", "5", "--bad", "99"), "the run has no version 99"),
        (("--good", "5", "--bad", "8", "--error", "0.5"), "below 0.5"),
        (("--good", "5", "--bad", "8"), "cannot run no-such-program"),
    ],
)
def test_wrong_input_is_one_error(bucket, tmp_path, capfd, options, message):
    state = ["--state", str(tmp_path / "state")]
    assert main(["bisect", bucket.url, *options, *state, "--", "no-such-program"]) == 2
    assert message in capfd.readouterr().err


def settings_of(bucket, **changed):
    values = {"good": 1, "bad": 8, "noisy": False, "command": ["x"], **changed}
    return BisectSettings(read_run(bucket).id, **values)


def test_a_journal_of_another_question_is_refused(bucket, tmp_path):
    Journal(tmp_path, settings_of(bucket)).append(BisectAnswer(4, 0))
    assert Journal(tmp_path, settings_of(bucket)).answers == [BisectAnswer(4, 0)]
    for other in (settings_of(bucket, bad=7), settings_of(bucket, command=["y"])):
        with pytest.raises(InputError, match="another bisection"):
            Journal(tmp_path, other)


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b'{"version":99,"status":0}\n'])
def test_a_damaged_journal_is_refused(bucket, tmp_path, line):
    path = Journal(tmp_path, settings_of(bucket)).path
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(CorruptError, match="remove this one to begin again"):
        Journal(tmp_path, settings_of(bucket))


def test_a_version_that_cannot_be_read_is_skipped(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with start_publisher(bucket, anchor_every=100) as publisher:
        for version in range(VERSIONS):
            publisher.publish(weights(version))
            publisher.flush()
    run = read_run(bucket)
    command = words(tmp_path, "version >= 7")
    bucket.put(keys.manifest(4), b"{}")  # Later versions build on it.
    found = bisect_run(bucket, run, settings_of(bucket, command=command), tmp_path / "state")
    assert found.culprit is None
    assert found.skipped == [4, 5, 6, 7]


def test_a_script_that_the_system_does_not_start(tmp_path, monkeypatch):
    """Without a first line that names an interpreter, or without the right to execute it."""
    script = tmp_path / "check.py"
    script.write_text("print('good')\n")
    asking = object.__new__(bisect._Asking)
    asking._settings = BisectSettings("r", 0, 1, False, [str(script)])
    asking._place = SimpleNamespace(environment={})
    with pytest.raises(InputError) as refused:
        asking._run(0, str(tmp_path))
    assert "name its interpreter" in refused.value.hint
    script.chmod(0o755)
    with pytest.raises(InputError) as unknown:
        asking._run(0, str(tmp_path))
    assert "begin the script with #!" in unknown.value.hint
