"""The tools over versions on runs that publish merged, quantized and several precisions."""

import json
import sys
import time

import msgspec
import pytest
from granted_groups import copied, made_up_group, put_group, start_with_groups
from heartbeats import put_heartbeat
from packed_run import TRAIN, VERSIONS, train

from deltawire.cli.main import main
from deltawire.config import BuildConfig
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.forking import fork_run
from deltawire.launch.branches.line_statements import LineStatements, line_step
from deltawire.launch.branches.proof_check import check_proof
from deltawire.launch.branches.proving import Derived, prove_run
from deltawire.rl.trainer.verify_intervals import verify_intervals
from deltawire.runtime.lines import line_bucket
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.manifest import encode_manifest
from deltawire.wire.signing import Ed25519Signer

KINDS = {
    "fp8": {"exporter": "fp8-block"},
    "int4": {"exporter": "int4-g32"},
    "merged": {"exporter": "merged", "adapter": {"kind": "lora", "rank": 4, "alpha": 8.0}},
    "bf16 and fp8": {"also_publish": ["fp8-block"]},
}
LINE = "fp8-block"
SIZES = BuildConfig(
    hidden_size=64, layers=1, head_size=16, feed_forward_size=160, vocabulary=300, context=64
)
CHECK = "import os, sys; sys.exit(int(os.environ['DELTAWIRE_VERSION']) >= 2)"


def started(folder, kind):
    """A run of three versions, with stored states at 2 and 3."""
    settings = TRAIN | {"groups_per_step": 2} | KINDS[kind]
    bucket = start_with_groups(folder, groups=2 * VERSIONS, train=settings, sizes=SIZES)
    train(bucket)
    return bucket


ONLY_LONG = {"fp8": pytest.mark.long, "int4": pytest.mark.long}
"""One precision among several, and merged weights, take every way through the tools."""


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=ONLY_LONG.get(kind, ())) for kind in KINDS]
)
def trained(request, tmp_path_factory):
    return started(tmp_path_factory.mktemp("trained"), request.param)


@pytest.fixture(scope="module")
def lined(tmp_path_factory):
    """A run in bf16 that also publishes fp8."""
    return started(tmp_path_factory.mktemp("lined"), "bf16 and fp8")


@pytest.fixture
def asked(capsys):
    """Runs a command with --json, and returns what it printed."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def question(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    return str(path)


@pytest.mark.drills
def test_versions_are_shown_and_compared(trained, asked, question, tmp_path):
    url = trained.url
    assert asked("show", f"{url}@2")["bits"]["changed"] > 0
    page = tmp_path / "diff.html"
    found = asked("diff", f"{url}@0", f"{url}@3", "--on", question, "--page", str(page))
    assert found["answers"]["answers"] == 1
    assert page.stat().st_size > 1000


@pytest.mark.drills
def test_steps_and_groups_are_explained(trained, asked, question):
    found = asked("why", trained.url, "--on", question, "--steps", "1")
    assert len(found["parts"]) == VERSIONS
    assert len(found["groups"]) == 2
    assert all(one["exact"] for one in found["groups"])


@pytest.mark.drills
def test_a_bisection_is_served(trained, asked, tmp_path):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    words = ["--good", "0", "--bad", "3", "--state", str(tmp_path / "state"), "--serve", "--json"]
    assert main(["bisect", trained.url, *words, "--", sys.executable, str(script)]) == 0


@pytest.mark.drills
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize(("version", "state"), [(2, "shared"), (1, "computed")])
def test_a_fork_makes_its_parents_bits(trained, tmp_path, version, state, elsewhere):
    to = str(tmp_path / "elsewhere") if elsewhere else ""
    name, said = f"at-{version}-{elsewhere}", []
    made = fork_run(trained, read_run(trained), version, name, to=to, announce=said.append)
    assert made.state == ("copied" if elsewhere and state == "shared" else state)
    assert bool(said) == (state == "computed")
    fork = open_bucket(made.url)
    for place, number in enumerate(range(2 * version, 2 * VERSIONS)):
        put_group(fork, place, made_up_group(number))
    put_heartbeat(fork, "w0", stored=2 * (VERSIONS - version), at=time.time())
    train(fork)
    config = made.run.config["train"]
    for line in ["", *config.get("also_publish", [])]:
        here, above = (line_bucket(one, line) if line else one for one in (fork, trained))
        for at in range(version, VERSIONS + 1):
            digest = read_manifest(above, read_run(above), at).digest
            assert read_manifest(here, read_run(here), at).digest == digest, (line, at)
            assert load_mirror(here, read_run(here), at=at).digest.hex() == digest
    assert main(["fsck", made.url]) == 0
    assert verify_intervals(fork).exact


def accepted(folder, monkeypatch):
    """Returns if in-toto's own program accepts the layout and its links."""
    program = pytest.importorskip("in_toto.in_toto_verify").main
    links = ["--layout", str(folder / "links/root.layout"), "--link-dir", str(folder / "links")]
    monkeypatch.setattr(
        "sys.argv", ["in-toto-verify", *links, "--verification-keys", str(folder / "key.pem")]
    )
    with pytest.raises(SystemExit) as ended:
        program()
    return not ended.value.code


