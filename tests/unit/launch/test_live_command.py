"""``deltawire live``: decisions by the tests and by hand, as JSON, lines and exit codes."""

import json
import sys

import pytest
from live_gateway import published

from deltawire.cli.main import main
from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.estimates import OffPolicyEstimate
from deltawire.events import Evaluated
from deltawire.launch.live import exit_code
from deltawire.live.release.evidence import LEAST_EFFECT, planned_answers
from deltawire.runtime.event_log import EventLog
from deltawire.store import open_bucket
from deltawire.wire import keys


@pytest.fixture
def bucket(tmp_path):
    url = (tmp_path / "run").as_uri()
    open_bucket(url, create=True)
    published(url=url)
    return url


def live(capsys, *arguments):
    """Run the command; returns its exit code and what it printed as JSON."""
    code = main(["live", *arguments, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_a_release_from_start_to_rollback(bucket, capsys):
    assert live(capsys, "status", bucket)[1]["state"] == "none"
    code, state = live(capsys, "promote", bucket, "--version", "0", "--by", "ann")
    assert (code, state["serving"]["version"]) == (0, 0)
    assert main(["live", "decide", bucket, "--once"]) != 0
    assert "--gate" in capsys.readouterr().err, "it once waited for an evaluation for ever"
    code, state = live(capsys, "promote", bucket, "--version", "2", "--reason", "tried by hand")
    assert state["serving"]["version"] == 2
    code, state = live(capsys, "rollback", bucket, "--by", "bob")
    assert (code, state["serving"]["version"]) == (0, 0)
    code, state = live(capsys, "status", bucket)
    assert code == 12
    assert [one["by"] for one in state["decisions"]][0::2] == ["ann", "bob"]
    assert state["decisions"][1]["reason"] == "tried by hand"
    assert main(["live", "status", bucket]) == 12
    assert "2: rollback, version 0 serves, candidate 2; by bob" in capsys.readouterr().out


def test_a_rolled_back_candidate_is_reported_until_the_next_one(bucket):
    state = {"state": "promote", "restores": None}
    assert exit_code(state) == 0
    assert exit_code(state | {"restores": 3}) == 12
    assert exit_code(state | {"state": "gate"}) == 10


def test_the_plan_names_answers_before_anyone_is_served(bucket, capsys):
    code, plan = live(capsys, "plan", bucket, "--effect", "0.1")
    assert code == 0
    assert [stage["share"] for stage in plan["stages"]] == [0.01, 0.05, 0.25, 0.5]
    assert plan["shadow"] == 0
    assert plan["outcomes"] == sum(stage["outcomes"] for stage in plan["stages"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--effect", "1e308"], "1e308 is above 1"),
        (["--rate", "2"], "2 is above 1"),
        (["--effect", "nan"], "nan is no share"),
    ],
)
def test_plans_for_impossible_effects_are_refused(bucket, capsys, arguments, named):
    with pytest.raises(SystemExit):
        main(["live", "plan", bucket, *arguments])
    assert named in capsys.readouterr().err


def test_an_effect_that_no_number_of_answers_shows_is_refused():
    release = ReleaseConfig(margin=1e-300)
    assert planned_answers(release, effect=LEAST_EFFECT)[-1] > 10**6
    for effect in (0.0, 1e-300):
        with pytest.raises(InputError, match="cannot be shown"):
            planned_answers(release, effect=effect)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["hold"], "no version serves by decision yet"),
        (["promote", "--version", "9"], "no version 9 that can be loaded"),
        (["rollback"], "no version serves by decision yet"),
    ],
)
def test_decisions_about_nothing_are_refused(bucket, capsys, arguments, named):
    action, *more = arguments
    assert main(["live", action, bucket, *more]) != 0
    assert named in capsys.readouterr().err


def test_the_status_shows_the_estimate_next_to_what_users_showed(bucket, capsys):
    store = open_bucket(bucket)
    log = EventLog("evaluator", lambda n, data: store.put(keys.events("evaluator", n), data))
    about = {"process": "evaluator", "at": 1.0, "problems": 1, "seconds": 1.0}
    refused = OffPolicyEstimate(answers=3, refused="too few")
    found = OffPolicyEstimate(
        answers=90, users=40, effective=71.5, logged=0.4, snips=0.5, snips_error=0.04,
        doubly_robust=0.52, doubly_robust_error=0.03,
    )  # fmt: skip
    log.record(Evaluated(version=0, accuracy=0.5, **about))
    log.record(Evaluated(version=1, accuracy=0.6, off_policy=refused, **about))
    log.record(Evaluated(version=2, accuracy=0.6, off_policy=found, **about))
    log.flush()
    assert live(capsys, "promote", bucket, "--version", "0")[0] == 0
    code, state = live(capsys, "decide", bucket, "--once")
    assert (code, state["state"], state["candidate"]["version"]) == (10, "canary", 2)
    assert store.get(keys.LIVE_DECIDER, limit=1 << 16), "views know that somebody looked"
    assert state["estimate"]["snips"] == 0.5
    assert state["decisions"][-1]["evidence"]["estimate_doubly_robust"] == 0.52
    assert main(["live", "status", bucket]) == 10
    assert (
        "SNIPS 0.500 ± 0.040, doubly robust 0.520 ± 0.030, logged 0.400; measured: candidate"
        in (capsys.readouterr().out)
    )


SCORE = """
import json, os, sys
version = int(os.environ["DELTAWIRE_VERSION"])
assert os.environ["DELTAWIRE_RUN"].startswith("file:") and len(os.environ["DELTAWIRE_DIGEST"]) == 32
for item in range(200):
    print(json.dumps({"id": f"q{item}", "score": (item % 10 < BEST[version]) * 1.0}))
"""


@pytest.mark.parametrize(
    ("best", "verdict", "code"), [([6, 0, 8], "canary", 10), ([6, 0, 2], "rollback", 12)]
)
def test_a_run_without_configuration_has_canaries_by_a_command(
    bucket, tmp_path, capsys, best, verdict, code
):
    script = tmp_path / "score.py"
    script.write_text(SCORE.replace("BEST", str(best)))
    live(capsys, "promote", bucket, "--version", "0")
    gate = f"{sys.executable} {script}"
    found, state = live(capsys, "decide", bucket, "--once", "--gate", gate)
    assert (found, state["state"]) == (code, verdict)
    last = state["decisions"][-1]
    assert last["evidence"]["candidate_items"] == best[2] / 10
    assert last["evidence"]["serving_items"] == 0.6
    assert state["serving"]["version"] == 0


def test_without_a_gate_each_version_goes_to_users_and_the_decision_says_so(bucket, capsys):
    live(capsys, "promote", bucket, "--version", "0")
    found, state = live(capsys, "decide", bucket, "--once", "--gate", "none")
    assert (found, state["state"]) == (10, "canary")
    assert state["decisions"][-1]["reason"] == "no evaluation gate"


def test_a_command_that_measures_nothing_keeps_the_candidate_from_users(bucket, capsys):
    live(capsys, "promote", bucket, "--version", "0")
    assert main(["live", "decide", bucket, "--once", "--gate", "false"]) == 10
    told = capsys.readouterr()
    assert "version 0 cannot be measured: it ended with status 1" in told.err
    assert "1: gate, version 0 serves, candidate 2" in told.out
    assert live(capsys, "status", bucket)[1]["state"] == "gate"
