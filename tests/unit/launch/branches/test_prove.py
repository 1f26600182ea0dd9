"""Statements on how a run's versions were made, which in-toto's own programs accept."""

import json
from pathlib import Path

import pytest
from forgotten_users import BOB, CAROL, learned, train
from granted_groups import start_with_groups

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.launch.branches import proving
from deltawire.launch.branches.envelopes import ProofFolder, read_attestation
from deltawire.launch.branches.proof_check import check_proof
from deltawire.launch.branches.proving import Derived, prove_run
from deltawire.launch.branches.statements import (
    BASE_TYPE,
    FIRST_TYPE,
    Commitments,
    base_statement,
    commitment,
)
from deltawire.live.erasure.forgetting import forget_user
from deltawire.store import open_bucket
from deltawire.sync import prune, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.lineage import Forgotten
from deltawire.wire.objects import encode_json
from deltawire.wire.signing import Ed25519Signer

verifylib = pytest.importorskip("in_toto.verifylib")
pytest.importorskip("in_toto_attestation")
exceptions = pytest.importorskip("in_toto.exceptions")
metadata = pytest.importorskip("in_toto.models.metadata")

TRAIN = {
    "groups_per_step": 2, "max_staleness": 99, "versions": 3, "checkpoint_every": 2,
    "anchor_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """A run of three versions, its proof with a directory that was pulled, and the signer."""
    folder = tmp_path_factory.mktemp("proven")
    bucket = start_with_groups(folder, groups=6, train=TRAIN)
    train(bucket, to=3)
    assert main(["keygen", str(folder / "key")]) == 0
    assert main(["pull", bucket.url, str(folder / "pulled")]) == 0
    words = ["prove", bucket.url, "--key", str(folder / "key"), "--out", str(folder / "proof")]
    assert main([*words, "--derived", f"pull={folder / 'pulled'}"]) == 0
    return bucket, folder, Ed25519Signer.read(folder / "key")


@pytest.fixture
def copy(proven, tmp_path):
    """A copy of the run, its proof, and the public key."""
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    for key in proven[0].list(""):
        bucket.put(key, proven[0].get(key, limit=1 << 30))
    return bucket, proven[1] / "proof", proven[2].public_key


def verify(folder):
    """Does what `in-toto-verify` does."""
    from in_toto.models._signer import load_public_key_from_file

    key = load_public_key_from_file(str(folder / "key.pem"))
    layout = metadata.Metadata.load(str(folder / "links" / "root.layout"))
    verifylib.in_toto_verify(layout, {key["keyid"]: key}, link_dir_path=str(folder / "links"))


def test_in_toto_accepts_the_layout_and_the_links(proven, monkeypatch):
    from in_toto.in_toto_verify import main as program

    links = proven[1] / "proof" / "links"
    words = ["--layout", str(links / "root.layout"), "--link-dir", str(links)]
    words += ["--verification-keys", str(links.parent / "key.pem")]
    monkeypatch.setattr("sys.argv", ["in-toto-verify", *words])
    with pytest.raises(SystemExit) as ended:
        program()
    assert not ended.value.code


def test_a_link_of_other_materials_is_refused(proven, tmp_path, monkeypatch):
    """Version 3 states another version 2 than the one that was made."""
    honest = proving.version_statement

    def lying(*given):
        made = honest(*given)
        if made.name.endswith("3"):
            made.materials["version/2"] = {"sha256": "00" * 32}
        return made

    monkeypatch.setattr(proving, "version_statement", lying)
    bucket, _, signer = proven
    prove_run(bucket, read_run(bucket), 3, tmp_path / "proof", signer)
    with pytest.raises(exceptions.RuleVerificationError, match="version/2"):
        verify(tmp_path / "proof")


def test_a_statement_says_what_a_version_was_made_of(proven):
    bucket, folder, signer = proven
    path = folder / "proof" / "statements" / "version-0000000002.json"
    found = read_attestation(path, signer.public_key)
    made = found["predicate"]["buildDefinition"]
    assert [one["name"] for one in made["resolvedDependencies"]] == [
        "version/0", "version/1", "group/0", "group/1", "configuration", "code",
    ]  # fmt: skip
    (subject,) = found["subject"]
    digest = read_manifest(bucket, read_run(bucket), 2).digest
    assert subject["digest"]["deltawireDigest"] == digest
    other = read_attestation(path.with_name("version-0000000001.json"), signer.public_key)
    assert made["resolvedDependencies"][1]["digest"] == other["subject"][0]["digest"]
    with pytest.raises(InputError, match="no statement that this key signed"):
        read_attestation(path, Ed25519Signer.generate().public_key)


def test_a_derived_directory_is_made_again(proven, tmp_path):
    bucket, folder, signer = proven
    (path,) = (folder / "proof" / "statements").glob("pull-*.json")
    names = {one["name"] for one in read_attestation(path, signer.public_key)["subject"]}
    assert any(name.endswith("/model.safetensors") for name in names)
    other = tmp_path / "other"
    other.mkdir()
    for one in (folder / "pulled").iterdir():
        (other / one.name).write_bytes(one.read_bytes())
    (other / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json differs"):
        prove_run(
            bucket, read_run(bucket), 3, tmp_path / "proof", signer,
            derived=[Derived("pull", other)],
        )  # fmt: skip
    assert Derived.parse("int8-row:q_proj,o_proj=out") == Derived(
        "int8-row", Path("out"), ("q_proj", "o_proj")
    )
    with pytest.raises(InputError, match="is not KIND=DIR"):
        Derived.parse("out")


def test_a_quantized_directory_is_made_again(proven, tmp_path):
    bucket, folder, signer = proven
    words = ["pack", str(folder / "pulled"), "--format", "int8-row", "--layers", "o_proj"]
    assert main([*words, "--out", str(tmp_path / "packed")]) == 0
    found = prove_run(
        bucket, read_run(bucket), 3, tmp_path / "proof", signer,
        derived=[Derived("int8-row", tmp_path / "packed", ("o_proj",))],
    )  # fmt: skip
    assert found.derived == ["int8-row-version-0000000003-packed"]
    verify(tmp_path / "proof")
    assert_one_byte_is_refused(bucket, tmp_path, signer, f"int8-row:o_proj={tmp_path / 'packed'}")


def assert_one_byte_is_refused(bucket, folder, signer, text):
    derived = Derived.parse(text)
    weights = max(derived.directory.rglob("*.safetensors"), key=lambda one: one.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match=f"{weights.name} differs"):
        prove_run(bucket, read_run(bucket), 3, folder / "odd", signer, derived=[derived])
    assert not (folder / "odd").exists()


def test_an_export_is_made_again(proven, tmp_path):
    bucket, _, signer = proven
    out = tmp_path / "exported"
    assert main(["export", f"{bucket.url}@3", str(out)]) == 0
    text = f"export={out}"
    found = prove_run(
        bucket, read_run(bucket), 3, tmp_path / "proof", signer, derived=[Derived.parse(text)]
    )
    assert found.derived == ["export-version-0000000003-exported"]
    verify(tmp_path / "proof")
    assert_one_byte_is_refused(bucket, tmp_path, signer, text)
    with pytest.raises(InputError, match="a delta export cannot"):
        prove_run(
            bucket, read_run(bucket), 3, tmp_path / "other", signer,
            derived=[Derived("export", out, ("1",))],
        )  # fmt: skip


def test_statements_are_compared_with_the_bucket(copy, capsys):
    bucket, folder, public_key = copy
    run = read_run(bucket)
    found = check_proof(bucket, run, folder, public_key)
    assert (found.versions, found.faults, found.unlinked) == (4, {}, 0)
    words = ["--proof", str(folder), "--signed-by", public_key]
    assert main(["verify-training", bucket.url, *words]) == 0
    assert "4 statements agree with the bucket" in capsys.readouterr().out
    salt = keys.proof_salt("w0", 2)
    bucket.put(salt, b"x" * 32)
    assert check_proof(bucket, run, folder, public_key).faults == {
        2: "the statement names another group"
    }
    assert main(["verify-training", bucket.url, *words]) == 5
    assert "version 2: the statement names another group" in capsys.readouterr().out
    bucket.put(keys.manifest(1), bucket.get(keys.manifest(2), limit=1 << 20))
    assert min(check_proof(bucket, run, folder, public_key).faults) == 1


def test_a_version_without_a_statement_is_found(copy, tmp_path):
    bucket, folder, public_key = copy
    (tmp_path / "statements").mkdir()
    for one in (folder / "statements").iterdir():
        if "2" not in one.name:
            (tmp_path / "statements" / one.name).write_bytes(one.read_bytes())
    found = check_proof(bucket, read_run(bucket), tmp_path, public_key)
    assert found.faults == {2: "no statement says how it was made"}
    with pytest.raises(InputError, match="holds no statements"):
        check_proof(bucket, read_run(bucket), tmp_path / "none", public_key)


def test_versions_that_retention_deleted_are_taken_from_their_statements(copy, capsys):
    """The statements of later versions are not blamed, nor those after a damaged one."""
    bucket, folder, public_key = copy
    run = read_run(bucket)
    data = bucket.get(keys.manifest(1), limit=1 << 20)
    bucket.put(keys.manifest(1), b"junk")
    assert set(check_proof(bucket, run, folder, public_key).faults) == {1}
    bucket.delete(keys.manifest(1))
    assert check_proof(bucket, run, folder, public_key).faults == {1: "the run has no such version"}
    bucket.put(keys.manifest(1), data)
    assert prune(bucket, run, cutoff=2, grace_s=0).pruned_below == 2
    found = check_proof(bucket, run, folder, public_key)
    assert (found.versions, found.not_compared, found.faults) == (2, 2, {})
    words = ["--proof", str(folder), "--signed-by", public_key]
    assert main(["verify-training", bucket.url, *words]) == 0
    assert "2 statements not compared: retention" in capsys.readouterr().out


def test_random_bytes_that_are_missing_are_no_erasure(copy):
    bucket, folder, public_key = copy
    bucket.delete(keys.proof_salt("w0", 2))
    found = check_proof(bucket, read_run(bucket), folder, public_key)
    assert found.faults == {2: found.faults[2]}
    assert "its group is not" in found.faults[2]


def test_a_group_erased_meanwhile_keeps_no_random_bytes(copy):
    bucket = copy[0]
    commitments, place = Commitments(bucket), ("w0", 2)
    bucket.delete(keys.rollout(*place))
    bucket.delete(keys.proof_salt(*place))
    record = Forgotten(run=read_run(bucket).id, user="b0" * 16, at=0.0, groups=[place])
    bucket.put(keys.live_forgotten("b0" * 16), encode_json(record))
    assert commitments.of(*place, "") is None
    assert commitments.why_gone(2, [place]) == "groups were erased"
    assert not bucket.exists(keys.proof_salt(*place))


def test_a_first_version_that_is_no_base_says_so(proven):
    bucket = proven[0]
    run = read_run(bucket)
    kinds = [base_statement(run, read_manifest(bucket, run, at), {}).kind for at in (0, 2)]
    assert kinds == [BASE_TYPE, FIRST_TYPE]


def test_two_derived_directories_of_one_name_are_refused(proven, tmp_path):
    bucket, _, signer = proven
    twice = [Derived("pull", tmp_path / one / "model") for one in ("a", "b")]
    with pytest.raises(InputError, match="two --derived would be stated as pull-"):
        prove_run(bucket, read_run(bucket), 3, tmp_path / "proof", signer, derived=twice)


def test_forgetting_makes_commitments_unlinkable(tmp_path, capsys):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    learned(bucket, {1: BOB, 5: CAROL})
    run, signer = read_run(bucket), Ed25519Signer.generate()
    prove_run(bucket, run, 1, tmp_path / "before", signer)
    for path in (tmp_path / "before").rglob("*.*"):
        assert BOB not in path.read_text()
        assert CAROL not in path.read_text()
    step = CommitMetadata.of(read_manifest(bucket, run, 1).metadata, run="", version=1)
    (stated,) = step.hashes or [""]
    salt = bucket.get(keys.proof_salt("live", 0), limit=64)
    made = commitment(salt, "live", 0, stated)
    path = tmp_path / "before" / "statements" / "version-0000000001.json"
    assert made in json.dumps(read_attestation(path, signer.public_key))
    forget_user(bucket, run, BOB, no_trainer=True)
    assert bucket.get(keys.proof_salt("live", 0), limit=64) is None
    found = check_proof(bucket, run, tmp_path / "before", signer.public_key)
    assert (found.versions, found.unlinked, found.faults) == (2, 1, {})
    again = prove_run(bucket, run, 1, tmp_path / "after", signer)
    assert again.not_checkable == {1: "groups were erased"}
    assert bucket.get(keys.proof_salt("live", 0), limit=64) is None
    assert check_proof(bucket, run, tmp_path / "after", signer.public_key).faults == {}


def test_without_a_key_or_with_a_full_folder_nothing_is_written(proven, capsys):
    bucket, folder, signer = proven
    assert main(["prove", bucket.url, "--out", str(folder / "new")]) == 2
    assert "need a key" in capsys.readouterr().err
    with pytest.raises(InputError, match="not empty"):
        ProofFolder(folder / "proof", signer)
    assert main(["verify-training", bucket.url, "--proof", str(folder)]) == 2


def test_openssf_model_signing_takes_a_pulled_directory(proven, tmp_path):
    signing = pytest.importorskip("model_signing.signing")
    verifying = pytest.importorskip("model_signing.verifying")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key").write_bytes(pem)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub").write_bytes(public)
    model = (proven[1] / "pulled").resolve()
    signer = signing.Config().use_elliptic_key_signer(private_key=tmp_path / "key")
    signer.sign(model, tmp_path / "model.sig")
    checker = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
    checker.verify(model, tmp_path / "model.sig")


@pytest.mark.parametrize("text", ["merge:x=DIR", "pull:a,b=DIR"])
def test_layers_that_a_kind_does_not_have_are_refused(text):
    with pytest.raises(InputError, match="--derived"):
        Derived.parse(text)