@pytest.mark.drills
def test_versions_are_proven_and_computed_again(trained, tmp_path, monkeypatch):
    pytest.importorskip("in_toto_attestation")
    assert verify_intervals(trained).exact
    run, signer = read_run(trained), Ed25519Signer.generate()
    found = prove_run(trained, run, VERSIONS, tmp_path / "proof", signer)
    assert (found.versions, found.not_checkable) == (VERSIONS, {})
    further = run.config["train"].get("also_publish", [])
    assert found.lines == dict.fromkeys(further, VERSIONS + 1)
    assert accepted(tmp_path / "proof", monkeypatch)
    assert check_proof(trained, run, tmp_path / "proof", signer.public_key).faults == {}
    for name in further:  # A statement that is taken away is missed.
        (tmp_path / "proof" / "statements" / f"{line_step(name, 2)}.json").unlink()
        checked = check_proof(trained, run, tmp_path / "proof", signer.public_key)
        assert list(checked.faults) == [2]
        assert checked.versions == VERSIONS


@pytest.mark.drills
@pytest.mark.parametrize("listed", [True, False])
def test_lines_that_are_behind_or_not_stated_are_no_fault(lined, tmp_path, monkeypatch, listed):
    """A line was one version behind when the proof was made, or an earlier deltawire made it."""
    pytest.importorskip("in_toto_attestation")
    run, signer = read_run(lined), Ed25519Signer.generate()
    original = LineStatements.statements

    def behind(self, upper, digests):
        return original(self, upper, digests) if upper.version < VERSIONS else []

    with monkeypatch.context() as patched:
        patched.setattr(LineStatements, "statements", behind)
        if not listed:
            patched.setattr(LineStatements, "listed", lambda _self, made, _further: made)
        prove_run(lined, run, VERSIONS, tmp_path / "proof", signer)
    found = check_proof(lined, run, tmp_path / "proof", signer.public_key)
    assert (found.faults, found.lines_not_compared) == ({}, [])
    assert found.versions == VERSIONS + 1
    for path in (tmp_path / "proof" / "statements").glob("line-*"):
        path.unlink()
    found = check_proof(lined, run, tmp_path / "proof", signer.public_key)
    if listed:
        assert found.faults.keys() == set(range(VERSIONS))
        assert found.versions == 1
    else:
        assert (found.faults, found.lines_not_compared) == ({}, [LINE])


@pytest.mark.drills
def test_a_pulled_precision_is_a_derived_edge(lined, tmp_path, monkeypatch):
    """The directory is made again from the line: one with another byte is refused."""
    pytest.importorskip("in_toto_attestation")
    pulled, signer = tmp_path / "pulled", Ed25519Signer.generate()
    assert main(["pull", lined.url, str(pulled), "--precision", LINE]) == 0
    derived = [Derived.parse(f"pull:{LINE}={pulled}")]
    found = prove_run(lined, read_run(lined), VERSIONS, tmp_path / "proof", signer, derived=derived)
    assert found.derived == [f"pull-version-{VERSIONS:010d}-pulled"]
    assert accepted(tmp_path / "proof", monkeypatch)
    (weights,) = pulled.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match="differs"):
        prove_run(lined, read_run(lined), VERSIONS, tmp_path / "odd", signer, derived=derived)


@pytest.mark.drills
def test_the_tools_read_a_line_as_a_run(lined, asked, question, tmp_path):
    url = f"{lined.url}/lines/{LINE}"
    assert asked("show", f"{url}@2")["bits"]["changed"] > 0
    assert asked("diff", f"{url}@0", f"{url}@3", "--on", question)["answers"]["answers"] == 1
    found = asked("why", url, "--on", question, "--steps", "1")
    assert "those of its run" in found["unexplained"][0]["reason"]
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    words = ["--good", "0", "--bad", "3", "--state", str(tmp_path / "state"), "--serve", "--json"]
    assert main(["bisect", url, *words, "--", sys.executable, str(script)]) == 0


@pytest.mark.drills
def test_another_version_of_a_line_is_found(lined, tmp_path):
    """A line whose version 3 has the bits of version 2 is a run of its own right, but not what
    that precision makes of version 3."""
    bucket = copied(lined, str(tmp_path / "run"))
    line = line_bucket(bucket, LINE)
    run = read_run(line)
    two, three = (read_manifest(line, run, at) for at in (2, 3))
    assert two.digest != three.digest
    line.put(
        keys.manifest(3),
        encode_manifest(
            msgspec.structs.replace(
                two, version=3, created_at=three.created_at, metadata=three.metadata
            )
        ),
    )
    faults = verify_intervals(bucket).faults
    assert [one.version for one in faults] == [3]
    assert f"line {LINE}" in faults[0].reason
    pytest.importorskip("in_toto_attestation")
    signer = Ed25519Signer.generate()
    with pytest.raises(CorruptError, match=f"is not what {LINE} makes of version 3"):
        prove_run(bucket, read_run(bucket), 3, tmp_path / "proof", signer)
    assert newest_version(bucket) == 3
