"""``compare``: verdicts on held-out results, and how often they are luck."""

import json

import msgspec
import numpy as np
import pytest

from benchmarks.branches.null_changes import null_trees
from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.events import Evaluated, encode_lines
from deltawire.launch.branches.comparison import (
    best_of,
    compare_scores,
    count_tries,
    interval_of,
)
from deltawire.launch.branches.forking import fork_run
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.run import Run

RUN = Run(id="ab" * 16, name="r", created_at=0.0, tensors=[], digest="0" * 32)


def evaluated(correct, version=1, samples=4):
    return Evaluated(
        process="evaluator", at=float(version), version=version, accuracy=float(np.mean(correct)),
        samples=samples, problems=len(correct), seconds=1.0, correct=list(map(float, correct)),
    )  # fmt: skip


def judged(theirs, mine, **options):
    options = {"error": 0.05, "among": 1, **options}
    return compare_scores((RUN, evaluated(theirs)), (RUN, evaluated(mine)), "c", **options)


def answers(rng, rate, samples=4):
    return rng.binomial(samples, rate) / samples


def test_null_changes_are_kept_in_few_trees():
    """A hundred null changes in each of a hundred trees, all against the tree's one baseline: at
    most ten trees keep any. A difference of two standard errors would be kept in a third."""
    kept = null_trees(0)
    assert kept.by_verdict <= 10
    assert kept.by_errors > 20


def test_each_of_many_candidates_gets_its_share_of_the_error():
    rng = np.random.default_rng(5)
    rates = rng.uniform(0.2, 0.7, 48)
    mine, theirs = answers(rng, rates + 0.2), answers(rng, rates)
    one, hundred = judged(theirs, mine), judged(theirs, mine, among=100)
    assert hundred.low < one.low < one.high < hundred.high


def test_a_better_and_a_worse_candidate_are_found():
    rng = np.random.default_rng(1)
    rates = rng.uniform(0.2, 0.7, 128)
    better = judged(answers(rng, rates), answers(rng, rates + 0.25), among=20)
    assert (better.verdict, better.answers_needed) == ("better", None)
    assert 0 < better.low < better.difference < better.high
    worse = judged(answers(rng, rates + 0.25), answers(rng, rates), among=20)
    assert worse.verdict == "worse"
    assert best_of([worse, better]) == better
    assert best_of([worse]) is None


def test_an_undecided_candidate_says_how_many_more_answers_it_needs():
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.2, 0.7, 24)
    found = judged(answers(rng, rates), answers(rng, rates + 0.08))
    assert found.verdict == "undecided"
    assert found.low < 0 < found.high
    assert found.answers_needed > 0
    assert found.answers_needed % 4 == 0
    assert judged([0.5, 0.5], [0.5, 0.5]).answers_needed is None


def test_an_interval_contains_the_mean_and_shrinks_with_answers():
    rng = np.random.default_rng(3)
    widths = []
    for count in (20, 200, 2000):
        low, high = interval_of(rng.choice([-0.5, 0.0, 0.5], count), error=0.05)
        assert low <= 0 <= high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert interval_of(np.zeros(2), error=0.05)[1] <= 1


def test_problems_without_an_answer_are_left_out():
    assert judged([0.5, -1, 1.0, 0.0], [0.5, 1.0, -1, 0.0]).problems == 2
    with pytest.raises(InputError, match="fewer than 2"):
        judged([0.5, -1], [-1, 1.0])


def test_other_problems_are_refused():
    with pytest.raises(InputError, match="2 instead of 3"):
        judged([0, 0, 1], [1, 1])
    seeds = [msgspec.structs.replace(RUN, config={"seed": seed}) for seed in (1, 2)]
    with pytest.raises(InputError, match="seed differs"):
        compare_scores(
            (seeds[0], evaluated([1, 0])), (seeds[1], evaluated([1, 0])), "c", error=0.05, among=1
        )


@pytest.fixture
def run(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with start_publisher(bucket) as publisher:
        publisher.publish(weights(0))
    read_run(bucket)
    rng = np.random.default_rng(4)
    rates = rng.uniform(0.1, 0.5, 128)
    events = [evaluated(answers(rng, rates + gain), version=v) for v, gain in enumerate((0, 0.4))]
    bucket.put(keys.events("evaluator", 0), encode_lines(events))
    return bucket


def test_versions_of_a_run_are_compared(run, capsys):
    url = run.url
    assert main(["compare", f"{url}@0", url, f"{url}@0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["best"], found["among"]) == (url, 2)
    assert [one["verdict"] for one in found["verdicts"]] == ["better", "undecided"]
    assert [one["version"] for one in found["verdicts"]] == [1, 0]
    assert main(["compare", url, f"{url}@0"]) == 11
    assert "worse" in capsys.readouterr().out
    assert main(["compare", url, f"{url}@7"]) == 2
    assert "no evaluation by problem of version 7" in capsys.readouterr().err
    assert main(["compare", url, url, url, "--among", "1"]) == 2
    assert main(["compare", url, url, "--error", "0"]) == 2


def test_all_forks_of_the_baseline_count_also_elsewhere(run, tmp_path, capsys):
    """One that is not named now was looked at earlier, or may be."""
    parent = read_run(run)
    below = fork_run(run, parent, 0, "one")
    copy = fork_run(run, parent, 0, "two", to=str(tmp_path / "elsewhere"))
    rng = np.random.default_rng(4)
    rates = rng.uniform(0.1, 0.5, 128)
    for made, gain in ((below, 0.0), (copy, 0.4)):
        events = [evaluated(answers(rng, rates + gain))]
        open_bucket(made.url).put(keys.events("evaluator", 0), encode_lines(events))
    assert main(["compare", f"{run.url}@0", copy.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["best"], found["among"]) == (copy.url, 2)
    (verdict,) = found["verdicts"]
    assert (verdict["verdict"], verdict["baseline_version"]) == ("better", 0)
    assert main(["compare", f"{run.url}@0", copy.url, below.url, f"{run.url}@1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in found["verdicts"]] == ["better", "undecided", "better"]
    assert found["among"] == 3
    assert main(["compare", f"{run.url}@0", copy.url, "--among", "1"]) == 2
    assert "the 2 that are named or are forks" in capsys.readouterr().err
    # A fork that is the baseline is compared with its brothers, and with its parent.
    assert main(["compare", below.url, copy.url, run.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["among"] == 2
    third = fork_run(run, parent, 0, "three")
    assert count_tries(open_bucket(below.url), [copy.url, run.url]) == 3
    assert count_tries(open_bucket(below.url), [copy.url, third.url]) == 2
    assert count_tries(open_bucket(copy.url), []) == 0
