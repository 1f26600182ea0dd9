"""The code that `make mutate` breaks still exists, for every claim of docs/THREATS.md."""

import importlib.util
import sys
import tomllib

import pytest
from documents import ROOT

SCRIPT = ROOT / "scripts/mutate.py"


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # Its dataclasses look their module up.
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutate"]


def test_every_mutation_applies(mutate):
    claims = mutate.claims_of()
    for mutation in mutate.mutations_of():
        assert mutation.of(claims).tests
        assert mutation.applied(ROOT) != (ROOT / mutation.file).read_text(encoding="utf-8")


def test_every_claim_is_broken_by_a_mutation_or_says_why_not(mutate):
    claims = mutate.claims_of()
    assert len(claims) > 70
    broken = {one.of(claims).text for one in mutate.mutations_of() if not one.tests}
    rows = tomllib.loads((ROOT / mutate.TABLE).read_text(encoding="utf-8"))["exempt"]
    exempt = {mutate.Mutation(row["claim"], "", "", "").of(claims).text for row in rows}
    assert all(row["reason"] for row in rows)
    assert not broken & exempt
    assert broken | exempt == {claim.text for claim in claims}


def test_the_tests_of_every_guard_exist(mutate):
    guards = [one for one in mutate.mutations_of() if one.tests]
    assert len(guards) > 40
    for test in {test for guard in guards for test in guard.tests}:
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_a_mutation_that_does_not_apply_is_an_error(mutate, tmp_path):
    (tmp_path / "code.py").write_text("one = 1\none = 1\ntwo = 2\n")
    for code in ("three = 3", "one = 1"):
        with pytest.raises(ValueError, match="times"):
            mutate.Mutation("x", "code.py", code, "pass").applied(tmp_path)
    with pytest.raises(SyntaxError):
        mutate.Mutation("x", "code.py", "two = 2", "two =").applied(tmp_path)
    with pytest.raises(ValueError, match="0 claims"):
        mutate.Mutation("no such claim", "", "", "").of(mutate.claims_of())


def test_only_a_test_that_passes_without_the_mutation_notices_it(mutate, tmp_path, monkeypatch):
    """With pytest's exit statuses in place of its runs."""
    test = "tests/test_it.py::test_it"
    (tmp_path / "code.py").write_text("one = 1\n")
    mutation = mutate.Mutation("a claim", "code.py", "one = 1", "one = 2")
    monkeypatch.setattr(mutate, "claims_of", lambda: [mutate.Claim("a claim", (test,))])
    for runs, wrong in (
        ([(0, [])], ["not noticed: a claim [code.py]"]),
        ([(1, [test]), (0, [])], []),
        ([(1, [test]), (1, [test])], [f"{test} fails without it too: a claim [code.py]"]),
        ([(2, [])], ["pytest ended with 2: a claim [code.py]"]),
    ):
        seen = []

        def run_tests(place, tests, *options, runs=runs, seen=seen):
            assert list(tests) == [test]
            seen.append((place / "code.py").read_text())
            return runs[len(seen) - 1]

        monkeypatch.setattr(mutate, "run_tests", run_tests)
        assert mutate.unnoticed(tmp_path, [mutation]) == wrong
        assert seen == ["one = 2\n", "one = 1\n"][: len(runs)]
    assert (tmp_path / "code.py").read_text() == "one = 1\n"
