"""``deltawire doctor``: its output and exit codes."""

import json

from deltawire.cli.exit_codes import UNFIT
from deltawire.cli.main import main


def test_json_and_exit_code_of_a_store_that_works(tmp_path, capsys):
    code = main(["doctor", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in found["findings"]}
    assert {"codec kernels", "cores", "sandbox", "vLLM", "[rl]", "create-if-absent"} <= names
    assert not [one for one in found["findings"] if one["area"] == "store" if one["fix"]]
    assert code == (UNFIT if found["problems"] else 0)


def test_a_problem_ends_with_its_exit_code_and_fix(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "missing")]) == UNFIT
    out = capsys.readouterr().out
    assert "PROBLEM" in out
    assert "[rl]" in out


def test_conformance_needs_a_url(capsys):
    assert main(["doctor", "--conformance"]) == 2
    assert "needs a URL" in capsys.readouterr().err
